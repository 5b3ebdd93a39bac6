"""Findings about an installation: its settings, its files and its machine. Reads and changes nothing.

Imports `config` and `host`; `cli/security.py` prints the findings. Begin with `check.py`.
"""
