"""System calls that PID 1 needs and the standard library lacks, as one protocol. Pure declaration: no I/O, no ctypes.

`nsinit` implements it on its own bindings and hands the object to `runner.server.main.run`, so that the code which
lives next to hostile programs never loads a library.

Sources: credentials(7), setfsuid(2), capset(2), PR_SET_CHILD_SUBREAPER(2const), openat2(2),
close_range(2), clone(2) CLONE_INTO_CGROUP.
"""

from __future__ import annotations

from typing import Final, Protocol

AT_FDCWD: Final = -100
"""`dirfd` that stands for the working directory (fcntl.h)."""

RESOLVE_NO_MAGICLINKS: Final = 0x02
"""openat2: refuse `/proc/<pid>/fd/N` and its like while a path is resolved (linux/openat2.h)."""

RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
"""openat2: follow no link at all; never leave the directory the path begins at (linux/openat2.h)."""

FD_MAX: Final = 2**32 - 1
"""`last` of `close_range` that means every descriptor from `first` on."""


class Kernel(Protocol):
    """System calls beyond `os`. Each raises `OSError` when the kernel refuses."""

    def setfsuid(self, uid: int) -> None:
        """Set the uid that file system checks use; the other credentials stay."""

    def setfsgid(self, gid: int) -> None:
        """Set the gid that file system checks use; the other credentials stay."""

    def raise_oom_score(self, raised: bool) -> None:
        """Write `/proc/self/oom_score_adj`, which children inherit: the out-of-memory killer takes this process before
        PID 1, or no longer."""

    def keep_pages_apart(self) -> None:
        """madvise(2), MADV_UNMERGEABLE: take pages that a fork shares with other sandboxes, if PID 1 offers its pages
        for merging, and offer none any more."""

    def prctl_set_child_subreaper(self) -> None:
        """PR_SET_CHILD_SUBREAPER, 1."""

    def clear_caps(self) -> None:
        """capset(2): empty the effective, permitted and inheritable sets, and so the ambient one."""

    def keep_root_caps(self) -> None:
        """capset(2), PR_CAP_AMBIENT: the capabilities of the sandbox's root, across execve(2) and until the last uid 0
        is given up. Fails where no root was provided for."""

    def clear_effective_caps(self) -> None:
        """capset(2): empty the effective set of the sandbox's root. execve(2) fills it again from the ambient set."""

    def make_file_rules(self, readable: list[tuple[int, bool]] | None, writable: list[tuple[int, bool]] | None) -> int:
        """Landlock: return a ruleset, the caller's. Each path is an O_PATH descriptor and whether it is a directory;
        None means that everything is."""

    def enter_file_rules(self, rules_fd: int) -> None:
        """landlock_restrict_self(2): from here on this process and all it starts keep to the ruleset."""

    def restrict_command(self) -> None:
        """Put a command to be under the filter that only commands have: seccomp(2). Without one it does nothing."""

    def openat2(self, dirfd: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
        """openat2(2); the returned descriptor is the caller's."""

    def rename_new(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """renameat2(2), RENAME_NOREPLACE: rename a file in one open directory to a name in another, if that is free."""

    def inotify_init(self) -> int:
        """inotify_init1(2), non-blocking; the returned descriptor is the caller's."""

    def inotify_add_watch(self, fd: int, path: bytes, mask: int) -> int:
        """inotify_add_watch(2): watch a file; return its number, which is the old one if it was watched."""

    def inotify_rm_watch(self, fd: int, watch: int) -> None:
        """inotify_rm_watch(2)."""

    def close_range(self, first: int, last: int) -> None:
        """close_range(2), flags 0."""

    def fork_into_cgroup(self, cgroup_fd: int) -> int:
        """clone3(2) with CLONE_INTO_CGROUP: fork, the child born in the cgroup v2 directory `cgroup_fd`; like `os.fork`
        return its pid, and 0 in the child."""
