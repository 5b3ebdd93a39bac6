"""The way out: the process that carries a session's connections, and answers its DNS. Own user, no capability, no key.

Trusts no byte of a sandbox and none of a server. `policy` decides on names and addresses, `addresses` on what may be
dialled; `dns`, `hello`, `http` and `proxy` read hostile bytes and do no input or output. Imports the standard library,
trio, attrs and h11. The daemon imports `protocol` and `policy`, which need attrs alone. Begin with `policy`.
"""
