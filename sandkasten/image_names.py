"""Names of images, as the server checks them and builds choose them.

The builds run where no server is installed, so this module needs the standard library alone.
"""

import re

IMAGE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}\Z")

NEW_IMAGE = re.compile(r"(?P<name>[a-zA-Z0-9][a-zA-Z0-9._-]{0,63})(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?\Z")
"""An image that is to be made here: NAME or NAME:TAG."""

IMAGE_REFERENCE = re.compile(
    r"(?P<name>[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}"
    r"|(?=.{3,512}\Z)[a-zA-Z0-9\[][a-zA-Z0-9.:\]-]{0,254}(?:/[a-z0-9][a-z0-9._-]{0,254}){1,64})"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?\Z"
)
"""An image as users name it: NAME, NAME:TAG, REGISTRY/REPOSITORY[:TAG], each with or without @DIGEST. Broader than the
grammar of references, which `images/registry/reference.py` has: what is none leads to no image."""

BUILD_CACHE = "build-cache."
"""Beginning of the names of images that builds keep for later ones: lists leave them out, and prunes remove them."""
