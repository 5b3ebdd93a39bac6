"""The statistics of the benchmark: intervals, blocks, load that is late, and plots."""

from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import trio
import trio.testing

from bench.__main__ import ends_s
from bench.daemon import body_of
from bench.plots import cdf, plot
from bench.report import Report
from bench.sampling import (
    Table,
    blocks,
    closed_loop,
    difference_interval,
    interval,
    open_loop,
    percentile,
    ratio_interval,
)
from bench.sections import OUTPUT, PLAIN_OUTPUT, SECTIONS, Bench


def test_intervals_hold_the_true_value_about_as_often_as_they_say() -> None:
    """Of a hundred samples of a known distribution; the interval of a constant is the constant."""
    chance = random.Random(7)
    hits = 0
    for _ in range(100):
        low, high = interval([chance.gauss(10, 2) for _ in range(40)])
        hits += low <= 10 <= high
    assert hits >= 85
    assert interval([3.0] * 5) == (3.0, 3.0)
    assert ratio_interval([6.0] * 5, [3.0] * 9) == (2.0, 2.0)
    assert difference_interval([6.0] * 5, [3.0] * 9) == (3.0, 3.0)
    wide, narrow = (interval([chance.gauss(10, 2) for _ in range(count)]) for count in (10, 1000))
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_percentiles_are_values_that_were_measured() -> None:
    """Nearest rank; nothing is made up between two samples."""
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, each) for each in (0, 20, 50, 99, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([], 50) != percentile([], 50)


def test_a_block_has_every_row_once() -> None:
    """In an order of its own; the same seed gives the same order."""
    first = list(blocks("abc", 50, random.Random(3)))
    assert first == list(blocks("abc", 50, random.Random(3)))
    rounds = ["".join(first[at : at + 3]) for at in range(0, 150, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) > 3


def test_a_short_run_takes_three_minutes_and_a_whole_one_less_than_twenty_five(tmp_path: Path) -> None:
    """The loops of all sections end by then, one behind the other. One that is late makes one round, and tells."""
    short, whole = ends_s([*SECTIONS], 0.1), ends_s([*SECTIONS], 1)
    assert [*short] == sorted(short)
    assert max(short) <= 3 * 60
    assert max(whole) <= 25 * 60
    assert max(ends_s(["image"], 1)) < max(whole)
    late = Bench(tmp_path, random.Random(1), 1, deadline=-math.inf)
    assert [*late.rounds(["a"], 3)] == ["a"]
    assert late.cut == ["a: 1 of 3 rounds"]


def test_a_failure_is_counted_and_never_a_time() -> None:
    """A row that failed says so."""
    table = Table()
    for answer in ("right", "wrong"):
        with table.timed("row"):
            if answer == "wrong":
                raise RuntimeError("another answer")
    assert (len(table.row("row").values), table.row("row").errors) == (1, ["RuntimeError: another answer"])


def test_a_row_has_no_more_figures_than_its_samples_give(tmp_path: Path) -> None:
    """No p99 that is the largest sample, no interval of four; a rate has its slow end. What is compared, and every goal
    that is a ratio, has an interval."""
    bench = Bench(tmp_path, random.Random(1), 1)
    report = Report(bench, tmp_path, 1, "make bench")
    many, few = [float(value) for value in range(100)], [1.0, 2.0, 3.0, 4.0]
    bench.table.row("99").values += many[:99]
    bench.table.row("100").values += many
    bench.table.row("4").values += few
    bench.table.row(OUTPUT).values += [each / 2 for each in few * 2]
    bench.table.row(PLAIN_OUTPUT).values += few * 2
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in report.page() if " | " in line}
    assert [cells[name][5] == "" for name in ("4", "99", "100")] == [True, True, False]
    assert [cells[name][3] == "" for name in ("4", "99", "100")] == [True, False, False]
    assert cells["100"][5].startswith("98 (")
    assert cells[OUTPUT][6].startswith("0.50 (")
    assert any("50 % |" in line and line.endswith("| met |") for line in report.page())
    assert bench.table.row(OUTPUT).as_json(OUTPUT) == {"kB/s": [500, 1000, 1500, 2000] * 2, "errors": []}


async def test_an_open_loop_counts_from_the_intended_time(autojump_clock: trio.testing.MockClock) -> None:
    """One client that takes a second for each of ten requests a second: the queue is in the latencies. A closed loop of
    the same client sees a second each time."""

    async def request(_number: int) -> None:
        await trio.sleep(1)

    row = await open_loop(request, 1, 10, 2, random.Random(5))
    count = len(row.values) + len(row.errors)
    assert 10 <= count <= 35
    assert row.values == sorted(row.values)
    assert row.values[-1] > 5000
    assert len(row.errors) == count - len(row.values)
    closed, rate = await closed_loop(request, 1, 10)
    assert {round(value) for value in closed.values} == {1000}
    assert rate == pytest.approx(1.0)


async def test_late_and_wrong_answers_are_failures(autojump_clock: trio.testing.MockClock) -> None:
    """An answer that never comes ends after a bound; neither is among the times."""

    async def request(number: int) -> None:
        if number:
            await trio.sleep_forever()
        raise RuntimeError("wrong")

    row, rate = await closed_loop(request, 2, 0.0001)
    assert (row.values, len(row.errors), rate) == ([], 2, 0)


def test_plots_are_documents_and_leave_out_what_an_axis_lacks() -> None:
    """Names are escaped; a point at zero has no place on a logarithmic axis."""
    document = plot("A <title>", {"a & b": [(0, 1), (1, 2), (10, 3)], "empty": []}, x="ms", y="share", log_x=True)
    root = ElementTree.fromstring(document)
    lines = [each for each in root.iter() if each.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 0]
    assert "a &amp; b" in document
    assert cdf([3.0, 1.0, 2.0]) == [(1.0, 1 / 3), (2.0, 2 / 3), (3.0, 1.0)]


@pytest.mark.parametrize("cut", range(1, 30, 7))
def test_answers_are_whole_before_they_are_read(cut: int) -> None:
    """With a length, and in chunks."""
    head = b"HTTP/1.1 200 OK\r\n"
    answers = {head + b"content-length: 5\r\n\r\nabcde", head + b"x: y\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"}
    for answer in answers:
        assert body_of(answer) == b"abcde"
        assert body_of(answer[:-cut]) is None
    with pytest.raises(RuntimeError, match="no"):
        body_of(b"HTTP/1.1 404 Not\r\ncontent-length: 2\r\n\r\nno")
