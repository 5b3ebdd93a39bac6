"""Values of the supervisor's interface: frozen attrs classes, free of HTTP, of I/O and of kernel details.

Imports `errors`, `image_names` and the bounds of nsinit's wire contract; everything may import it. The values of
sessions, runs and events are importable from here; those of workspaces, the node, keys and lists from their modules.
Times are aware UTC datetimes in records and seconds as floats in durations; sizes carry their unit in the
name. Begin with `session.py`, then `lifecycle.py`, the table of a session's states.
"""

from sandkasten.image_names import IMAGE_NAME as IMAGE_NAME
from sandkasten.image_names import IMAGE_REFERENCE as IMAGE_REFERENCE
from sandkasten.image_names import NEW_IMAGE as NEW_IMAGE
from sandkasten.model.events import Event as Event
from sandkasten.model.events import EventType as EventType
from sandkasten.model.run import DEFAULT_SHELL as DEFAULT_SHELL
from sandkasten.model.run import EXEC_ID as EXEC_ID
from sandkasten.model.run import SHELL_NAME as SHELL_NAME
from sandkasten.model.run import Cause as Cause
from sandkasten.model.run import ExecEnd as ExecEnd
from sandkasten.model.run import ExecInfo as ExecInfo
from sandkasten.model.run import ExecKind as ExecKind
from sandkasten.model.run import ExecResult as ExecResult
from sandkasten.model.run import ExecSpec as ExecSpec
from sandkasten.model.run import ExecState as ExecState
from sandkasten.model.run import Gap as Gap
from sandkasten.model.run import OnDisconnect as OnDisconnect
from sandkasten.model.run import Output as Output
from sandkasten.model.run import OutputSlice as OutputSlice
from sandkasten.model.run import Port as Port
from sandkasten.model.run import ProcessSpec as ProcessSpec
from sandkasten.model.run import ShellInfo as ShellInfo
from sandkasten.model.run import ShellSpec as ShellSpec
from sandkasten.model.run import Stream as Stream
from sandkasten.model.run import StreamsMode as StreamsMode
from sandkasten.model.run import TerminalSize as TerminalSize
from sandkasten.model.run import TerminalSpec as TerminalSpec
from sandkasten.model.run import Usage as Usage
from sandkasten.model.run import Waited as Waited
from sandkasten.model.run import WaitFor as WaitFor
from sandkasten.model.run import WarmProcess as WarmProcess
from sandkasten.model.run import is_made as is_made
from sandkasten.model.run import make_exec_id as make_exec_id
from sandkasten.model.session import ACCOUNT as ACCOUNT
from sandkasten.model.session import ACCOUNT_RULE as ACCOUNT_RULE
from sandkasten.model.session import EXEC_MODES as EXEC_MODES
from sandkasten.model.session import FIXED_BOUNDS as FIXED_BOUNDS
from sandkasten.model.session import FOREVER_S as FOREVER_S
from sandkasten.model.session import LIMIT_BOUNDS as LIMIT_BOUNDS
from sandkasten.model.session import MAX_SPAN_S as MAX_SPAN_S
from sandkasten.model.session import MAX_TTL_S as MAX_TTL_S
from sandkasten.model.session import SECCOMP_NAME as SECCOMP_NAME
from sandkasten.model.session import SECCOMP_PROFILES as SECCOMP_PROFILES
from sandkasten.model.session import SESSION_ID as SESSION_ID
from sandkasten.model.session import STATEFUL as STATEFUL
from sandkasten.model.session import STATELESS as STATELESS
from sandkasten.model.session import STOP_GRACE_BOUNDS_MS as STOP_GRACE_BOUNDS_MS
from sandkasten.model.session import WORKSPACE_ID as WORKSPACE_ID
from sandkasten.model.session import AtEnd as AtEnd
from sandkasten.model.session import EndReason as EndReason
from sandkasten.model.session import FileRules as FileRules
from sandkasten.model.session import Limits as Limits
from sandkasten.model.session import Pause as Pause
from sandkasten.model.session import PauseSpec as PauseSpec
from sandkasten.model.session import Pressure as Pressure
from sandkasten.model.session import Session as Session
from sandkasten.model.session import SessionOptions as SessionOptions
from sandkasten.model.session import SessionPatch as SessionPatch
from sandkasten.model.session import SessionSpec as SessionSpec
from sandkasten.model.session import SessionStats as SessionStats
from sandkasten.model.session import Stall as Stall
from sandkasten.model.session import Status as Status
from sandkasten.model.session import UsageSample as UsageSample
from sandkasten.model.session import file_rules as file_rules
