"""Adapters that let agent frameworks use a sandbox, one file each; for the programs that want them.

Imports the clients (`sdk`, `sync`, `mcp`), and in each file the framework; no package imports it. Begin with
docs/agents.md, which says which to choose and has an example of each.
"""
