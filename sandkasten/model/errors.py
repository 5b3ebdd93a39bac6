"""The errors of the daemon, under the name by which the daemon knows them: the tree of `sandkasten/errors.py`."""

from sandkasten.errors import *  # noqa: F403
