"""The system call filter on both architectures, run by an interpreter: what it says to which call."""

from __future__ import annotations

import errno
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsinit.kernel.seccomp import compile as compiler
from nsinit.kernel.seccomp.bpf import encode
from nsinit.kernel.seccomp.compile import (
    TRAP,
    compile_command_filter,
    compile_list,
    compile_profile,
    compile_refusals,
)
from nsinit.kernel.seccomp.profile import STRICTNESS, Action, ArgTest, Comparison, Profile, ProfileError, Rule
from nsinit.kernel.seccomp.profiles import BUILT_IN, FLOOR, INIT_NEEDS, MVP, STRICT, STRICT_NAMES, STRICT_REFUSED
from nsinit.kernel.seccomp.table import AUDIT_ARCH, NAMES, NUMBERS, WIDTHS, Arch
from nsinit.own_filters import BUILDER, CGROUP_MAKER, DAEMON, MACHINE, NSINIT, PARTS, Part, compile_part
from nsinit.tools import pack, unpack
from tests import cbpf

ARCHES: tuple[Arch, ...] = ("x86_64", "aarch64")
ALLOW, ASK, KILL = 0x7FFF0000, 0x7FC00000, 0x80000000
I386, ARM = 0x40000003, 0x40000028
HIGH = 1 << 32
CLONE_THREAD_FLAGS = 0x3D0F00
"""Flags with which a C library starts a thread."""
FORK_FLAGS = 0x1200011


def refused(number: int) -> int:
    return 0x50000 | number


EPERM, ENOSYS = refused(errno.EPERM), refused(errno.ENOSYS)

CASES = [
    *(("strict", name, (), ALLOW) for name in ("read", "openat", "execve", "futex", "ppoll", "sendmsg", "seccomp")),
    *(("strict", name, (), EPERM) for name in ("ptrace", "process_vm_readv", "pidfd_getfd", "kcmp", "process_madvise")),
    *(("strict", name, (), EPERM) for name in ("io_uring_setup", "userfaultfd", "bpf", "perf_event_open", "keyctl")),
    *(("strict", name, (), EPERM) for name in ("add_key", "request_key", "open_by_handle_at", "setns", "unshare")),
    *(("strict", name, (), EPERM) for name in ("mount", "umount2", "pivot_root", "open_tree", "open_tree_attr")),
    *(("strict", name, (), EPERM) for name in ("move_mount", "fsopen", "fsmount", "mount_setattr", "quotactl_fd")),
    *(("strict", name, (), EPERM) for name in ("reboot", "init_module", "kexec_load", "swapon", "settimeofday")),
    *(("strict", name, (), ENOSYS) for name in ("statmount", "lsm_list_modules", "listns")),
    ("strict", "clone", (FORK_FLAGS,), ALLOW),
    ("strict", "clone", (CLONE_THREAD_FLAGS,), ALLOW),
    *(("strict", "clone", (FORK_FLAGS | 1 << bit,), EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)),
    ("strict", "clone", (HIGH | FORK_FLAGS | 1 << 28,), EPERM),
    ("strict", "ioctl", (0, 0x5413), ALLOW),
    *(("strict", "ioctl", (0, request), EPERM) for request in (0x5412, 0x541C, 0x5423)),
    *(("strict", "ioctl", (0, HIGH | request), EPERM) for request in (0x5412, 0x541C, 0x5423)),
    ("strict", "ioctl", (0, 0xFFFFFFFF_00005412), EPERM),
    ("strict", "socket", (1, 1, 0), ALLOW),
    *(
        (profile, "socket", (high | family, high | kind, high | protocol), ASK)
        for profile in ("strict", "debug", "mvp")
        for family in (2, 10)
        for kind in (1, 2, 3, 0x80801, 0x80802)
        for protocol in (0, 1, 6, 17, 58)
        for high in (0, HIGH)
    ),
    *(("mvp", "socket", (family, 2, protocol), EPERM) for family in (2, 10) for protocol in (115, 136, HIGH | 136)),
    ("strict", "socket", (2, 2, 33), EPERM),
    *(("mvp", "socket", (family, 1, 262), ALLOW) for family in (2, 10)),
    ("strict", "socket", (2, 1, 132), EPERM),
    ("strict", "socket", (2, 1, 262), EPERM),
    ("strict", "socket", (2, 1, HIGH | 132), EPERM),
    ("strict", "socket", (16, 3, 0), ASK),
    ("strict", "socket", (16, 3, 12), EPERM),
    *(("strict", "socket", (family, kind, 0), EPERM) for family in (2, 10) for kind in (4, 5, 6, 10, HIGH | 0x80806)),
    *(("strict", "ioctl", (3, request), EPERM) for request in (0x8940, 0x8982, 0x89A0, HIGH | 0x8941)),
    ("strict", "ioctl", (3, 0x8912), ALLOW),
    ("strict", "socket", (38, 5, 0), EPERM),
    ("strict", "socket", (40, 1, 0), EPERM),
    ("strict", "socket", (17, 3, 0), EPERM),
    ("strict", "socketpair", (1, 1, 0), ALLOW),
    ("strict", "socketpair", (38, 1, 0), EPERM),
    *(("strict", "personality", (persona,), ALLOW) for persona in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF, HIGH, -1)),
    *(("strict", "personality", (persona,), EPERM) for persona in (0x40000, 0x400000, HIGH | 0x40000, 1)),
    ("strict", "prlimit64", (0, 7, 1, 0), ALLOW),
    ("strict", "prlimit64", (0, 4, 0, 1), ALLOW),
    ("strict", "prlimit64", (0, 4, 1, 0), refused(0)),
    ("strict", "prlimit64", (0, HIGH | 4, HIGH, 0), refused(0)),
    ("strict", "setrlimit", (7, 1), ALLOW),
    ("strict", "setrlimit", (HIGH | 4, 1), refused(0)),
    *(("debug", name, (), ALLOW) for name in ("ptrace", "process_vm_readv", "kcmp", "pidfd_getfd", "read")),
    *(("debug", name, (), EPERM) for name in ("mount", "bpf", "unshare", "io_uring_setup", "perf_event_open")),
    ("debug", "personality", (0x40000,), ALLOW),
    ("debug", "personality", (0x400000,), EPERM),
    ("debug", "ioctl", (0, HIGH | 0x5412), EPERM),
    *(("mvp", name, (), ALLOW) for name in ("read", "mbind", "move_pages", "fanotify_mark", "personality")),
    *(("mvp", name, (), EPERM) for name in ("mount", "ptrace", "bpf", "io_uring_enter", "unshare", "keyctl", "setns")),
    *(("mvp", "socket", (family, 1, 0), ALLOW) for family in (0, 1, HIGH | 1)),
    *(
        ("mvp", "socket", (family, 1, 0), EPERM)
        for family in (*range(3, 10), *range(11, 16), *range(17, 48), HIGH | 38)
    ),
    *(("mvp", "socketpair", (family, 1, 0), EPERM) for family in (17, 38, 40, HIGH | 40)),
    *(("mvp", "socket", (16, 3, protocol), EPERM) for protocol in (4, 6, 12, 15, 16, HIGH | 21)),
    ("mvp", "socket", (16, 3, 9), refused(errno.EPROTONOSUPPORT)),
    *(
        (profile, "setsockopt", (3, high | 1, high | option), refused(0))
        for profile in ("strict", "debug", "mvp")
        for option in (7, 8, 37, 65)
        for high in (0, HIGH)
    ),
    *((profile, "setsockopt", (3, 1, HIGH | 26), EPERM) for profile in ("strict", "debug", "mvp")),
    *((profile, "setsockopt", (3, 1, 2), ALLOW) for profile in ("strict", "debug", "mvp")),
    *((profile, "setsockopt", (3, 6, 7), ALLOW) for profile in ("strict", "debug", "mvp")),
    *(
        (profile, name, (*(0,) * index, count), ALLOW if count == most else refused(number))
        for profile in ("strict", "debug", "mvp")
        for names, index, most, number in (
            (("poll", "ppoll"), 1, 2048, errno.EINVAL),
            (("select", "pselect6"), 0, 2048, errno.EINVAL),
            (("setxattr", "lsetxattr", "fsetxattr"), 3, 484, errno.ENOSPC),
        )
        for name in names
        for count in (most, most + 1)
    ),
    *((profile, "setxattrat", (), ENOSYS) for profile in ("strict", "debug", "mvp")),
    ("mvp", "clone", (1 << 28,), EPERM),
    ("mvp", "clone", (FORK_FLAGS,), ALLOW),
    ("mvp", "ioctl", (0, HIGH | 0x5412), EPERM),
    ("mvp", "prlimit64", (0, 4, 1, 0), refused(0)),
    *((profile, name, (), refused(0)) for profile in ("strict", "debug", "mvp") for name in ("sync", "syncfs")),
    *(("strict", name, (), ALLOW) for name in ("fsync", "fdatasync", "sync_file_range", "msync")),
    *(("strict", name, (), refused(errno.ENOSYS)) for name in ("io_setup", "io_submit", "io_pgetevents")),
    ("mvp", "io_setup", (), ALLOW),
    ("strict", "mmap", (0, 1, 1, HIGH | 0x40022), refused(errno.ENOMEM)),
    ("strict", "mmap", (0, 1, 1, 0x22), ALLOW),
    ("strict", "memfd_create", (0, 5), refused(errno.ENOMEM)),
    ("strict", "memfd_create", (0, 3), ALLOW),
    ("strict", "shmget", (0, 1, 0o5600), refused(errno.ENOMEM)),
    ("strict", "shmget", (0, 1, 0o1600), ALLOW),
]


@cache
def program(profile: str, arch: Arch) -> cbpf.Program:
    return cbpf.load(encode(compile_profile(BUILT_IN[profile], arch)))


def answer(profile: Profile, arch: Arch, name: str, *args: int) -> int:
    compiled = cbpf.load(encode(compile_profile(profile, arch)))
    return cbpf.run(compiled, AUDIT_ARCH[arch], NUMBERS[arch][name], *args)


def own(*rules: Rule, default: Action = "allow", default_errno: int = 1) -> Profile:
    return Profile("own", default, rules, default_errno)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_call_gets_what_the_profile_says(arch: Arch) -> None:
    """The same on both architectures, and bits that the kernel throws away change nothing."""
    said = [
        (profile, name, args, cbpf.run(program(profile, arch), AUDIT_ARCH[arch], NUMBERS[arch][name], *args))
        for profile, name, args, _ in CASES
        if name in NUMBERS[arch]
    ]
    assert said == [case for case in CASES if case[1] in NUMBERS[arch]]
    assert len(said) >= len(CASES) - 12  # aarch64 has no poll and no select


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", BUILT_IN)
def test_a_call_of_another_architecture_kills(profile: str, arch: Arch) -> None:
    """The numbers of i386 mean other calls, so the first one is the last."""
    other = next(each for each in ARCHES if each != arch)
    for foreign in (I386, ARM, AUDIT_ARCH[other], 0):
        for number in (0, 1, 11, 40, 165, 435, 2**32 - 1):
            assert cbpf.run(program(profile, arch), foreign, number) == KILL


@pytest.mark.parametrize("profile", BUILT_IN)
def test_x32_numbers_are_refused(profile: str) -> None:
    """x32 has the native architecture's mark and other numbers: none of them passes."""
    for number in (*range(600), 0x3FFFFFFF):
        assert cbpf.run(program(profile, "x86_64"), AUDIT_ARCH["x86_64"], 0x40000000 | number) == EPERM


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", BUILT_IN)
def test_unknown_numbers_do_not_exist(profile: str, arch: Arch) -> None:
    """A call that is newer than the table, or in a gap of it, is ENOSYS even where all is allowed."""
    unknown = set(range(1200)) - set(NUMBERS[arch].values()) | {0x3FFFFFFF}
    assert len(unknown) > 700
    for number in unknown:
        assert cbpf.run(program(profile, arch), AUDIT_ARCH[arch], number) == ENOSYS


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", BUILT_IN)
def test_what_init_needs_passes(profile: str, arch: Arch) -> None:
    """PID 1 lives under its session's profile; clone3 is its alone, by the second filter."""
    for name in (*INIT_NEEDS, "clone3"):
        if name in NUMBERS[arch]:
            args = (FORK_FLAGS,) if name == "clone" else ()
            assert cbpf.run(program(profile, arch), AUDIT_ARCH[arch], NUMBERS[arch][name], *args) == ALLOW, name


@pytest.mark.parametrize("arch", ARCHES)
def test_commands_have_no_clone3(arch: Arch) -> None:
    """The second filter refuses that one call and, for small arguments, has no opinion on the others."""
    compiled = cbpf.load(encode(compile_command_filter(arch)))
    answers = {number: cbpf.run(compiled, AUDIT_ARCH[arch], number) for number in range(600)}
    assert {number for number, said in answers.items() if said != ALLOW} == {435}
    assert answers[435] == ENOSYS


@pytest.mark.parametrize("arch", ARCHES)
def test_commands_never_take_the_uid_of_pid_1(arch: Arch) -> None:
    """The second filter refuses that uid in every place of every call for uids, whatever the upper half holds."""
    compiled = cbpf.load(encode(compile_command_filter(arch)))
    for name, count in {"setuid": 1, "setreuid": 2, "setresuid": 3, "setfsuid": 1}.items():
        for place in range(count):
            for uid, said in ((65535, EPERM), (65535 | 1 << 32, EPERM), (65534, ALLOW), (0, ALLOW), (2**32 - 1, ALLOW)):
                args = [0] * place + [uid]
                assert cbpf.run(compiled, AUDIT_ARCH[arch], NUMBERS[arch][name], *args) == said, (name, place, uid)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("calls", [unpack.CALLS, pack.CALLS], ids=["unpack", "pack"])
def test_what_has_strangers_files_does_nothing_but_read_or_write_them(calls: frozenset[str], arch: Arch) -> None:
    """The filters of what unpacks and what packs are lists: calls on it pass; other calls, architectures and numbers
    don't. What packs can't make, change or remove a file."""
    compiled = cbpf.load(encode(compile_list(calls, arch)))
    answers = {name: cbpf.run(compiled, AUDIT_ARCH[arch], number) for name, number in NUMBERS[arch].items()}
    assert {name for name, said in answers.items() if said == ALLOW} == calls & set(NUMBERS[arch])
    assert set(answers.values()) == {ALLOW, EPERM}
    assert not calls & {"socket", "clone", "clone3", "fork", "execve", "kill", "prctl", "ptrace", "mount", "openat2"}
    assert not pack.CALLS & {
        "mkdirat",
        "linkat",
        "symlinkat",
        "unlinkat",
        "fchmodat",
        "ftruncate",
        "setxattr",
        "mknodat",
    }
    assert cbpf.run(compiled, I386, NUMBERS[arch]["read"]) == KILL
    assert cbpf.run(compiled, AUDIT_ARCH[arch], 1100) == ENOSYS


NOBODY = frozenset(
    [
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "process_madvise",
        "pidfd_getfd",
        "kcmp",
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "init_module",
        "finit_module",
        "delete_module",
        "kexec_load",
        "kexec_file_load",
        "reboot",
        "swapon",
        "swapoff",
        "acct",
        "iopl",
        "ioperm",
        "open_by_handle_at",
        "name_to_handle_at",
        "add_key",
        "request_key",
        "fanotify_init",
        "settimeofday",
        "clock_settime",
        "personality",
        "execveat",
        "memfd_create",
        "io_setup",
        "quotactl",
        "lookup_dcookie",
        "setuid",
        "setgid",
    ]
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("arch", ARCHES)
def test_a_part_of_ours_makes_its_own_calls_and_no_others(arch: Arch, part: Part) -> None:
    """A call off the list is trapped; a number without a name fails; another architecture's call kills."""
    compiled = cbpf.load(compile_part(part, arch))
    answers = {name: cbpf.run(compiled, AUDIT_ARCH[arch], number) for name, number in NUMBERS[arch].items()}
    ruled = {name for rule in part.rules for name in rule.names}
    assert {name for name, said in answers.items() if said == ALLOW} - ruled == (part.calls - ruled) & set(
        NUMBERS[arch]
    )
    assert {answers[name] for name in (NOBODY & set(NUMBERS[arch])) - ruled} == {TRAP}
    assert set(answers.values()) <= {ALLOW, TRAP, ENOSYS}
    assert cbpf.run(compiled, AUDIT_ARCH[arch], 1100) == ENOSYS
    assert cbpf.run(compiled, I386, NUMBERS[arch]["read"]) == KILL
    for request in (0x5412, 0x541C, 0x5423):
        assert cbpf.run(compiled, AUDIT_ARCH[arch], NUMBERS[arch]["ioctl"], 0, HIGH | request) == TRAP


@pytest.mark.parametrize("arch", ARCHES)
def test_arguments_that_parts_of_ours_may_give(arch: Arch) -> None:
    """The daemon clones threads alone, and each part opens the families of its work."""

    def said(part: Part, name: str, *args: int) -> int:
        return cbpf.run(cbpf.load(compile_part(part, arch)), AUDIT_ARCH[arch], NUMBERS[arch][name], *args)

    assert said(DAEMON, "clone", CLONE_THREAD_FLAGS) == ALLOW
    assert {said(DAEMON, "clone", FORK_FLAGS), said(DAEMON, "clone3")} == {ENOSYS}
    assert said(NSINIT, "clone", FORK_FLAGS) == said(NSINIT, "clone3") == ALLOW
    for part, families in ((DAEMON, {1, 2, 10, 16}), (NSINIT, {1, 2}), (BUILDER, {1, 2}), (CGROUP_MAKER, set())):
        assert {family for family in range(64) if said(part, "socket", family) == ALLOW} == families


def test_helpers_may_do_nothing_that_nsinit_may_not() -> None:
    """A helper that is started later has both filters, nsinit's and its own."""
    for part in (BUILDER, CGROUP_MAKER):
        assert part.calls <= NSINIT.calls


@pytest.mark.parametrize("arch", ARCHES)
def test_the_refusals_for_all_below_the_launcher_are_few(arch: Arch) -> None:
    """The floor of sandboxes refuses them as well; every other call passes, of a newer kernel and of another
    architecture, too."""
    compiled = cbpf.load(encode(compile_refusals(MACHINE, arch)))
    answers = {name: cbpf.run(compiled, AUDIT_ARCH[arch], number) for name, number in NUMBERS[arch].items()}
    assert {name for name, answer in answers.items() if answer == EPERM} == MACHINE & set(NUMBERS[arch])
    assert set(answers.values()) == {ALLOW, EPERM}
    assert set(FLOOR[0].names) >= MACHINE
    assert cbpf.run(compiled, AUDIT_ARCH[arch], 1100) == ALLOW
    assert cbpf.run(compiled, I386, NUMBERS[arch]["swapon"]) == ALLOW
    assert cbpf.run(compiled, AUDIT_ARCH[arch], compiler.X32_BIT | NUMBERS[arch]["swapon"]) == EPERM


def test_every_call_of_the_table_was_decided_on() -> None:
    """A name that is added to the table is put on one of the lists of `strict`, not on the default."""
    named = {name for rule in (*STRICT.rules, *FLOOR) for name in rule.names} | STRICT_REFUSED
    assert named == NAMES
    assert not STRICT_NAMES & STRICT_REFUSED
    assert not STRICT_NAMES & set(FLOOR[0].names)


def test_each_number_is_one_call() -> None:
    """The table gives no number twice, and what both architectures number alike is in the range they share."""
    for arch in ARCHES:
        assert len(set(NUMBERS[arch].values())) == len(NUMBERS[arch]) > 300
    for name in NUMBERS["x86_64"].keys() & NUMBERS["aarch64"].keys():
        x86_64, aarch64 = NUMBERS["x86_64"][name], NUMBERS["aarch64"][name]
        assert (x86_64 == aarch64) == (x86_64 >= 424), name


def test_the_floor_holds_under_a_profile_that_allows_all() -> None:
    """An operator's own profile can open much, but neither mounts nor namespaces nor typing into terminals."""
    profile = own(Rule(("ptrace", "io_uring_setup"), "allow"))
    for name in FLOOR[0].names:
        for arch in ARCHES:
            if name in NUMBERS[arch]:
                assert answer(profile, arch, name) == EPERM
    assert answer(profile, "x86_64", "ioctl", 0, HIGH | 0x5412) == EPERM
    assert answer(profile, "x86_64", "clone", 1 << 28) == EPERM
    assert answer(profile, "x86_64", "ptrace") == answer(profile, "x86_64", "io_uring_setup") == ALLOW


def _lenient(action: Action, *, by_argument: bool) -> Profile:
    """Return an operator's profile that lets pass whatever the compiler takes, by name or by the floor's own tests."""
    above = [rule for rule in FLOOR if rule is not FLOOR[0]]
    names = tuple(sorted({name for rule in above for name in rule.names}))
    rules = [Rule(rule.names, action, args=rule.args) for rule in above] if by_argument else [Rule(names, action)]
    return own(*rules, default=action)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "profile",
    [
        *BUILT_IN.values(),
        *(_lenient(action, by_argument=each) for action in ("allow", "log") for each in (False, True)),
    ],
    ids=[*BUILT_IN, "allow", "allow-arguments", "log", "log-arguments"],
)
def test_every_rule_of_the_floor_holds_below_every_profile(profile: Profile, arch: Arch) -> None:
    """The gate of sockets included: no profile turns a rule into a milder one, not with the same tests either."""
    compiled = cbpf.load(encode(compile_profile(profile, arch)))
    milder = []
    for rule in FLOOR:
        args = [0] * 6
        for test in rule.args:
            args[test.index] = test.value + (test.op in ("ne", "gt"))
        for name in rule.names:
            if name in NUMBERS[arch]:
                said = cbpf.run(compiled, AUDIT_ARCH[arch], NUMBERS[arch][name], *args)
                if said > (ASK if rule.action == "ask" else refused(0xFFFF)):  # the kernel's order: lower is stricter
                    milder.append((name, args, hex(said)))
    assert milder == []


def test_the_strictest_rule_wins_in_any_order() -> None:
    """A rule that refuses is not undone by one that allows, before or after it."""
    refuse = Rule(("socket",), "errno", 97, (ArgTest(0, "eq", 10),))
    allow = Rule(("socket",), "allow")
    kill = Rule(("socket",), "kill_process", args=(ArgTest(2, "eq", 9),))
    for rules in ((refuse, allow, kill), (kill, allow, refuse), (allow, refuse, kill)):
        assert answer(own(*rules), "x86_64", "socket", 10, 0, 0) == refused(97)
        assert answer(own(*rules), "x86_64", "socket", 10, 0, 9) == KILL
        assert answer(own(*rules), "x86_64", "socket", 2, 0, 0) == ASK
    assert answer(own(Rule(("mount",), "kill_process")), "x86_64", "mount") == KILL


_COMPARISONS = {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "lt": lambda left, right: left < right,
    "le": lambda left, right: left <= right,
    "gt": lambda left, right: left > right,
    "ge": lambda left, right: left >= right,
}
_longs = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1])


@given(op=st.sampled_from(sorted(_COMPARISONS)), value=_longs, argument=_longs)
def test_wide_arguments_are_compared_whole(op: Comparison, value: int, argument: int) -> None:
    """All comparisons on 64 bits are those of numbers."""
    profile = own(Rule(("mmap",), "errno", 12, (ArgTest(1, op, value),)))
    assert (answer(profile, "x86_64", "mmap", 0, argument) == refused(12)) == _COMPARISONS[op](argument, value)


@given(op=st.sampled_from(sorted(_COMPARISONS)), value=st.integers(0, 2**32 - 1), argument=_longs)
def test_narrow_arguments_are_compared_as_the_kernel_uses_them(op: Comparison, value: int, argument: int) -> None:
    """Of an `int` only the low half counts, for refusing and for allowing."""
    profile = own(Rule(("kill",), "errno", 3, (ArgTest(1, op, value),)))
    assert (answer(profile, "aarch64", "kill", 1, argument) == refused(3)) == _COMPARISONS[op](argument % HIGH, value)


@given(value=_longs, mask=_longs, argument=_longs)
def test_masks_cover_both_halves(value: int, mask: int, argument: int) -> None:
    """`masked_eq` compares all bits of the mask."""
    profile = own(Rule(("mmap",), "errno", 12, (ArgTest(3, "masked_eq", value & mask, mask),)))
    said = answer(profile, "x86_64", "mmap", 0, 0, 0, argument)
    assert (said == refused(12)) == (argument & mask == value & mask)


def test_all_tests_of_a_rule_must_hold() -> None:
    """Several arguments are a conjunction."""
    profile = own(Rule(("socket",), "errno", 97, (ArgTest(0, "eq", 2), ArgTest(1, "ge", 3))))
    said = [answer(profile, "x86_64", "socket", family, kind) for family in (1, 2) for kind in (2, 3, 4)]
    assert said == [ALLOW, ALLOW, ALLOW, ASK, refused(97), refused(97)]


@pytest.mark.parametrize("action", STRICTNESS)
def test_every_action_is_the_kernels(action: Action) -> None:
    """The values are those of linux/seccomp.h, ranked as the kernel ranks them."""
    values = {"allow": ALLOW, "log": 0x7FFC0000, "ask": ASK, "errno": refused(5), "trap": 0x30000}
    values["kill_thread"] = 0
    rule = Rule(("mbind",), action, 5 if action == "errno" else 1)
    assert answer(own(rule), "x86_64", "mbind") == values.get(action, KILL)


def test_programs_with_far_jumps_are_right() -> None:
    """More argument tests than a conditional jump can cross still give the right answers."""
    rules = [Rule(("fcntl",), "errno", each, (ArgTest(1, "eq", each),)) for each in range(1, 400)]
    profile = own(*rules, *(Rule(("futex",), "errno", each, (ArgTest(2, "eq", each),)) for each in range(1, 90)))
    compiled = cbpf.load(encode(compile_profile(profile, "x86_64")))
    for each in (1, 2, 200, 398, 399):
        assert cbpf.run(compiled, AUDIT_ARCH["x86_64"], 72, 0, each) == refused(each)
    assert cbpf.run(compiled, AUDIT_ARCH["x86_64"], 72, 0, 400) == ALLOW
    assert cbpf.run(compiled, AUDIT_ARCH["x86_64"], 202, 0, 0, 89) == refused(89)
    assert cbpf.run(compiled, AUDIT_ARCH["x86_64"], 0) == ALLOW


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        (Profile("Bad Name", "allow", ()), "malformed profile name"),
        (own(Rule(("ptrcae",), "errno")), "no system call of that name"),
        (own(Rule((), "errno")), "names"),
        (own(Rule(("read",), "errno", 4096)), "errno must be"),
        (own(default_errno=-1), "errno must be"),
        (own(Rule(("socket",), "errno", args=(ArgTest(6, "eq", 0),))), "index is 0 to 5"),
        (own(Rule(("socket",), "errno", args=(ArgTest(-1, "eq", 0),))), "index is 0 to 5"),
        (own(Rule(("socket",), "errno", args=(ArgTest(0, "eq", 1), ArgTest(0, "eq", 2)))), "twice"),
        (own(Rule(("socket",), "errno", args=(ArgTest(3, "eq", 0),))), "can't be compared"),
        (own(Rule(("mbind",), "errno", args=(ArgTest(2, "eq", 0),))), "can't be compared"),
        (own(Rule(("socket",), "errno", args=(ArgTest(0, "eq", HIGH),))), "can't have that value"),
        (own(Rule(("mmap",), "errno", args=(ArgTest(0, "eq", 2**64),))), "can't have that value"),
        (own(*[Rule(("read",), "allow")] * 501), "more than 500 rules"),
        (own(default="errno"), "PID 1 of the sandbox needs"),
        (own(Rule(("clone",), "errno")), "PID 1 of the sandbox needs clone"),
    ],
)
def test_a_profile_that_can_not_be_kept_is_refused(profile: Profile, what: str) -> None:
    """Unknown names, unknown arguments and what would leave no PID 1 are told, never skipped."""
    with pytest.raises(ProfileError, match=what):
        compile_profile(profile, "x86_64")


def test_names_of_other_architectures_mean_nothing() -> None:
    """Profiles in circulation name calls of i386 and Arm; they are no mistake."""
    profile = own(Rule(("socketcall", "_llseek", "mbind"), "errno", 9))
    assert answer(profile, "x86_64", "mbind") == refused(9)


def test_built_in_programs_are_small() -> None:
    """A quarter of a page-sized limit, so that the kernel's walk over every number at install stays short."""
    for profile in BUILT_IN.values():
        for arch in ARCHES:
            assert len(compile_profile(profile, arch)) < 384


def test_argument_widths_name_known_calls() -> None:
    """The table of widths has no misspelt name."""
    assert set(WIDTHS) <= NAMES
    assert all(set(widths) <= {"w", "l"} and len(widths) <= 6 for widths in WIDTHS.values())
    assert set(compiler.HOT_CALLS) <= NAMES
    assert MVP.default == "allow"
