"""The tree of actors that is the daemon: one mailbox, one nursery and one owner of its state for each actor.

`core.py` is the only mailbox loop, `supervision.py` restarts what fails, `tree.py` puts the children together and
answers the supervisor's interface. Packages in order, each importing those before it alone: `services`, `runs` and
`workspaces`, `session`, `node`. Imports every package below `api`, and nothing of HTTP; `app`, `security` and the
command line import it. Begin with `core.py`, then `tree.py`.
"""
