"""The image store on disk: the catalogue, imports from archives, systems of Debian packages, and the `host` image made
from the machine's `/usr`.

Blocking code; `actors/services/images.py` runs it in threads. Imports `model`, `config`, `crash` and `image_names`,
nsinit's wire contract, and `spawn`, which starts the unpacker; `actors`, `app` and above import it. Begin with
`catalog.py`.
"""
