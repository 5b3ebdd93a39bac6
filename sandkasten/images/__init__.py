"""The image store on disk: the catalogue, imports from archives, systems of Debian packages, and the
`host` image made from the machine's `/usr`.

Blocking code; `actors/services/images.py` runs it in threads, the command line calls it directly. Imports `model` and
nsinit's wire contract. Begin with `catalog.py`.
"""
