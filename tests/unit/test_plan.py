"""Plans of a session's options: root inside as the configuration allows it, and the settings for nsinit and PID 1."""

from __future__ import annotations

import hashlib
import json

import attrs
import pytest

from sandkasten.admission.plan import plan_sandbox, resolve, spec_digest
from sandkasten.config import Config, IsolationSettings
from sandkasten.errors import InvalidRequest
from sandkasten.model import FOREVER_S, FileRules, SessionOptions, SessionSpec


@pytest.mark.parametrize(
    ("allowed", "asked", "possible"),
    [(True, None, True), (True, False, False), (True, True, True), (False, None, False), (False, False, False)],
)
def test_root_is_possible_if_nobody_ruled_it_out(*, allowed: bool, asked: bool | None, possible: bool) -> None:
    """The operator's word is the default and the limit; a session can only have less."""
    config = Config(isolation=IsolationSettings(root_inside=allowed))
    resolved = resolve(SessionSpec(root_inside=asked), config)
    plan = plan_sandbox("0" * 16, resolved, workspace_id=None, image="host", image_kind="host")
    assert (resolved.options.root_inside, plan.root_inside) == (possible, possible)


def test_root_that_the_operator_ruled_out_is_refused() -> None:
    """A session that insists is not made without it."""
    with pytest.raises(InvalidRequest) as refused:
        resolve(SessionSpec(root_inside=True), Config(isolation=IsolationSettings(root_inside=False)))
    assert refused.value.details == {"root_inside": "not available"}


@pytest.mark.parametrize("rules", [None, FileRules(), FileRules(readable=("/usr",), writable=())])
def test_options_outlive_the_record(rules: FileRules | None) -> None:
    """Options that are stored with a session come back as they were."""
    options = SessionOptions(user="root", root_inside=True, filesystem=rules)
    assert SessionOptions(**json.loads(json.dumps(attrs.asdict(options)))) == options


def test_a_spec_is_told_from_another_by_what_it_asks_for() -> None:
    """Each field counts, the key itself and a hint do not, and what is not asked for leaves no trace: not even its
    name."""
    uncounted = SessionSpec(idempotency_key="k", key_id="someone", warm="process")
    assert spec_digest(uncounted) == hashlib.sha256(b"{}").hexdigest()
    asked = [
        SessionSpec(),
        SessionSpec(ttl_s=5.0),
        SessionSpec(ttl_s=FOREVER_S),
        SessionSpec(max_lifetime_s=FOREVER_S),
        SessionSpec(labels={"a": "b"}),
        SessionSpec(env={"a": "b"}),
        SessionSpec(root_inside=False),
        SessionSpec(filesystem=FileRules(writable=())),
        SessionSpec(filesystem=FileRules(readable=())),
    ]
    assert len({spec_digest(spec) for spec in asked}) == len(asked)
