"""Values, under the published client's name of the module: see `sandkasten/sdk/types.py`."""

from sandkasten.sdk.types import ExecChunk as ExecChunk
from sandkasten.sdk.types import ExecResult as ExecResult
from sandkasten.sdk.types import ReadResult as ReadResult
from sandkasten.sdk.types import SessionInfo as SessionInfo
from sandkasten.sdk.types import SessionStats as SessionStats
from sandkasten.sdk.types import WorkspaceInfo as WorkspaceInfo
