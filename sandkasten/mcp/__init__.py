"""MCP server: a sandbox as tools of a model, over the SDK and nothing else of ours.

`tools.py` is the table of tools, `sandboxes.py` finds the sandbox that a call is about, `text.py` shortens what a model
reads. `server.py` binds the table to the `mcp` package (extra `[mcp]`), for standard input and output and for `/mcp` of
the daemon; it alone imports that package. Imports `sdk`; `adapters`, the front and the command line import it. Begin
with `tools.py`.
"""
