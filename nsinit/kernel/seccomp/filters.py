"""The filters of a running nsinit, compiled before anything is forked: for a PID 1 one is a single system call.

Owns which profile names can be had. Sources: seccomp(2) SECCOMP_SET_MODE_FILTER (needs no_new_privs, which is set).
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from nsinit.kernel import syscalls
from nsinit.kernel.seccomp.bpf import encode
from nsinit.kernel.seccomp.compile import compile_command_filter, compile_list, compile_profile
from nsinit.kernel.seccomp.profile import MAX_PROFILES, Profile, ProfileError
from nsinit.kernel.seccomp.profiles import BUILT_IN, OFF
from nsinit.kernel.seccomp.table import NUMBERS, Arch


def _native() -> Arch:
    machine = platform.machine()
    for arch in NUMBERS:
        if arch == machine:
            return arch
    raise ProfileError(f"there is no table of the system calls of {machine}")


ARCH: Final = _native()


@dataclass(frozen=True, slots=True)
class Filters:
    """Programs by profile; they are told apart by their place. `off` is the one without."""

    names: tuple[str, ...]
    programs: tuple[syscalls.FilterProgram | None, ...]

    def number(self, name: str) -> int:
        """Return the place of a profile. Raises `ProfileError`."""
        if name not in self.names:
            raise ProfileError(f"there is no seccomp profile {name[:40]!r}")
        return self.names.index(name)


def prepare(own: Iterable[Profile] = ()) -> Filters:
    """Compile the profiles that come along and the operator's own. Raises `ProfileError`."""
    programs: dict[str, syscalls.FilterProgram | None] = {OFF: None}
    own = tuple(own)
    for profile in own:
        if "ask" in (profile.default, *(rule.action for rule in profile.rules)):
            raise ProfileError(f"{profile.name}: PID 1 is asked by the floor alone")
    for profile in (*BUILT_IN.values(), *own):
        if profile.name in programs:
            raise ProfileError(f"{profile.name}: there is a profile of that name already")
        programs[profile.name] = syscalls.FilterProgram(encode(compile_profile(profile, ARCH)))
    if len(programs) - len(BUILT_IN) - 1 > MAX_PROFILES:
        raise ProfileError(f"more than {MAX_PROFILES} profiles")
    return Filters(tuple(programs), tuple(programs.values()))


def list_filter(names: Collection[str]) -> syscalls.FilterProgram:
    """Return a filter that lets pass what is named, and of that whatever this architecture has."""
    return syscalls.FilterProgram(encode(compile_list(names, ARCH)))


def command_filter() -> syscalls.FilterProgram:
    """Return the second filter, that of commands."""
    return syscalls.FilterProgram(encode(compile_command_filter(ARCH)))
