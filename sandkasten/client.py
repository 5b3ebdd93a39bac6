"""Client, under the published client's name of the module: see `sandkasten/sdk/client.py`."""

from sandkasten.sdk.client import SandboxClient as SandboxClient
from sandkasten.sdk.session import Session as Session
from sandkasten.sdk.types import SessionInfo as SessionInfo
from sandkasten.sdk.types import WorkspaceInfo as WorkspaceInfo
