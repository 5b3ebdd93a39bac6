"""Errors, under the published client's name of the module: see `sandkasten/errors.py`."""

from sandkasten.errors import SandkastenAPIError as SandkastenAPIError
from sandkasten.errors import SandkastenError as SandkastenError
from sandkasten.errors import SandkastenStreamError as SandkastenStreamError
