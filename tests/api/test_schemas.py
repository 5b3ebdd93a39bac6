"""Request bodies: what is accepted, what is refused by name, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.api.http.json import decode_object
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.resources import fields, runs
from sandkasten.api.resources.files import WriteRequest
from sandkasten.api.resources.runs import ExecRequest, TerminalRequest
from sandkasten.api.resources.sessions import CreateHead, CreateRequest, PatchRequest
from sandkasten.config import Defaults
from sandkasten.errors import InvalidImage, InvalidRequest, TooLarge
from sandkasten.model import (
    FOREVER_S,
    LIMIT_BOUNDS,
    ExecSpec,
    FileRules,
    Limits,
    SessionPatch,
    SessionSpec,
    TerminalSize,
)
from sandkasten.model.network import Network, NetworkLimits, NetworkMode

T = TypeVar("T")

CLASSES: tuple[type[Any], ...] = (
    CreateRequest,
    ExecRequest,
    PatchRequest,
    WriteRequest,
    TerminalRequest,
    runs.SignalRequest,
    runs.CancelRequest,
    runs.StdinRequest,
    runs.ShellRequest,
    runs.ProcessRequest,
    runs.WaitRequest,
)


def parse(body: bytes, cls: type[T]) -> T:
    return fields.parse(decode_object(body), cls)


def refused(cls: type[object], body: object) -> dict[str, object]:
    """Return the details of the refusal that `body` must get."""
    with pytest.raises(InvalidRequest) as caught:
        parse(json.dumps(body).encode(), cls)
    return dict(caught.value.details)


def create(body: object, *, key_header: str | None = None) -> SessionSpec:
    """Return the spec that a create body becomes."""
    request = parse(json.dumps(body).encode(), CreateRequest)
    return request.to_spec(default_limits=Limits(), key_header=key_header)


def test_an_empty_create_is_all_defaults() -> None:
    """An empty object, no body, nulls and a zero ttl mean the same."""
    assert create({}) == SessionSpec()
    assert parse(b"", CreateRequest) == parse(b"{}", CreateRequest)
    assert create({"ttl_seconds": 0, "image": None, "labels": None, "env": None, "network": None}) == SessionSpec()


def test_a_full_create_reaches_the_spec() -> None:
    """Every offered field; a partial `limits` is filled from the defaults."""
    spec = create(
        {
            "image": "python",
            "ttl_seconds": 86400,
            "workspace_id": "user1-proj.a_b",
            "idempotency_key": "k",
            "labels": {"a": "b"},
            "env": {"A_1": "x=y"},
            "limits": {"cpu": 2, "memory_mb": 64},
            "max_lifetime_seconds": 60,
            "readonly_rootfs": True,
            "shell": "sh",
            "network": {"mode": "none", "allow": []},
            "exec_mode": "stateless",
            "stop_grace_ms": 10000,
            "user": "root",
            "account": "user",
            "root_inside": True,
            "filesystem": {"readable": ["/usr"], "writable": []},
            "streams": "merged",
            "something_new": {"unknown": [1]},
        }
    )
    assert spec == SessionSpec(
        image="python",
        ttl_s=86400.0,
        workspace_id="user1-proj.a_b",
        labels={"a": "b"},
        env={"A_1": "x=y"},
        limits=Limits(cpu=2.0, memory_mb=64),
        max_lifetime_s=60.0,
        readonly_rootfs=True,
        shell="sh",
        exec_mode="stateless",
        stop_grace_ms=10000,
        user="root",
        account="user",
        root_inside=True,
        filesystem=FileRules(readable=("/usr",), writable=()),
        streams="merged",
        network=Network(),
        idempotency_key="k",
    )


def test_a_network_is_an_object_or_a_mode() -> None:
    """The mode as a string stands for an object with the mode alone; a create may leave the mode to the server."""
    assert create({"network": "open"}).network == create({"network": {"mode": "open"}}).network == Network("open")
    given = {"allow": ["@python", "Example.org:8443"], "deny": [], "limits": {"bytes_up": 5}, "log": "denied"}
    network = Network("none", ["@python", "Example.org:8443"], [], NetworkLimits(bytes_up=5), "denied")
    assert create({"network": given}).network == network
    request = parse(json.dumps({"network": given}).encode(), CreateRequest)
    spec = request.to_spec(default_limits=Limits(), default_network=NetworkMode.ALLOW, key_header=None)
    assert spec.network == attrs.evolve(network, mode="allow")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"image": 5}, "image"),
        ({"ttl_seconds": "60"}, "ttl_seconds"),
        ({"ttl_seconds": 1.5}, "ttl_seconds"),
        ({"ttl_seconds": True}, "ttl_seconds"),
        ({"ttl_seconds": -1}, "ttl_seconds"),
        ({"ttl_seconds": 86401}, "ttl_seconds"),
        ({"workspace_id": "UPPER"}, "workspace_id"),
        ({"workspace_id": "../x"}, "workspace_id"),
        ({"workspace_id": ""}, "workspace_id"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "a b"}, "idempotency_key"),
        ({"labels": []}, "labels"),
        ({"labels": {"a": 1}}, "labels"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {str(number): "" for number in range(65)}}, "labels"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"__sk_r": "x"}}, "env"),
        ({"env": {"A": "x\0y"}}, "env"),
        ({"env": {"A": "x" * 200_000}}, "env"),
        ({"limits": 5}, "limits"),
        ({"limits": {"cpu": 0}}, "limits.cpu"),
        ({"limits": {"memory_mb": 0.5}}, "limits.memory_mb"),
        ({"limits": {"cpu": 1e308}}, "limits.cpu"),
        ({"limits": {"memory_mb": 15}}, "limits.memory_mb"),
        ({"limits": {"memory_mb": 16 * 2**20 + 1}}, "limits.memory_mb"),
        ({"limits": {"pids": 7}}, "limits.pids"),
        ({"limits": {"pids": 2**22 + 1}}, "limits.pids"),
        ({"limits": {"disk_mb": 0}}, "limits.disk_mb"),
        ({"network": {"allow": "example.org"}}, "network.allow"),
        ({"network": {"allow": [5]}}, "network.allow"),
        ({"network": {"deny": ["x" * 513]}}, "network.deny"),
        ({"network": {"deny": ["a.example"] * 257}}, "network.deny"),
        ({"network": {"limits": {"connections": 0}}}, "network.limits.connections"),
        ({"network": {"limits": {"bytes_down": 0}}}, "network.limits.bytes_down"),
        ({"network": {"log": "none"}}, "network.log"),
        ({"idle_timeout_seconds": 0}, "idle_timeout_seconds"),
        ({"idle_timeout_seconds": 366 * 86_400 + 1}, "idle_timeout_seconds"),
        ({"idle_timeout_seconds": False}, "idle_timeout_seconds"),
        ({"max_lifetime_seconds": 366 * 86_400 + 1}, "max_lifetime_seconds"),
        ({"max_lifetime_seconds": "60"}, "max_lifetime_seconds"),
        ({"max_lifetime_seconds": 0}, "max_lifetime_seconds"),
        ({"readonly_rootfs": "yes"}, "readonly_rootfs"),
        ({"account": "root"}, "account"),
        ({"user": "a b"}, "user"),
        ({"user": 0}, "user"),
        ({"root_inside": "no"}, "root_inside"),
        ({"filesystem": ["/tmp"]}, "filesystem"),
        ({"filesystem": {"writable": "/tmp"}}, "filesystem.writable"),
        ({"filesystem": {"writable": ["tmp"]}}, "filesystem.writable"),
        ({"filesystem": {"readable": ["/tmp\n"]}}, "filesystem.readable"),
        ({"filesystem": {"readable": ["/tmp"] * 65}}, "filesystem.readable"),
        ({"shell": "fish"}, "shell"),
        ({"network": "mode"}, "network"),
        ({"network": "host"}, "network"),
        ({"limits": "cpu"}, "limits"),
        ({"limits": []}, "limits"),
        ({"network": {"mode": "host"}}, "network.mode"),
        ({"network": {"mode": "x"}}, "network.mode"),
        ({"exec_mode": "stateles"}, "exec_mode"),
        ({"stop_grace_ms": 10001}, "stop_grace_ms"),
        ({"stop_grace_ms": -1}, "stop_grace_ms"),
        ({"streams": "mixed"}, "streams"),
    ],
)
def test_a_bad_create_field_is_named(body: dict[str, object], field: str) -> None:
    """The refusal names the bad field and no other."""
    assert list(refused(CreateRequest, body)) == [field]


def test_all_bad_fields_are_named_at_once() -> None:
    """A client fixes its request in one go."""
    body = {"image": 5, "limits": {"cpu": "1", "pids": True}, "network": {"mode": "host"}}
    assert set(refused(CreateRequest, body)) == {"image", "limits.cpu", "limits.pids", "network.mode"}


@pytest.mark.parametrize("image", ["", "../etc", "-a", "a//b", "a:b:c", "a" * 65, "é"])
def test_a_malformed_image_name_is_an_invalid_image(image: str) -> None:
    """A malformed image name has an error code of its own."""
    with pytest.raises(InvalidImage):
        create({"image": image})


def test_the_idempotency_key_may_come_in_a_header() -> None:
    """The same in both places is fine, different ones are not."""
    assert create({}, key_header="k").idempotency_key == "k"
    assert create({"idempotency_key": "k"}, key_header="k").idempotency_key == "k"
    with pytest.raises(InvalidRequest):
        create({"idempotency_key": "k"}, key_header="other")
    for header in ("a b", ""):
        with pytest.raises(InvalidRequest) as refused:
            fields.parse({"idempotency_key": header}, CreateHead)
        assert list(refused.value.details) == ["idempotency_key"]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"cmd": ["ls"]}, "cmd", "string"),
        ({"cmd": "a\0b"}, "cmd", "NUL"),
        ({"cmd": "a", "timeout_ms": -1}, "timeout_ms", "between"),
        ({"cmd": "a", "timeout_ms": "5"}, "timeout_ms", "integer"),
        ({"cmd": "a", "raw_output": 1}, "raw_output", "true or false"),
        ({"cmd": "a", "encoding": "latin-1"}, "encoding", "one of"),
        ({"cmd": "a", "cwd": ""}, "cwd", "bytes"),
        ({"cmd": "a", "cwd": "a\0"}, "cwd", "NUL"),
        ({"cmd": "a", "cwd": "a" * 4097}, "cwd", "bytes"),
        ({"cmd": "a", "exec_id": "a b"}, "exec_id", "visible"),
        ({"cmd": "a", "stdin": 5}, "stdin", "string"),
        ({"cmd": "a", "on_timeout": "ignore"}, "on_timeout", "one of"),
        ({"cmd": "a", "stdin": False}, "stdin", "string"),
        ({"cmd": "a", "stdin": 1}, "stdin", "string"),
        ({"cmd": "a", "on_disconnect": "stay"}, "on_disconnect", "one of"),
        ({"cmd": "a", "shell": "a b"}, "shell", "1 to 32"),
        ({"cmd": "a", "shell": ""}, "shell", "1 to 32"),
        ({"cmd": "a", "shell": "../x"}, "shell", "1 to 32"),
        ({"cmd": "a", "mode": "quick"}, "mode", "one of"),
        ({"cmd": "a", "user": "a b"}, "user", "name"),
        ({"cmd": "a", "user": "-x"}, "user", "name"),
        ({"cmd": "a", "user": "1:"}, "user", "name"),
        ({"cmd": "a", "user": 1000}, "user", "string"),
        ({"cmd": "a", "tty": True}, "tty", "object"),
        ({"cmd": "a", "tty": {"cols": 80}}, "tty.rows", "required"),
        ({"cmd": "a", "tty": {"cols": 0, "rows": 24}}, "tty.cols", "between"),
        ({"cmd": "a", "tty": {"cols": 80, "rows": 1001}}, "tty.rows", "between"),
        ({"cmd": "a", "tty": {"cols": 80, "rows": "24"}}, "tty.rows", "integer"),
        ({"argv": "ls"}, "argv", "array"),
        ({"argv": []}, "argv", "array"),
        ({"argv": ["ls", 5]}, "argv", "string"),
        ({"argv": ["ls", "a\0"]}, "argv", "NUL"),
        ({"argv": [""]}, "argv", "program"),
        ({"argv": ["a"] * 4097}, "argv", "4096"),
    ],
)
def test_a_bad_exec_field_is_named(body: dict[str, object], field: str, words: str) -> None:
    """No other field is named."""
    details = refused(ExecRequest, body)
    assert list(details) == [field]
    assert words in str(details[field])


def exec_spec(**body: object) -> ExecSpec:
    """Return the spec that an exec body becomes on a server that allows little."""
    return parse(json.dumps(body).encode(), ExecRequest).to_spec(SMALL)


SMALL = ApiSettings(max_command_bytes=10, max_exec_timeout_ms=1000)


def test_an_exec_reaches_the_spec() -> None:
    """Defaults that are spelled out are accepted."""
    offered = {"shell": "default", "mode": "stateful", "on_disconnect": "cancel", "on_timeout": "error"}
    spec = exec_spec(cmd="cat", cwd="/tmp", env={"A": "1"}, stdin="é", exec_id="e1", timeout_ms=5, **offered)
    assert spec == ExecSpec(
        "cat", stateless=False, timeout_ms=5, cwd="/tmp", env={"A": "1"}, stdin="é".encode(), exec_id="e1"
    )
    assert exec_spec(cmd="").command == ""
    assert exec_spec(cmd="a", stdin="").stdin == b""


@pytest.mark.parametrize(("body", "given"), [({}, 1000), ({"timeout_ms": 0}, 1000), ({"timeout_ms": 5}, 5)])
def test_a_timeout_of_zero_is_the_maximum(body: dict[str, object], given: int) -> None:
    """No timeout means the maximum, too; a longer one becomes the maximum."""
    assert exec_spec(cmd="a", **body) == ExecSpec("a", timeout_ms=given)
    assert exec_spec(cmd="a", timeout_ms=2**53).timeout_ms == 1000


def test_no_limit_in_time_is_had_where_it_is_allowed() -> None:
    """Null is not the same as absent."""
    with pytest.raises(InvalidRequest) as caught:
        exec_spec(cmd="a", timeout_ms=None)
    assert list(caught.value.details) == ["timeout_ms"]
    request = parse(b'{"cmd": "a", "timeout_ms": null}', ExecRequest)
    assert request.to_spec(attrs.evolve(SMALL, allow_unlimited_exec=True)) == ExecSpec("a", unlimited=True)


def test_a_program_reaches_the_spec() -> None:
    """With its user, terminal and open input; without a shell."""
    tty = {"cols": 100, "rows": 30}
    spec = exec_spec(argv=["ls", "-l", ""], user="1001:100", tty=tty, stdin=True, mode="stateless", shell="default")
    assert spec == ExecSpec(
        argv=("ls", "-l", ""),
        stateless=True,
        timeout_ms=1000,
        user="1001:100",
        stdin_open=True,
        terminal=TerminalSize(100, 30),
    )
    assert exec_spec(argv=["ls"]) == ExecSpec(argv=("ls",), timeout_ms=1000)
    assert exec_spec(cmd="ls", mode="stateless", user="app") == ExecSpec(
        "ls", stateless=True, timeout_ms=1000, user="app"
    )
    assert exec_spec(cmd="ls", shell="build").shell == "build"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "cmd"),
        ({"cmd": None}, "cmd"),
        ({"cmd": "ls", "argv": ["ls"]}, "cmd"),
        ({"argv": ["ls"], "mode": "stateful"}, "mode"),
        ({"argv": ["ls"], "shell": "build"}, "shell"),
        ({"cmd": "ls", "mode": "stateless", "shell": "build"}, "shell"),
        ({"cmd": "ls", "mode": "stateful", "user": "app"}, "user"),
        ({"cmd": "ls", "tty": {"cols": 1, "rows": 1}, "stdin": "text"}, "stdin"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(body: dict[str, object], field: str) -> None:
    """Never is one of them ignored."""
    with pytest.raises(InvalidRequest) as caught:
        exec_spec(**body)
    assert list(caught.value.details) == [field]


def test_a_long_command_is_too_large() -> None:
    """Counted in bytes, with advice."""
    assert exec_spec(cmd="é" * 5).command == "é" * 5
    with pytest.raises(TooLarge) as caught:
        exec_spec(cmd="é" * 6)
    assert caught.value.details["cmd_bytes"] == 12
    assert caught.value.details["max_cmd_bytes"] == 10
    assert exec_spec(argv=["abcd", "efgh"]).argv == ("abcd", "efgh")
    with pytest.raises(TooLarge):
        exec_spec(argv=["abcd", "efghi"])
    assert "file" in str(caught.value.details["recommendation"])


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ({"text": ""}, b""),
        ({"text": "a\0é"}, "a\0é".encode()),
        ({"content_base64": ""}, b""),
        ({"content_base64": "/w=="}, b"\xff"),
    ],
)
def test_empty_and_binary_contents_are_valid(body: dict[str, str], content: bytes) -> None:
    """Presence decides, not truth."""
    assert parse(json.dumps({"path": "a"} | body).encode(), WriteRequest).content == content


@pytest.mark.parametrize(
    "body",
    [
        {"path": "a", "content_base64": "!"},
        {"path": "a", "content_base64": "YQ"},
        {"path": "a", "content_base64": "YQ==\n"},
        {"path": "a", "text": 5},
        {"path": "", "text": ""},
        {"path": "a\0", "text": ""},
        {"text": ""},
    ],
)
def test_a_bad_write_is_refused(body: dict[str, object]) -> None:
    """Base64 is strict, paths are C strings."""
    assert len(refused(WriteRequest, body)) == 1


@pytest.mark.parametrize("body", [{"path": "a"}, {"path": "a", "text": "", "content_base64": ""}])
def test_the_content_is_given_exactly_once(body: dict[str, object]) -> None:
    """Neither and both are refused."""
    with pytest.raises(InvalidRequest):
        _ = parse(json.dumps(body).encode(), WriteRequest).content


def test_a_patch_changes_only_what_it_names() -> None:
    """A partial `limits` is filled from what the session has."""
    request = parse(b'{"ttl_seconds": 60, "limits": {"pids": 9}}', PatchRequest)
    current = Limits(cpu=3.0, memory_mb=100)
    assert request.to_patch(current=current) == SessionPatch(ttl_s=60.0, limits=Limits(cpu=3.0, memory_mb=100, pids=9))
    assert parse(b"{}", PatchRequest).to_patch(current=current) == SessionPatch()
    variables = {"A": "b", "GONE": None}
    assert parse(json.dumps({"env": variables}).encode(), PatchRequest).to_patch(current=current).env == variables
    for bad in ("x", {"A": 1}, {"A=": "x"}, {"A": "x\0"}, {"A": "x" * 200_000}):
        assert list(refused(PatchRequest, {"env": bad})) == ["env"]
    assert list(refused(PatchRequest, {"limits": {"pids": 7}})) == ["limits.pids"]


@pytest.mark.parametrize("idle_timeout_seconds", [5, None])
def test_two_different_idle_timeouts_are_refused(idle_timeout_seconds: int | None) -> None:
    """One of them would else be ignored."""
    body = json.dumps({"ttl_seconds": 6, "idle_timeout_seconds": idle_timeout_seconds}).encode()
    with pytest.raises(InvalidRequest) as refused_create:
        parse(body, CreateRequest).to_spec(default_limits=Limits(), key_header=None)
    with pytest.raises(InvalidRequest) as refused_patch:
        parse(body, PatchRequest).to_patch(current=Limits())
    assert list(refused_create.value.details) == list(refused_patch.value.details) == ["idle_timeout_seconds"]


@pytest.mark.parametrize(
    ("body", "ttl_s", "max_lifetime_s"),
    [
        ({}, None, None),
        ({"ttl_seconds": None}, None, None),
        ({"ttl_seconds": 0}, None, None),
        ({"idle_timeout_seconds": None}, FOREVER_S, None),
        ({"idle_timeout_seconds": None, "ttl_seconds": 0}, FOREVER_S, None),
        ({"idle_timeout_seconds": 60}, 60.0, None),
        ({"idle_timeout_seconds": 60, "ttl_seconds": 60}, 60.0, None),
        ({"idle_timeout_seconds": 60, "ttl_seconds": None}, 60.0, None),
        ({"idle_timeout_seconds": 90_000}, 90_000.0, None),
        ({"max_lifetime_seconds": None}, None, FOREVER_S),
        ({"max_lifetime_seconds": 60}, None, 60.0),
    ],
)
def test_null_is_no_end_and_absent_is_the_default(
    body: dict[str, object], ttl_s: float | None, max_lifetime_s: float | None
) -> None:
    """The same for a create and a change; `ttl_seconds` keeps the meaning that its null and 0 always had."""
    spec = create(body)
    assert (spec.ttl_s, spec.max_lifetime_s) == (ttl_s, max_lifetime_s)
    patch = parse(json.dumps(body).encode(), PatchRequest).to_patch(current=Limits())
    assert (patch.ttl_s, patch.max_lifetime_s) == (ttl_s, max_lifetime_s)


@pytest.mark.parametrize("name", LIMIT_BOUNDS)
@pytest.mark.parametrize("side", [0, 1])
def test_the_bounds_themselves_are_limits_for_requests_and_configuration(name: str, side: int) -> None:
    """Both ask one table; a limit that a default may have can be asked for, too."""
    bound: Any = LIMIT_BOUNDS[name][side]  # a float for one field, an int for the others
    limits = create({"limits": {name: bound}}).limits
    assert limits == attrs.evolve(Limits(), **{name: bound})
    names = {"cpu": "cpu_limit", "memory_mb": "mem_limit_mb", "pids": "pids_limit", "disk_mb": "disk_limit_mb"}
    setting = names.get(name, f"{name}_limit")
    assert Defaults(**{setting: bound}).limits == limits


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = sorted({attribute.name.removesuffix("_") for cls in CLASSES for attribute in cls.__attrs_attrs__})


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4), st.sampled_from(CLASSES))
def test_any_json_is_a_request_or_a_typed_refusal(body: dict[str, object], cls: type[object]) -> None:
    """No value of any field makes anything but `InvalidRequest`, and its details are JSON."""
    try:
        parse(json.dumps(body).encode(), cls)
    except InvalidRequest as error:
        json.dumps(dict(error.details))


def ignored(body: object, cls: type) -> list[str]:
    assert isinstance(body, dict)
    return list(fields.ignored_fields(body, cls))


def test_unknown_fields_are_found_at_every_depth() -> None:
    """By path; those in a mapping of the client's own names are none of ours."""
    body = {"imge": "x", "env": {"A": "1"}, "labels": {"b": "c"}, "limits": {"cpu": 1, "gpu": 2}, "network": {}}
    assert ignored(body, CreateRequest) == ["imge", "limits.gpu"]
    assert ignored({"cmd": ":", "shell_": "x", "stdin": {"text": "", "more": 1}}, ExecRequest) == ["shell_"]
    assert ignored({"limits": 3, "image": {}}, CreateRequest) == []


def test_limits_have_the_names_of_configurations_as_well() -> None:
    """A limit that was asked for is in force under either name; both at once are refused."""
    older = {"mem_limit_mb": 64, "cpu_quota": 0.5, "pids_limit": 99}
    assert create({"limits": older}).limits == attrs.evolve(Limits(), memory_mb=64, cpu=0.5, pids=99)
    assert ignored({"limits": older}, CreateRequest) == []
    assert refused(CreateRequest, {"limits": {"cpu": 1, "cpu_limit": 1}}) == {
        "limits": "must not have both cpu_limit and cpu, which mean the same"
    }
    assert "limits" in next(iter(refused(CreateRequest, {"limits": {"mem_limit_mb": "much"}})))
