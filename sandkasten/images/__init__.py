"""The image store on disk: the catalogue, imports from archives, systems of Debian packages, and the
`host` image made from the machine's `/usr`.

Blocking code; `actors/services/images.py` runs it in threads, the command line calls it directly. Stands on `model` and
`config`, on nsinit's wire contract, and on `nsinit.spawn`, which starts the unpacker. Begin with `catalog.py`.
"""
