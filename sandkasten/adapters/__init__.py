"""Adapters that let agent frameworks use a sandbox, one file each; imported by nobody but the program that wants one.

Each imports its framework and the clients (`sandkasten.sdk`, `sandkasten.sync`, `sandkasten.errors`), and nothing else
of ours. docs/agents.md says which to choose, and has an example of each.
"""
