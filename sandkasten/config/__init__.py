"""The configuration: frozen values with defaults and bounds (`values.py`), where they come from (`files.py`), and an
operator's own system call filters (`seccomp.py`).

Imports `model` alone. Every layer above may read the values; only the command line reads files. Begin with `Config` in
`values.py`.
"""

from sandkasten.config.values import DEFAULT_DATA_DIR as DEFAULT_DATA_DIR
from sandkasten.config.values import MIB as MIB
from sandkasten.config.values import Admission as Admission
from sandkasten.config.values import Config as Config
from sandkasten.config.values import ConfigError as ConfigError
from sandkasten.config.values import Dashboard as Dashboard
from sandkasten.config.values import Defaults as Defaults
from sandkasten.config.values import Disk as Disk
from sandkasten.config.values import Events as Events
from sandkasten.config.values import FaultTesting as FaultTesting
from sandkasten.config.values import Isolation as Isolation
from sandkasten.config.values import Maximum as Maximum
from sandkasten.config.values import Pool as Pool
from sandkasten.config.values import Records as Records
from sandkasten.config.values import Runs as Runs
from sandkasten.config.values import Security as Security
from sandkasten.config.values import Server as Server
from sandkasten.config.values import Validator as Validator
from sandkasten.config.values import Workspace as Workspace
