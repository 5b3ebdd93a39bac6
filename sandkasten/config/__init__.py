"""The configuration: frozen values with defaults and bounds (`values.py`), where they come from (`files.py`), and an
operator's own system call filters (`seccomp.py`).

Imports `model` and `installation`, egress' rules and nsinit's wire contract. Every layer above may read the values;
only the command line reads files. Begin with `Config` in `values.py`.
"""

from sandkasten.config.values import GROUP_MARK as GROUP_MARK
from sandkasten.config.values import MIB as MIB
from sandkasten.config.values import AdmissionSettings as AdmissionSettings
from sandkasten.config.values import Config as Config
from sandkasten.config.values import DashboardSettings as DashboardSettings
from sandkasten.config.values import Defaults as Defaults
from sandkasten.config.values import DiskSettings as DiskSettings
from sandkasten.config.values import EgressSettings as EgressSettings
from sandkasten.config.values import EventsSettings as EventsSettings
from sandkasten.config.values import FaultSettings as FaultSettings
from sandkasten.config.values import ImagesSettings as ImagesSettings
from sandkasten.config.values import IsolationSettings as IsolationSettings
from sandkasten.config.values import Maximum as Maximum
from sandkasten.config.values import PoolSettings as PoolSettings
from sandkasten.config.values import PoolSize as PoolSize
from sandkasten.config.values import PreviewSettings as PreviewSettings
from sandkasten.config.values import RecordsSettings as RecordsSettings
from sandkasten.config.values import RunsSettings as RunsSettings
from sandkasten.config.values import SecuritySettings as SecuritySettings
from sandkasten.config.values import ServerSettings as ServerSettings
from sandkasten.config.values import Validator as Validator
from sandkasten.config.values import WorkspaceSettings as WorkspaceSettings
from sandkasten.installation import DEFAULT_DATA_DIR as DEFAULT_DATA_DIR
from sandkasten.installation import ConfigError as ConfigError
