"""What this machine's kernel and disks give away. Reads /proc and /sys below a root, changes nothing.

Sources: Documentation/admin-guide/sysctl/{kernel,vm,fs}.rst, core(5), Documentation/admin-guide/hw-vuln/index.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from sandkasten.security.posture.finding import Finding, Severity, low, medium


@attrs.frozen
class _Rule:
    """A sysctl, the values that are bad (as integers below a bound, or above), and what follows."""

    name: str
    at_least: int
    at_most: int
    severity: Severity
    why: str


_RULES = (
    _Rule("kernel/randomize_va_space", 2, 2, Severity.HIGH, "addresses can be guessed, so a bug is an exploit"),
    _Rule("kernel/unprivileged_bpf_disabled", 1, 2, Severity.MEDIUM, "unprivileged programs load eBPF (CVE-2021-3490)"),
    _Rule("kernel/kptr_restrict", 1, 2, Severity.LOW, "kernel addresses are shown, which exploits need"),
    _Rule("kernel/dmesg_restrict", 1, 1, Severity.LOW, "everybody reads the kernel's log, addresses included"),
    _Rule("kernel/perf_event_paranoid", 2, 9, Severity.LOW, "unprivileged programs measure the kernel"),
    _Rule("kernel/yama/ptrace_scope", 1, 3, Severity.LOW, "programs of one user can trace each other on the host"),
    _Rule("vm/unprivileged_userfaultfd", 0, 0, Severity.LOW, "exploits halt the kernel where they want to"),
    _Rule("dev/tty/legacy_tiocsti", 0, 0, Severity.LOW, "a program can type on its terminal (CVE-2019-10063)"),
    _Rule("fs/suid_dumpable", 0, 0, Severity.MEDIUM, "core dumps of privileged programs can be read (CVE-2025-4598)"),
    _Rule("fs/protected_symlinks", 1, 1, Severity.LOW, "links in /tmp lead privileged programs astray"),
    _Rule("fs/protected_hardlinks", 1, 1, Severity.LOW, "a user keeps old setuid programs by a hard link"),
    _Rule("fs/protected_fifos", 1, 2, Severity.LOW, "FIFOs in /tmp lead privileged programs astray"),
)


def check_machine(data_dir: Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Iterator[Finding]:
    """Yield what is weak about the machine; a file that this kernel lacks says nothing."""
    for rule in _RULES:
        yield from _check_rule(rule, _read(proc / "sys" / rule.name))
    yield from check_core_pattern(_read(proc / "sys/kernel/core_pattern"))
    yield from check_swap(_read(proc / "swaps"))
    yield from check_cpu(sys / "devices/system/cpu/vulnerabilities")
    yield from check_mount(data_dir, _read(proc / "self/mountinfo"))


def _check_rule(rule: _Rule, text: str) -> Iterator[Finding]:
    try:
        value = int(text)
    except ValueError:
        return
    if not rule.at_least <= value <= rule.at_most:
        dotted = rule.name.replace("/", ".")
        wanted = rule.at_least if value < rule.at_least else rule.at_most
        yield Finding(f"sysctl.{dotted}", rule.severity, f"{dotted} is {value}", rule.why, f"sysctl {dotted}={wanted}")


def check_core_pattern(pattern: str) -> Iterator[Finding]:
    """A handler runs as root, in the host's namespaces, on data that the crashed program chose."""
    if pattern.startswith("|"):
        yield low(
            "core.pipe",
            f"core dumps go to a program: {pattern.strip()[:80]}",
            "it parses what a crashing program left; a session's core limit of 1 keeps it from being called for those",
            "sysctl kernel.core_pattern=core",
        )


def check_swap(swaps: str) -> Iterator[Finding]:
    """Sessions may not swap; the daemon's and the host's pages, keys included, can be written out."""
    used = [line.split()[0] for line in swaps.splitlines()[1:] if line.strip()]
    if used:
        yield medium(
            "swap.on",
            f"swap is on: {', '.join(used)}",
            "keys and session data of processes outside can reach the disk and stay there",
            "swapoff -a, or encrypt it with a key made at each start",
        )


def check_cpu(directory: Path) -> Iterator[Finding]:
    """Sessions share cores, so what the processor leaks, one may read of another."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return
    open_ones = [name for name in names if _read(directory / name).startswith("Vulnerable")]
    if open_ones:
        yield medium(
            "cpu.vulnerable",
            f"the processor is open to {', '.join(open_ones)}",
            "one session may read memory of another, or of the host, through the processor",
            "update microcode and kernel, and start without mitigations=off",
        )


def check_mount(data_dir: Path, mountinfo: str) -> Iterator[Finding]:
    """What sessions write lies on the host under the mount options of the data directory's file system."""
    best: tuple[str, str] | None = None
    real = str(data_dir.resolve())
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        point = fields[4].encode().decode("unicode_escape")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and (best is None or len(point) >= len(best[0])):
            best = point, fields[5]
    if best is None:
        return
    point, options = best
    if missing := [name for name in ("nosuid", "nodev") if name not in options.split(",")]:
        yield low(
            "data.mount",
            f"{data_dir} is on {point}, which is not mounted {' and '.join(missing)}",
            "files of sessions keep their bits on the host; only the data directory's mode keeps users from them",
            f"put the data directory on a file system of its own, mounted -o {','.join(missing)}",
        )
    if point == "/":
        yield low(
            "data.on-root",
            f"{data_dir} is on the root file system",
            "what fills it up fills up the machine's system disk, too",
            "put the data directory on a file system of its own",
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
