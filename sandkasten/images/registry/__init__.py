"""Images from a registry (OCI distribution specification): references, documents, connections, downloads.

Runs on trio, without privilege, in the daemon or in a child of the command line that has given root away. `reference`
is what a user writes, `documents` do no input or output, `dialing` decides which addresses may be dialled, `client`
makes requests and `blobs` verified downloads. Imports `model`, `config` and `crash`, and egress' kinds of addresses;
the rest of `images`, the actors of images and the command line import it. Begin with `pulling.py`, a pull in order.
"""
