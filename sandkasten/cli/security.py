"""`sandkasten security`: weaknesses of this installation, and with `--attack` the results of attacks on it."""

from __future__ import annotations

import argparse
import logging
import time

import orjson
import trio

from sandkasten.cli.common import Stop, load_installed, require_root
from sandkasten.cli.serve import explain
from sandkasten.config import Config
from sandkasten.security.attacks.field import USERS
from sandkasten.security.campaign import Result, attack, choose
from sandkasten.security.posture import Finding, Severity, find_weaknesses
from sandkasten.security.report import HEADER, finding_json, finding_lines, result_json, result_line, summary


def security(arguments: argparse.Namespace) -> int:
    """Print findings and results; 1 if a finding is of severity high or an attempt is BROKEN."""
    config = load_installed(arguments)
    try:
        choose(arguments.only or ())
    except ValueError as error:
        raise Stop(f"--only: {error}") from None
    findings = find_weaknesses(config, arguments.config)
    if not arguments.json:
        for finding in findings:
            print("\n".join(finding_lines(finding)))
        print(f"{len(findings)} findings, {_count_high(findings)} of them high", flush=True)
    started = time.monotonic()
    results = _attack(config, arguments) if arguments.attack else []
    if arguments.json:
        shown = {"findings": list(map(finding_json, findings)), "attempts": list(map(result_json, results))}
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    elif arguments.attack:
        print(summary(results, time.monotonic() - started))
    return 1 if _count_high(findings) or any(each.is_broken for each in results) else 0


def _count_high(findings: list[Finding]) -> int:
    return sum(each.severity is Severity.HIGH for each in findings)


def _attack(config: Config, arguments: argparse.Namespace) -> list[Result]:
    require_root()
    logging.getLogger().addHandler(logging.NullHandler())  # failures in the attacked sessions are intended
    if not arguments.json:
        print(HEADER, flush=True)

    def show(result: Result) -> None:
        if not arguments.json:
            print(result_line(result), flush=True)

    async def run() -> list[Result]:
        return await attack(
            config,
            users=arguments.user or USERS,
            only=arguments.only or (),
            patience=arguments.patience,
            report=show,
        )

    try:
        return trio.run(run, strict_exception_groups=True)
    except Exception as error:
        if reason := explain(error):
            raise Stop(reason) from error
        raise
