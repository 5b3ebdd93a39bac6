"""The `sandkasten` command: one module for each subcommand, and `common.py` for what they share.

The only package that receives signals, reads the environment or gives privilege away. Imports everything; nothing
imports it. Begin with `main.py`.
"""
