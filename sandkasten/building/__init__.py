"""Builds of images by a Dockerfile, through the SDK: each RUN is a session of the server's.

Imports `sdk` and `image_names`; the command line imports it. Begin with
`builder.py`, which performs the steps. `dockerfile.py` reads a file into instructions, `words.py` expands their
variables, `context.py` reads the directory that COPY takes files from, and `ignoring.py` its `.dockerignore`.
"""
