"""From a profile to the program that the kernel runs for every system call of a sandbox.

Owns what holds whatever the profile says: a call of another architecture kills, x32 numbers are refused, unknown
numbers get ENOSYS (so that programs fall back as on an older kernel), the floor of `profiles` is not lowered, and what
PID 1 lives on is allowed. The kernel's own cache answers calls whose verdict hangs on nothing but the number.
Sources: seccomp(2); Documentation/userspace-api/seccomp_filter.rst; CVE-2019-10063 (comparing more than is used).
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from nsinit.kernel.capabilities import RUNNER_ID
from nsinit.kernel.seccomp import bpf
from nsinit.kernel.seccomp.bpf import Assembler, Instruction, Label
from nsinit.kernel.seccomp.profile import STRICTNESS, Action, ArgTest, Profile, ProfileError, Rule, check
from nsinit.kernel.seccomp.profiles import FLOOR, INIT_NEEDS
from nsinit.kernel.seccomp.table import AUDIT_ARCH, NUMBERS, WIDTHS, Arch

X32_BIT: Final = 0x40000000
HOT_CALLS: Final = ("ioctl", "clone", "socket")
"""Calls with argument tests that are frequent: looked for first, since the kernel can't remember their verdict."""

_UID_CALLS: Final = {"setuid": 1, "setreuid": 2, "setresuid": 3, "setfsuid": 1}
"""Calls that change a uid, with the number of their arguments; each is a uid."""

_RETURN: Final[dict[Action, int]] = {
    "kill_process": 0x80000000,
    "kill_thread": 0x00000000,
    "trap": 0x00030000,
    "errno": 0x00050000,
    "ask": 0x7FC00000,
    "log": 0x7FFC0000,
    "allow": 0x7FFF0000,
}
ALLOW: Final = _RETURN["allow"]
KILL_PROCESS: Final = _RETURN["kill_process"]
TRAP: Final = _RETURN["trap"]
_LOW = 2**32 - 1
_BELOW: Final = frozenset(FLOOR[0].names)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The verdict on one call: the value of the first of `tests` that holds, else `fallback`."""

    fallback: int
    tests: tuple[tuple[tuple[ArgTest, ...], int], ...] = ()
    widths: str = ""


def refuse(number: int) -> int:
    """Return the value that makes a call fail with that errno."""
    return _RETURN["errno"] | number


def compile_profile(profile: Profile, arch: Arch) -> tuple[Instruction, ...]:
    """Return the program of a profile. Raises `ProfileError`."""
    check(profile)
    _check_floor(profile)
    numbers = NUMBERS[arch]
    verdicts = _verdicts(profile, numbers)
    _check_init(profile, verdicts)
    try:
        return _compile(verdicts, arch)
    except ValueError as error:
        raise ProfileError(f"{profile.name}: {error}") from None


def compile_list(
    names: Collection[str], arch: Arch, *, rules: Collection[Rule] = (), refused: int | None = None
) -> tuple[Instruction, ...]:
    """Return a program that lets pass what is named and nothing else, for a process of ours that no profile is for.

    `rules` come before `names`, the first that matches counts. `refused`: the value for every other call that has a
    name, EPERM unless given.
    """
    default = refuse(errno.EPERM) if refused is None else refused
    verdicts = {name: _Verdict(ALLOW if name in names else default) for name in NUMBERS[arch]}
    for name in {name for rule in rules for name in rule.names}.intersection(verdicts):
        of_name = [rule for rule in rules if name in rule.names]
        tests = tuple((rule.args, _value(rule.action, rule.errno)) for rule in of_name)
        verdicts[name] = _Verdict(verdicts[name].fallback, tests, WIDTHS.get(name, ""))
    return _compile(verdicts, arch)


def compile_refusals(names: frozenset[str], arch: Arch) -> tuple[Instruction, ...]:
    """Return a program that refuses what is named and lets pass everything else, also another architecture's calls."""
    assembler = Assembler()
    entry = allowed = assembler.ret(ALLOW)
    refused = assembler.ret(refuse(errno.EPERM))
    for name in sorted(names & NUMBERS[arch].keys()):
        entry = assembler.jump(bpf.JEQ, NUMBERS[arch][name], refused, entry)
    entry = assembler.load(bpf.NR_OFFSET, assembler.mask(_LOW & ~X32_BIT, entry))
    return assembler.finish(assembler.load(bpf.ARCH_OFFSET, assembler.jump(bpf.JEQ, AUDIT_ARCH[arch], entry, allowed)))


def _compile(verdicts: dict[str, _Verdict], arch: Arch) -> tuple[Instruction, ...]:
    numbers = NUMBERS[arch]
    assembler = Assembler()
    blocks: dict[_Verdict, Label] = {}
    hot = {numbers[name]: verdicts[name] for name in HOT_CALLS if verdicts[name].tests}
    table = {numbers[name]: verdict for name, verdict in verdicts.items() if numbers[name] not in hot}
    entry = _tree(assembler, _runs(table, hot), blocks)
    for number, verdict in reversed(hot.items()):
        entry = assembler.jump(bpf.JEQ, number, _leaf(assembler, verdict, blocks), entry)
    if arch == "x86_64":
        entry = assembler.jump(bpf.JGE, X32_BIT, assembler.ret(refuse(errno.EPERM)), entry)
    entry = assembler.load(bpf.NR_OFFSET, entry)
    killed = assembler.ret(KILL_PROCESS)
    entry = assembler.load(bpf.ARCH_OFFSET, assembler.jump(bpf.JEQ, AUDIT_ARCH[arch], entry, killed))
    return assembler.finish(entry)


def compile_command_filter(arch: Arch) -> tuple[Instruction, ...]:
    """Return the second program of every command, about calls that PID 1 needs.

    clone3 is ENOSYS, as its flags can't be seen. No process takes PID 1's uid: prlimit(2), setpriority(2),
    sched_setaffinity(2) and others that would stop PID 1 ask for that uid or for a capability that nobody inside has.
    """
    assembler = Assembler()
    allowed, unknown = assembler.ret(ALLOW), assembler.ret(refuse(errno.ENOSYS))
    entry = assembler.jump(bpf.JEQ, NUMBERS[arch]["clone3"], unknown, allowed)
    for name, count in _UID_CALLS.items():
        tests = tuple(((ArgTest(place, "eq", RUNNER_ID),), refuse(errno.EPERM)) for place in range(count))
        # The kernel uses the lower half of an argument, as for every uid_t.
        leaf = _leaf(assembler, _Verdict(ALLOW, tests, "w" * count), {})
        entry = assembler.jump(bpf.JEQ, NUMBERS[arch][name], leaf, entry)
    return assembler.finish(assembler.load(bpf.NR_OFFSET, entry))


def _check_floor(profile: Profile) -> None:
    """Raise `ProfileError` if a profile allows what the floor refuses. The floor would win anyway, without a word."""
    for rule in profile.rules:
        if rule.action in ("allow", "log") and (names := sorted(_BELOW.intersection(rule.names))):
            raise ProfileError(f"{profile.name}: no sandbox may have {', '.join(names[:5])}")


def _check_init(profile: Profile, verdicts: dict[str, _Verdict]) -> None:
    """Raise `ProfileError` if PID 1 of a sandbox could not work under the profile."""
    missing = [name for name in INIT_NEEDS if name in verdicts and not _passes(verdicts[name])]
    if missing:
        raise ProfileError(f"{profile.name}: PID 1 of the sandbox needs {', '.join(missing)}")


def _passes(verdict: _Verdict) -> bool:
    passing = (_RETURN["allow"], _RETURN["log"])
    return verdict.fallback in passing or any(value in passing for _, value in verdict.tests)


def _verdicts(profile: Profile, numbers: dict[str, int]) -> dict[str, _Verdict]:
    rules: dict[str, list[Rule]] = {name: [] for name in numbers}
    for rule in (*FLOOR, *profile.rules):
        for name in rule.names:
            if name in rules:
                rules[name].append(rule)
    verdicts = {name: _verdict(profile, name, each) for name, each in rules.items()}
    verdicts["clone3"] = _Verdict(ALLOW)
    return verdicts


def _verdict(profile: Profile, name: str, rules: list[Rule]) -> _Verdict:
    """Return the verdict on a call: the strictest of the rules that match counts, the default if there is none."""
    by_strictness = sorted(rules, key=lambda rule: -STRICTNESS.index(rule.action))
    always = next((rule for rule in by_strictness if not rule.args), None)
    if always is None:
        fallback, least = _value(profile.default, profile.default_errno), -1
    else:
        fallback, least = _value(always.action, always.errno), STRICTNESS.index(always.action)
    tests = dict.fromkeys(
        (rule.args, _value(rule.action, rule.errno))
        for rule in by_strictness
        if rule.args and STRICTNESS.index(rule.action) > least
    )
    return _Verdict(fallback, tuple(tests), WIDTHS.get(name, "") if tests else "")


def _value(action: Action, number: int) -> int:
    return _RETURN[action] | (number if action == "errno" else 0)


def _runs(table: dict[int, _Verdict], skipped: Iterable[int]) -> list[tuple[int, _Verdict]]:
    """Return where on the line of numbers which verdict begins; what was answered before belongs to any run."""
    unknown = _Verdict(refuse(errno.ENOSYS))
    runs: list[tuple[int, _Verdict]] = []
    for number in range(max(table) + 2):
        verdict = table.get(number, unknown)
        if number not in skipped and (not runs or runs[-1][1] != verdict):
            runs.append((number, verdict))
    return runs


def _tree(assembler: Assembler, runs: list[tuple[int, _Verdict]], blocks: dict[_Verdict, Label]) -> Label:
    """Return the entry of a binary search for the run that a number is in."""
    if len(runs) == 1:
        return _leaf(assembler, runs[0][1], blocks)
    middle = len(runs) // 2
    upper = _tree(assembler, runs[middle:], blocks)
    lower = _tree(assembler, runs[:middle], blocks)
    return assembler.jump(bpf.JGE, runs[middle][0], upper, lower)


def _leaf(assembler: Assembler, verdict: _Verdict, blocks: dict[_Verdict, Label]) -> Label:
    if not verdict.tests:
        return assembler.ret(verdict.fallback)
    if verdict not in blocks:
        label = assembler.ret(verdict.fallback)
        for tests, value in reversed(verdict.tests):
            held = assembler.ret(value)
            for test in reversed(tests):
                held = _compare(assembler, test, verdict.widths[test.index], held, label)
            label = held
        blocks[verdict] = label
    return blocks[verdict]


def _compare(assembler: Assembler, test: ArgTest, width: str, yes: Label, no: Label) -> Label:
    """Compare the part of an argument that the kernel will use, no more and no less."""
    if test.op in ("ne", "lt", "le"):
        yes, no = no, yes
    is_masked = test.op == "masked_eq"
    code = {"ge": bpf.JGE, "lt": bpf.JGE, "gt": bpf.JGT, "le": bpf.JGT}.get(test.op, bpf.JEQ)
    low, high = bpf.low_offset(test.index), bpf.low_offset(test.index) + 4
    label = assembler.jump(code, test.value & _LOW, yes, no)
    if is_masked:
        label = assembler.mask(test.mask & _LOW, label)
    label = assembler.load(low, label)
    if width == "w":
        return label
    label = assembler.jump(bpf.JEQ, test.value >> 32, label, no)
    if code != bpf.JEQ:
        label = assembler.jump(bpf.JGT, test.value >> 32, yes, label)
    if is_masked:
        label = assembler.mask(test.mask >> 32, label)
    return assembler.load(high, label)
