"""The way out: the process that carries a session's connections, and answers its DNS. The way in: the gateway to
previews. Secrets: the broker, which puts values into requests. Each is a process with its own user, no capability and
no key.

Trusts no byte of a sandbox and none of a server. `policy` decides on names and addresses, `addresses` on what may be
dialled; `dns`, `hello`, `http`, `proxy` and `preview` read hostile bytes and do no input or output. Imports the
standard library, trio, attrs and h11, and cryptography in `authority`. The daemon imports `protocol`, `knocking`,
`brokering`, `names` and `policy`, which need attrs alone. Begin with `policy`, with `gateway` or with `broker`.
"""
