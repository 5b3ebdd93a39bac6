"""The `sandkasten` command, in two halves: verbs for the operator of a server, and verbs for those who use sessions.

The operator's are parsed in `operator.py`, have a module each, and share `common.py`. Those of users begin with
`client.py`, speak through the SDK alone, and need nothing of the server: `runs.py`, `terminal.py`, `sessions.py`,
`transfer.py`, `nodes.py`, `context.py`, `output.py`, `completion.py`. The only package that receives signals or gives
privilege away. Imports every package; no package imports it. Begin with `main.py`, the table of verbs.
"""
