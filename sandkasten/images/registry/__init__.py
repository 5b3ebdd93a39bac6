"""Images from a registry (OCI distribution specification): references, documents, connections, downloads.

Runs on trio, without privilege, in the daemon or in a child of the command line that has given root away. Imports
`model`, `config` and `crash`. Begin with `pulling.py`, which has the steps of a pull in order.

    reference    what a user writes, taken apart
    documents    manifests, indexes and configurations, without input and output
    dialing      connections to addresses that may be dialled
    credentials  names and passwords by registry
    client       requests: authentication, redirects, mirrors
    blobs        downloads that are verified, and go on after a break
    pulling      a pull from its reference to an image with a name
"""
