"""Writes the built-in profiles as OCI JSON: `python -m nsinit.kernel.seccomp.export DIRECTORY`.

The files say the same as the compiled filters, the floor included; rules that ask PID 1 are left out, as the floor adds
them to every profile. No program reads the files at run time; they are there to be read by people, and to be the
beginning of an operator's own profile. Source: the OCI runtime specification, config-linux.md "Seccomp".
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Final

from nsinit.kernel.seccomp.profile import Action, ArgTest, Profile, Rule
from nsinit.kernel.seccomp.profiles import BUILT_IN, FLOOR

ACTIONS: Final[dict[Action, str]] = {
    "allow": "SCMP_ACT_ALLOW",
    "log": "SCMP_ACT_LOG",
    "errno": "SCMP_ACT_ERRNO",
    "trap": "SCMP_ACT_TRAP",
    "kill_thread": "SCMP_ACT_KILL_THREAD",
    "kill_process": "SCMP_ACT_KILL_PROCESS",
}
_ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")


def to_oci(profile: Profile) -> dict[str, object]:
    """Return the profile as the value of `linux.seccomp`."""
    return {
        "defaultAction": ACTIONS[profile.default],
        **({"defaultErrnoRet": profile.default_errno} if profile.default == "errno" else {}),
        "architectures": list(_ARCHITECTURES),
        "syscalls": [_rule(rule) for rule in dict.fromkeys((*FLOOR, *profile.rules)) if rule.action != "ask"],
    }


def to_text(profile: Profile) -> str:
    """Return the content of the profile's file."""
    return json.dumps(to_oci(profile), indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, object]:
    found: dict[str, object] = {"names": list(rule.names), "action": ACTIONS[rule.action]}
    if rule.action == "errno" and rule.errno != errno.EPERM:
        found["errnoRet"] = rule.errno
    if rule.args:
        found["args"] = [_test(test) for test in rule.args]
    return found


def _test(test: ArgTest) -> dict[str, object]:
    if test.op == "masked_eq":
        return {"index": test.index, "value": test.mask, "valueTwo": test.value, "op": "SCMP_CMP_MASKED_EQ"}
    return {"index": test.index, "value": test.value, "op": f"SCMP_CMP_{test.op.upper()}"}


if __name__ == "__main__":
    for each in BUILT_IN.values():
        (Path(sys.argv[1]) / f"{each.name}.json").write_text(to_text(each))
