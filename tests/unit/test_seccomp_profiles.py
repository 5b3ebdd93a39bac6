"""Filters as files: what comes along says what is compiled, and what an operator writes is kept or refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsinit.kernel.seccomp.compile import compile_profile
from nsinit.kernel.seccomp.export import to_text
from nsinit.kernel.seccomp.filters import prepare
from nsinit.kernel.seccomp.profile import Profile, ProfileError, Rule
from nsinit.kernel.seccomp.profiles import BUILT_IN, OFF
from nsinit.kernel.seccomp.table import NUMBERS
from nsinit.wire.protocol import SeccompArgTest, SeccompProfile, SeccompRule
from sandkasten.admission.plan import resolve
from sandkasten.config import Config, ConfigError, SecuritySettings
from sandkasten.config.seccomp import load_filters, parse_profile
from sandkasten.errors import InvalidRequest
from sandkasten.model import SECCOMP_PROFILES, SessionSpec

SHIPPED = Path(__file__).resolve().parents[2] / "config" / "seccomp"


def parse(**top: Any) -> SeccompProfile:
    return parse_profile("own", json.dumps({"defaultAction": "SCMP_ACT_ALLOW", **top}).encode())


def rule(**fields: Any) -> SeccompRule:
    (found,) = parse(syscalls=[{"names": ["mbind"], "action": "SCMP_ACT_ERRNO", **fields}]).rules
    return found


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_files_that_come_along_are_the_built_in_filters(name: str) -> None:
    """Exporting with `nsinit.kernel.seccomp.export` would change nothing; read back, a file is the same program."""
    text = (SHIPPED / f"{name}.json").read_text()
    assert text == to_text(BUILT_IN[name])
    read = parse_profile(name, text.encode())
    for arch in NUMBERS:
        assert compile_profile(read, arch) == compile_profile(BUILT_IN[name], arch)


def test_there_is_a_file_for_each_and_no_other() -> None:
    """The daemon, nsinit and the directory agree on which filters there are."""
    assert {path.stem for path in SHIPPED.iterdir()} == set(BUILT_IN)
    assert set(SECCOMP_PROFILES) == {*BUILT_IN, OFF} == set(prepare().names)


def test_a_profile_in_the_style_of_other_runtimes_is_understood() -> None:
    """Maps of architectures, names of errnos, conditions on capabilities, architectures and kernels."""
    profile = parse(
        defaultAction="SCMP_ACT_ERRNO",
        defaultErrnoRet=38,
        archMap=[{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]}],
        syscalls=[
            {
                "names": ["read", "socketcall"],
                "action": "SCMP_ACT_ALLOW",
                "comment": "",
                "includes": {},
                "excludes": {},
            },
            {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["ptrace"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "4.8"}},
            {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "400.1"}},
            {"names": ["sync"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}},
            {"names": ["sync"], "action": "SCMP_ACT_ALLOW", "excludes": {"arches": ["amd64", "arm64"]}},
            {"names": ["sync"], "action": "SCMP_ACT_ALLOW", "excludes": {"minKernel": "3.0"}},
            {
                "names": ["clone"],
                "action": "SCMP_ACT_ALLOW",
                "args": [{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
                "excludes": {"caps": ["CAP_SYS_ADMIN"]},
            },
            {"name": "kcmp", "action": "SCMP_ACT_ERRNO", "errno": "ENOSYS"},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
        ],
    )
    assert profile == SeccompProfile(
        "own",
        "errno",
        (
            SeccompRule(("read", "socketcall"), "allow"),
            SeccompRule(("ptrace",), "allow"),
            SeccompRule(("clone",), "allow", args=(SeccompArgTest(0, "masked_eq", 0, mask=2114060288),)),
            SeccompRule(("kcmp",), "errno", 38),
            SeccompRule(("clone3",), "errno", 38),
        ),
        default_errno=38,
    )
    assert rule(action="SCMP_ACT_KILL").action == "kill_thread"
    assert rule(errnoRet=0).errno == 0


@pytest.mark.parametrize(
    ("top", "what"),
    [
        ({"defaultAction": "SCMP_ACT_TRACE"}, "defaultAction must be one of"),
        ({"defaultAction": None}, "defaultAction must be one of"),
        ({"flags": ["SECCOMP_FILTER_FLAG_LOG"]}, "'flags' is not supported"),
        ({"listenerPath": "/run/x"}, "'listenerPath' is not supported"),
        ({"architectures": ["x86"]}, "architectures: 'x86' is none"),
        ({"archMap": [{"architecture": 1}]}, "architectures: 1 is none"),
        ({"syscalls": {}}, "syscalls must be a list"),
        ({"syscalls": ["read"]}, r"syscalls\[0\] must be an object"),
        ({"syscalls": [{"names": ["read"], "action": "SCMP_ACT_NOTIFY"}]}, r"syscalls\[0\].action must be one of"),
        ({"syscalls": [{"names": ["read"], "actoin": "SCMP_ACT_ALLOW"}]}, "'actoin' is not supported"),
        ({"syscalls": [{"names": "read", "action": "SCMP_ACT_ALLOW"}]}, "names must be a list"),
        ({"syscalls": [{"names": [7], "action": "SCMP_ACT_ALLOW"}]}, "names: expected text"),
        ({"syscalls": [{"name": "a", "names": ["b"], "action": "SCMP_ACT_ALLOW"}]}, "exclude each other"),
        ({"syscalls": [{"name": "a", "action": "SCMP_ACT_ERRNO", "errno": "EWHAT"}]}, "'EWHAT' is no errno"),
        ({"syscalls": [{"name": "a", "action": "SCMP_ACT_ERRNO", "errnoRet": True}]}, "must be a number"),
        ({"syscalls": [{"name": "a", "action": "SCMP_ACT_ERRNO", "errnoRet": -1}]}, "must be a number"),
        (
            {"syscalls": [{"name": "a", "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "op": "EQ"}]}]},
            "op must be one",
        ),
        (
            {"syscalls": [{"name": "a", "action": "SCMP_ACT_ALLOW", "args": [{"value": 1.5, "op": "SCMP_CMP_EQ"}]}]},
            "must be a number",
        ),
        (
            {"syscalls": [{"name": "a", "action": "SCMP_ACT_ALLOW", "args": [{"valueTwo": 1, "op": "SCMP_CMP_EQ"}]}]},
            "goes with SCMP_CMP_MASKED_EQ alone",
        ),
        ({"syscalls": [{"name": "a", "action": "SCMP_ACT_ALLOW", "includes": {"kernel": "5"}}]}, "'kernel' is not"),
        ({"syscalls": [{"name": "a", "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "x"}}]}, "minKernel must"),
    ],
)
def test_what_can_not_be_kept_is_named(top: dict[str, Any], what: str) -> None:
    """An unknown key, action or comparison is an error with its place: to skip it would be to guess."""
    with pytest.raises(ValueError, match=what):
        parse(**top)


@given(st.binary(max_size=200) | st.text('{}[]",:defaultActionSCMP_ 0', max_size=200).map(str.encode))
def test_any_bytes_are_a_profile_or_a_sentence(data: bytes) -> None:
    """No file makes the parser fail in another way."""
    try:
        profile = parse_profile("own", data)
    except ValueError:
        return
    assert profile.name == "own"


def test_deep_nesting_and_doubled_keys_are_refused() -> None:
    """JSON that means two things, or too much, is no profile."""
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_profile("own", b"[" * 100_000)
    with pytest.raises(ValueError, match="given twice"):
        parse_profile("own", b'{"defaultAction": "SCMP_ACT_ALLOW", "defaultAction": "SCMP_ACT_ERRNO"}')


@pytest.mark.parametrize("name", ["mount", "unshare", "bpf", "keyctl", "init_module", "open_by_handle_at"])
def test_the_floor_can_not_be_lowered(name: str) -> None:
    """A file that allows what no sandbox may have does not start."""
    for action in ("SCMP_ACT_ALLOW", "SCMP_ACT_LOG"):
        with pytest.raises(ProfileError, match=f"no sandbox may have {name}"):
            prepare([parse(syscalls=[{"names": ["read", name], "action": action}])])


def write(directory: Path, name: str, text: str = '{"defaultAction": "SCMP_ACT_ALLOW"}') -> SecuritySettings:
    (directory / name).write_text(text)
    return SecuritySettings(seccomp_profiles=directory)


def test_files_are_found_by_name_and_trusted_only_if_theirs_alone(tmp_path: Path) -> None:
    """The directory's JSON files are the filters; one that others may write, or that shadows ours, ends the start."""
    security = write(tmp_path, "own-1.json")
    (tmp_path / "README").write_text("not a profile")
    assert [profile.name for profile in load_filters(security)] == ["own-1"]
    (tmp_path / "own-1.json").chmod(0o666)
    with pytest.raises(ConfigError, match="only its owner may write"):
        load_filters(security)
    (tmp_path / "own-1.json").unlink()
    for name in ("strict.json", "Own.json", "a b.json"):
        with pytest.raises(ConfigError, match="a name of its own"):
            load_filters(write(tmp_path, name))
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="larger than"):
        load_filters(write(tmp_path, "big.json", " " * 300_000))
    with pytest.raises(ConfigError, match=r"big\.json: .*defaultAction"):
        load_filters(write(tmp_path, "big.json", "{}"))
    with pytest.raises(ConfigError, match="can't read"):
        load_filters(SecuritySettings(seccomp_profiles=tmp_path / "none"))


def test_many_large_profiles_are_refused_before_nsinit_is_asked(tmp_path: Path) -> None:
    """Profiles that do not fit into one message are refused with that reason."""
    text = json.dumps(
        {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["socketcall"] * 900, "action": "SCMP_ACT_LOG"}]}
    )
    for number in range(8):
        security = write(tmp_path, f"p{number}.json", text)
    with pytest.raises(ConfigError, match="too large together"):
        load_filters(security)


def test_a_configured_name_must_exist(tmp_path: Path) -> None:
    """A misspelt filter is an error at the start, in whichever setting."""
    security = write(tmp_path, "own.json")
    for fields in ({"seccomp": "owm"}, {"seccomp_allowed": ("owm",)}):
        with pytest.raises(ConfigError, match=r"there is no owm\.json"):
            load_filters(SecuritySettings(seccomp_profiles=security.seccomp_profiles, **fields))
    with pytest.raises(ValueError, match="'own' is none of"):
        SecuritySettings(seccomp="own")
    with pytest.raises(ValueError, match="is no name"):
        SecuritySettings(seccomp_allowed=("../own",))


def test_sessions_get_what_is_configured_or_allowed() -> None:
    """The default without a word, `strict` always, others by the operator's list, and a refusal that says so."""

    def chosen(asked: str | None, **security: Any) -> str:
        return resolve(SessionSpec(seccomp=asked), Config(security=SecuritySettings(**security))).options.seccomp

    assert chosen(None) == "strict"
    assert chosen(None, seccomp="mvp") == "mvp"
    assert chosen("strict", seccomp="off") == "strict"
    assert chosen("debug", seccomp_allowed=("debug",)) == "debug"
    for asked in ("debug", "off", "mvp", "nonsense"):
        with pytest.raises(InvalidRequest) as refused:
            chosen(asked)
        assert "security.seccomp_allowed" in refused.value.details["seccomp"]


def test_no_profile_of_an_operator_asks_pid_1() -> None:
    """A call that PID 1 makes itself, and is asked about, would never return."""
    ask = Rule(("getpid",), "ask")
    for profile in (Profile("own", "allow", (ask,)), Profile("own", "ask", ())):
        with pytest.raises(ProfileError, match="PID 1 is asked"):
            prepare([profile])
