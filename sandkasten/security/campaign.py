"""A campaign: makes the attempts of the catalogue and collects their results. The only place that decides a verdict.

An attempt without an answer in time is BROKEN, and so is one whose session dies. No attempt is left out silently: one
that can't be made here is `not applicable`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import orjson
import trio

from sandkasten.config import Config
from sandkasten.errors import InvalidRequest
from sandkasten.model import Status
from sandkasten.security.attacks.field import ROOT, SANDBOX, Field, open_field
from sandkasten.security.catalog import ATTACKS
from sandkasten.security.probes.attempt import BROKEN, HELD, NOT_APPLICABLE, Attempt, NotApplicable, Outcome, judge
from sandkasten.security.probes.inside import INSIDE

_BATCH_S = 60.0
_ATTACK_S = 20.0
_INSIDE = frozenset(each.id for each in INSIDE)


@attrs.frozen
class Result:
    """One attempt as one user, and its result. `user` is "" for attempts that need none."""

    attempt: Attempt
    user: str
    verdict: str
    seen: str
    duration_ms: int = 0

    @property
    def is_broken(self) -> bool:
        return self.verdict == BROKEN


Report = Callable[[Result], object]


def catalogue() -> tuple[Attempt, ...]:
    """Return all attempts, those made inside first."""
    return (*INSIDE, *ATTACKS)


def choose(patterns: Sequence[str]) -> tuple[Attempt, ...]:
    """Return the attempts whose id begins with one of `patterns`; all attempts for no pattern.

    Raises:
        ValueError: no attempt's id begins with one of them.
    """
    for pattern in patterns:
        if not any(each.id.startswith(pattern) for each in catalogue()):
            groups = sorted({each.group for each in catalogue()})
            raise ValueError(f"no attempt's id begins with {pattern!r}; the groups are {', '.join(groups)}")
    return tuple(each for each in catalogue() if not patterns or each.id.startswith(tuple(patterns)))


async def attack(
    config: Config,
    *,
    users: Sequence[str] = (SANDBOX, ROOT),
    only: Sequence[str] = (),
    patience: float = 1.0,
    report: Report = lambda _result: None,
) -> list[Result]:
    """Make all attempts on a field of their own, as each of `users`; return the results in order."""
    async with open_field(config, patience=patience) as field:
        return await make_all(field, choose(only), users=users, report=report)


async def make_all(field: Field, attempts: Sequence[Attempt], *, users: Sequence[str], report: Report) -> list[Result]:
    """Make attempts on an open field."""
    results: list[Result] = []
    blind = await _find_blind(field, attempts)

    def add(result: Result) -> None:
        if result.attempt.id in blind and not result.is_broken:
            why = "even in the neighbour's own session it does not find what it looks for"
            result = attrs.evolve(result, verdict=NOT_APPLICABLE, seen=why)
        results.append(result)
        report(result)

    for user in users:
        as_user = attrs.evolve(field, user=user)
        mine = [each for each in attempts if user in each.users]
        if reason := await _why_not(as_user):
            for each in mine:
                add(Result(each, user, NOT_APPLICABLE, reason))
            continue
        await make_inside(as_user, [each for each in mine if each.id in _INSIDE], add)
        for each in mine:
            if each.id not in _INSIDE:
                add(await make_attack(as_user, each))
    for each in attempts:
        if "" in each.users:
            add(await make_attack(field, each, user=""))
    return results


async def _why_not(field: Field) -> str:
    """Return the reason why no attempt can run as the user, empty if attempts can."""
    try:
        async with field.session() as session_id:
            result = await field.run(session_id, "command -v python3")
    except InvalidRequest as error:
        return f"no session runs as {field.user}: {error}"
    return "" if result.end.exit_code == 0 else "the image has no python3"


async def make_inside(field: Field, attempts: Sequence[Attempt], add: Report) -> None:
    """Make the attempts inside a session; those behind a death of the session go on in a new one."""
    left = list(attempts)
    while left:
        async with field.session() as session_id:
            started = trio.current_time()
            result = await field.probe(session_id, *(each.id for each in left), timeout_s=_BATCH_S)
            lives = (await field.supervisor.get(session_id)).status is Status.RUNNING
        known = {each.id: each for each in left}
        for line in result.stdout.splitlines():
            outcome = _parse(line)
            if outcome is not None and outcome[0] in known:
                attempt = known.pop(outcome[0])
                duration_ms = round(1000 * (trio.current_time() - started) / len(left))
                add(Result(attempt, field.user, outcome[1].verdict, outcome[1].seen, duration_ms))
        left = list(known.values())
        if left:
            how = "its session died" if not lives else f"no answer: {result.end.cause} {result.stderr[-200:].decode()}"
            add(Result(left.pop(0), field.user, BROKEN, how))


def _parse(line: bytes) -> tuple[str, Outcome] | None:
    """Return the id and the outcome in a line of output, None if malformed; the line came out of a session."""
    try:
        fields = orjson.loads(line)
        outcome = Outcome(str(fields["verdict"]), str(fields["seen"])[:500])
        return (str(fields["id"]), outcome) if outcome.verdict in (HELD, BROKEN, NOT_APPLICABLE) else None
    except (ValueError, KeyError, TypeError):
        return None


async def make_attack(field: Field, attempt: Attempt, *, user: str | None = None) -> Result:
    """Make one attempt from outside, bounded in time."""
    started = trio.current_time()
    outcome = Outcome(BROKEN, f"not over within {_ATTACK_S * field.patience:.0f} s")
    with trio.move_on_after(_ATTACK_S * field.patience):
        try:
            outcome = judge(attempt.expected, await attempt.run(field))
        except NotApplicable as reason:
            outcome = Outcome(NOT_APPLICABLE, str(reason))
        except Exception as error:  # noqa: BLE001 - whatever went wrong, it is no hold
            first = error
            while isinstance(first, ExceptionGroup):  # of a nursery, whose own words say nothing
                first = first.exceptions[0]
            outcome = Outcome(BROKEN, f"{type(first).__name__}: {first}")
    duration_ms = round(1000 * (trio.current_time() - started))
    return Result(attempt, field.user if user is None else user, outcome.verdict, outcome.seen, duration_ms)


async def _find_blind(field: Field, attempts: Sequence[Attempt]) -> set[str]:
    """Return the attempts on the neighbour whose not finding anything means nothing here."""
    names = {each.id for each in attempts if each.control == "neighbour"}
    if not names:
        return set()
    found = await show_controls(field)
    return {name for name in names if name not in found or found[name].verdict != BROKEN}


async def show_controls(field: Field) -> dict[str, Outcome]:
    """Make the attempts that look for the neighbour inside the neighbour itself: there they must find it."""
    names = [each.id for each in INSIDE if each.control == "neighbour"]
    result = await field.probe(field.neighbour, *names, timeout_s=_BATCH_S)
    return dict(filter(None, map(_parse, result.stdout.splitlines())))
