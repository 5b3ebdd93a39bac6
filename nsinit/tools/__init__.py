"""Programs that run as processes of their own, beside the fork server.

The launcher that starts nsinit for an unprivileged daemon, the probe of the machine, the look at leftovers, the
unpacker of image archives. Each file is an entry that is executed by its path; nothing imports them but `drop.py`.
"""
