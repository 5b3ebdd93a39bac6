"""Programs beside the shells: commands given as an argument list, stateless commands, background processes.

Imports `shell` and below; `server` imports it. Begin with `programs.py`.
"""
