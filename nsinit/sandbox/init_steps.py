"""PID 1's own steps, before and after the builder's work; `build` has their order.

Few and small steps: every page that PID 1 writes is copied for this one process and stays its own.
Sources: cgroup_namespaces(7); proc(5) hidepid; capabilities(7); prctl(2) PR_SET_PDEATHSIG; madvise(2)
MADV_MERGEABLE.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import linecache
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass, field

from nsinit.kernel import capabilities, landlock, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.files import keep_only, write_file
from nsinit.kernel.seccomp.filters import Filters
from nsinit.kernel.syscalls import FilterProgram
from nsinit.sandbox.builder_steps import SHELLS_DIRECTORY
from nsinit.steps import Crash, Steps
from nsinit.wire import control
from nsinit.wire.validate import MAX_OPEN_FILES

_FIRST_FREE_FD = 64
"""Above the numbers that a shell's link has in the shell."""

OPEN_FILES = 1024
"""The limit of open files that a process begins with: select(2) can't count further."""

_NETLINK_SOCK_DIAG = 4

_LIMITS = (
    # CORE is 1: with a `|pipe` core_pattern the kernel ignores 0 and starts the host's handler as root; 1 means none.
    (resource.RLIMIT_CORE, 1, 1),
    (resource.RLIMIT_NOFILE, OPEN_FILES, MAX_OPEN_FILES),
    (resource.RLIMIT_MEMLOCK, 8 << 20, 8 << 20),
    (resource.RLIMIT_STACK, 8 << 20, resource.RLIM_INFINITY),
    (resource.RLIMIT_MSGQUEUE, 819200, 819200),
    (resource.RLIMIT_SIGPENDING, 4096, 4096),
)


NAME = "sandkasten-init"
"""The name in `/proc/<pid>/comm`."""


@dataclass(slots=True)
class Init:
    """A process on its way to PID 1 of a sandbox: its inputs, and the state that its steps leave."""

    base: int
    userns_fd: int
    attach_files: tuple[str, ...]
    listener_fd: int
    control_fd: int
    proc_path: str
    last_capability: int
    landlock_abi: int
    filters: Filters
    root_id: control.RootId | None = None
    """The root that PID 1 must find itself in, once the builder is done."""
    root_inside: bool = False
    """Whether commands may be root."""
    files_only: bool = False
    """Whether there are no commands, only requests for files."""
    filter: FilterProgram | None = None
    """The system call filter of the session; None is `off`."""
    oom_fd: int = -1
    """PID 1's own `oom_score_adj`, open for reading and writing, and its value."""
    oom_score: int = 0
    sockets: int = 0
    """The most datagram and netlink sockets of the session; of internet sockets there may be more."""
    counter_fds: tuple[int, int] = (-1, -1)
    """`/proc/net/sockstat` and `protocols` of the session's network, open for reading."""
    diag_fd: int = -1
    """A socket of sock_diag(7) in the session's network; -1 where the kernel has none."""
    shells_fd: int = -1
    """The directory of the shells that nobody can read, which is in no mount table; -1 without commands."""
    asked: tuple[int, int, int, int, int] | None = None
    """The fields of `runner.server.sockets.Asked`, once there is a filter."""
    open_files: int = OPEN_FILES
    """The highest limit of open files that a process may set."""
    merge_pages: bool = False
    """Whether the kernel may merge pages of PID 1 with equal ones of other PID 1s."""
    steps: Steps = field(default_factory=Steps)
    crash: Crash | None = None
    """The crash point, if a test asked for one."""

    @property
    def kept_fds(self) -> set[int]:
        """The descriptors of nsinit's that PID 1 keeps."""
        return {0, 1, 2, self.listener_fd, self.control_fd, self.userns_fd}


def arm_parent_death(init: Init) -> None:
    # Until the sandbox is whole it dies with nsinit, whose child it is (CLONE_PARENT): nobody else knows of it.
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()  # a collection would write to, and so copy, the pages of every object


def take_name(init: Init) -> None:
    syscalls.set_name(NAME)


def close_descriptors(init: Init) -> None:
    """Close every descriptor but PID 1's own: first thing, and again last. With no exec, no close-on-exec flag ever
    acts (CVE-2024-21626)."""
    keep_only(init.kept_fds)


def start_session(init: Init) -> None:
    # A session and process group of its own: a signal to nsinit's group does not reach it (setsid(2)).
    os.setsid()


def attach_cgroups(init: Init) -> None:
    """Join the v1 cgroups, before the cgroup namespace is made, so that the session sees itself at `/`."""
    for path in init.attach_files:
        write_file(path, "0")


def unshare_cgroups(init: Init) -> None:
    # The cgroups of this moment become the namespace's root (cgroup_namespaces(7)), so PID 1 must be in its own by now.
    syscalls.unshare(k.CLONE_NEWCGROUP)


def set_oom_score(init: Init) -> None:
    """Drop a negative score that nsinit inherited from a protected daemon; the runner raises the score of its forks."""
    with open("/proc/self/oom_score_adj", "r+b", buffering=0) as file:
        if int(file.read()) < 0:
            file.write(b"0")


def set_limits(init: Init) -> None:
    for kind, soft, hard in _LIMITS:
        ceiling = resource.getrlimit(kind)[1]
        hard = hard if ceiling == resource.RLIM_INFINITY else ceiling if hard == -1 else min(hard, ceiling)
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def mount_proc(init: Init) -> None:
    """Mount `proc` on the stage, from where the builder moves it: only a process of the pid namespace gets the right
    `proc`.

    PID 1 is in the group that sees all processes; commands see their own uid's, so `/proc/1` isn't there.
    """
    flags = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC
    syscalls.mount("proc", init.proc_path, "proc", flags, f"hidepid=invisible,gid={capabilities.PROC_GROUP}")
    control.say_proc(init.control_fd)


def enter_root(init: Init) -> None:
    """Check that the builder's pivot_root moved the root of this process; a process after chroot(2) would be left
    behind."""
    os.chdir("/")
    status = os.stat("/")
    if (status.st_dev, status.st_ino) != init.root_id:
        raise OSError(errno.ESTALE, "this is not the root that was built", "/")


def keep_shells(init: Init) -> None:
    if not init.files_only:
        fd = os.open(f"/{SHELLS_DIRECTORY}", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        init.shells_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
        os.close(fd)
        syscalls.umount2(f"/{SHELLS_DIRECTORY}", k.MNT_DETACH)
        os.rmdir(f"/{SHELLS_DIRECTORY}")


def silence_standard_streams(init: Init) -> None:
    """Put `/dev/null` of the sandbox's own `/dev` on descriptors 0 to 2: no host path and no log pipe shows inside."""
    null_fd = os.open("/dev/null", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    os.close(null_fd)


def keep_oom_file(init: Init) -> None:
    """Open `oom_score_adj` for good: with other ids, and not dumpable, PID 1 could not open it again."""
    init.oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    init.oom_score = int(os.read(init.oom_fd, 16))


def keep_socket_counters(init: Init) -> None:
    # Opened while every part of the path is the kernel's own; reading it later shows the same network.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    init.counter_fds = os.open("/proc/self/net/sockstat", flags), os.open("/proc/self/net/protocols", flags)


def keep_diag_socket(init: Init) -> None:
    """Open what PID 1 asks for listening sockets by: its filter refuses it later, as it does to commands."""
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        init.diag_fd = socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG).detach()
    except OSError as error:  # EPROTONOSUPPORT: the kernel has no sock_diag, and PID 1 reads `/proc/net/tcp`
        if error.errno != errno.EPROTONOSUPPORT:
            raise


def join_user_namespace(init: Init) -> None:
    """Join the session's user namespace. The one supplementary group has no number there: it can be lost, and not be
    got."""
    # Before setns(2): inside, setgroups(2) takes only ids that the namespace maps.
    os.setgroups([capabilities.PROC_GROUP])
    syscalls.setns(init.userns_fd, k.CLONE_NEWUSER)
    os.close(init.userns_fd)


def drop_bounding_set(init: Init) -> None:
    capabilities.drop_bounding_set(init.last_capability, root_inside=init.root_inside)


def become_runner(init: Init) -> None:
    capabilities.become_runner()


def keep_runner_capabilities(init: Init) -> None:
    capabilities.keep_runner_capabilities(root_inside=init.root_inside)


def leave_keyring(init: Init) -> None:
    # The inherited keyring is nsinit's; keys in it could be found by possession (keyrings(7)).
    syscalls.join_session_keyring()


def forbid_dumps(init: Init) -> None:
    # To trace PID 1 or open its /proc files then takes CAP_SYS_PTRACE, which no command has (ptrace(2)).
    syscalls.prctl(k.PR_SET_DUMPABLE, 0)


def lock_imports(init: Init | None = None) -> None:
    """Make every import of a module that isn't loaded fail: after pivot_root it would read, and run, the image's files.

    nsinit does so to itself before its first fork, so in a child the step only makes sure (and costs nothing).
    """
    for entries in (sys.path, sys.meta_path, sys.path_hooks):
        entries.clear()
    sys.path_importer_cache.clear()
    linecache.getlines = lambda *_args, **_kwargs: []


def begin(init: Init, word: control.Begin) -> None:
    """Take over the builder's word."""
    init.root_id = word.device, word.inode
    init.filter = init.filters.programs[word.filter_number]
    init.root_inside = word.root_inside
    init.open_files = word.open_files
    init.files_only = word.files_only
    init.sockets = word.sockets


def offer_pages(init: Init) -> None:
    """Let the kernel merge what PID 1 has mapped by now: nothing foreign was read into it yet.

    By madvise(2), not by PR_SET_MEMORY_MERGE (prctl(2)): the areas are marked, not the process, so a program that is
    executed has no mark, and what is mapped later has none either.
    """
    if init.merge_pages:
        syscalls.advise_all(k.MADV_MERGEABLE)


def keep_inside(init: Init) -> None:
    landlock.keep_inside(init.landlock_abi)


def limit_open_files(init: Init) -> None:
    """Set the plan's limit of open files, which was not known at birth; from here on a process can only lower its
    inheritance."""
    hard = min(init.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))


def filter_system_calls(init: Init) -> None:
    """Put PID 1 under the system call filter, last of all: no step before needs a hole in it."""
    if init.filter is not None:
        own = int(init.diag_fd >= 0)
        init.asked = syscalls.set_asking_filter(init.filter), *init.counter_fds, init.sockets, own
