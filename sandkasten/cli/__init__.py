"""The `sandkasten` command: one module for each subcommand, and `common.py` for their shared parts.

The only package that receives signals, reads the environment or gives privilege away. Imports every package; no package
imports it. Begin with `main.py`.
"""
