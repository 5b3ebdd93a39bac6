"""Flows over a pipe, a FIFO and a terminal: what was written arrives, the end is seen, and nobody waits for nobody."""

from __future__ import annotations

import fcntl
import os
import pty
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runner.loop.loop import EventLoop
from runner.streams.flow import AbandonedPipes, Inflow, Outflow, pending_bytes
from runner.streams.pty import settle
from runner.wire.protocol import CHUNK_BYTES, MAX_FRAME_BYTES, Kind

BIG = 300_000
KINDS = ("pipe", "fifo", "terminal")


@dataclass
class Owner:
    """Keeps what the flows tell."""

    output: bytearray = field(default_factory=bytearray)
    is_done: bool = False
    piece_bytes: int = MAX_FRAME_BYTES
    on_chunk: Callable[[], None] = lambda: None

    def on_output(self, kind: Kind, chunk: bytes) -> None:
        assert not self.is_done
        assert kind is Kind.STDOUT
        self.output += chunk
        self.on_chunk()

    def on_output_done(self) -> None:
        assert not self.is_done
        self.is_done = True

    def on_room(self) -> None: ...


@dataclass
class Rig:
    """A loop, an outflow, and the run's end of it."""

    loop: EventLoop
    owner: Owner
    outflow: Outflow
    leftovers: AbandonedPipes
    write_fd: int

    def turn(self, until: Callable[[], bool]) -> None:
        for _ in range(1000):
            if until():
                return
            self.loop.call_later(0.005, lambda: None, lambda _error: None)
            self.loop.run_once()
        pytest.fail("it never happened")

    def hang_up(self) -> None:
        os.close(self.write_fd)
        self.write_fd = -1


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def make_rig(kind: str, loop: EventLoop, directory: Path) -> Rig:
    owner = Owner()
    if kind == "fifo":
        os.mkfifo(directory / "out")
        read_fd = os.open(directory / "out", os.O_RDONLY | os.O_NONBLOCK)
        write_fd = os.open(directory / "out", os.O_WRONLY)
    else:
        read_fd, write_fd = os.pipe() if kind == "pipe" else pty.openpty()
        if kind == "terminal":
            tty.setraw(write_fd)  # or it makes two bytes of each line end
        os.set_blocking(read_fd, False)
    outflow = Outflow(loop, read_fd, Kind.STDOUT, owner, is_terminal=kind == "terminal")
    return Rig(loop, owner, outflow, AbandonedPipes(loop), write_fd)


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, loop: EventLoop, tmp_path: Path) -> Iterator[Rig]:
    rig = make_rig(request.param, loop, tmp_path)
    yield rig
    if rig.write_fd >= 0:
        rig.hang_up()
    rig.outflow.close(None)


def test_output_is_read_as_it_comes_and_to_its_end(rig: Rig) -> None:
    """Before the end, at the end, and no more afterwards, though the writer is still there."""
    rig.outflow.resume()
    os.write(rig.write_fd, b"early ")
    rig.turn(lambda: rig.owner.output == b"early ")
    os.write(rig.write_fd, b"late")
    rig.outflow.finish(may_read=True)
    rig.turn(lambda: rig.owner.is_done)
    os.write(rig.write_fd, b"too late")
    rig.outflow.resume()
    assert rig.owner.output == b"early late"


def test_a_writer_that_is_gone_is_no_end_before_the_run_has_ended(rig: Rig) -> None:
    """A run that closes its output goes on; the end follows at once when it is known."""
    rig.outflow.resume()
    os.write(rig.write_fd, b"all")
    rig.hang_up()
    rig.turn(lambda: rig.owner.output == b"all")
    rig.loop.call_later(0.01, lambda: None, lambda _error: None)
    rig.loop.run_once()
    assert not rig.owner.is_done
    rig.outflow.finish(may_read=True)
    assert rig.owner.is_done


def test_a_client_that_reads_slowly_gets_the_rest_later(rig: Rig) -> None:
    """Nothing is read while it may not be, and the last output waits in the pipe or terminal."""
    os.write(rig.write_fd, b"waiting")
    rig.outflow.finish(may_read=False)
    assert (rig.owner.is_done, bytes(rig.owner.output)) == (False, b"")
    rig.outflow.resume()
    rig.turn(lambda: rig.owner.is_done)
    assert rig.owner.output == b"waiting"


def test_a_run_without_output_is_done_at_once(rig: Rig) -> None:
    """Nothing comes, so no event would."""
    rig.outflow.finish(may_read=True)
    assert rig.owner.is_done


def test_an_owner_that_pauses_in_the_middle_is_heeded(rig: Rig) -> None:
    """The chunk that filled the client is the last one until it has room."""
    rig.owner.on_chunk = rig.outflow.pause
    rig.outflow.resume()
    os.write(rig.write_fd, b"one")
    rig.turn(lambda: rig.owner.output == b"one")
    os.write(rig.write_fd, b"two")
    rig.loop.call_later(0.01, lambda: None, lambda _error: None)
    rig.loop.run_once()
    assert rig.owner.output == b"one"


@pytest.mark.parametrize("kind", ["pipe", "fifo"])
def test_packets_are_read_to_the_last(kind: str, loop: EventLoop, tmp_path: Path) -> None:
    """A program may have its pipe give one write at a time (pipe2(2), O_DIRECT): a short read is no end."""
    rig = make_rig(kind, loop, tmp_path)
    fcntl.fcntl(rig.write_fd, fcntl.F_SETFL, os.O_DIRECT)
    for number in range(3):
        os.write(rig.write_fd, b"packet%d " % number)
    rig.outflow.finish(may_read=True)
    rig.turn(lambda: rig.owner.is_done)
    assert rig.owner.output == b"packet0 packet1 packet2 "
    rig.hang_up()
    rig.outflow.close(None)


def test_a_pipe_that_runs_full_is_read_in_larger_pieces(loop: EventLoop, tmp_path: Path) -> None:
    """A full read makes the pipe larger; later pieces are as large as the owner takes."""
    rig = make_rig("pipe", loop, tmp_path)
    sizes: list[int] = []
    rig.owner.on_chunk = lambda: sizes.append(len(rig.owner.output) - sum(sizes))
    rig.outflow.resume()
    os.set_blocking(rig.write_fd, False)
    assert os.write(rig.write_fd, bytes(MAX_FRAME_BYTES)) == CHUNK_BYTES
    rig.turn(lambda: bool(sizes))
    for piece_bytes in (MAX_FRAME_BYTES, 2 * CHUNK_BYTES):
        rig.owner.piece_bytes = piece_bytes
        read, written = len(sizes), os.write(rig.write_fd, bytes(MAX_FRAME_BYTES))
        assert written == MAX_FRAME_BYTES
        rig.turn(lambda read=read, size=written: sum(sizes[read:]) == size)  # type: ignore[misc]
    assert sizes == [CHUNK_BYTES, MAX_FRAME_BYTES, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES]
    rig.outflow.close(None)
    rig.hang_up()


def test_a_pipe_that_is_given_up_swallows_what_is_written(loop: EventLoop, tmp_path: Path) -> None:
    """A background job neither blocks nor dies, and the descriptor goes with its last writer."""
    rig = make_rig("pipe", loop, tmp_path)
    rig.outflow.finish(may_read=True)
    rig.outflow.close(rig.leftovers)
    os.set_blocking(rig.write_fd, False)
    written = 0

    def write() -> bool:
        nonlocal written
        try:
            written += os.write(rig.write_fd, bytes(CHUNK_BYTES))
        except BlockingIOError:
            pass
        return written > BIG

    rig.turn(write)
    before = len(os.listdir("/proc/self/fd"))
    rig.hang_up()
    rig.turn(lambda: len(os.listdir("/proc/self/fd")) == before - 2)
    assert not rig.owner.output


def open_files(directory: Path) -> list[str]:
    """Return the descriptors that are open on something in a directory."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory)):
                found.append(fd)
        except FileNotFoundError:
            continue
    return found


# Input ----------------------------------------------------------------------------------------------------------------


def test_input_waits_for_its_reader_and_arrives_whole(loop: EventLoop) -> None:
    """Input from before the run holds its end, more than a pipe takes, and then end-of-file."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    inflow = Inflow(loop, Owner())
    data = os.urandom(BIG)
    inflow.feed(data[:1000])
    inflow.close()  # of a shell that never began the command: the next one gets it
    inflow.feed(data[1000:])
    inflow.end()
    assert inflow.buffered_bytes == BIG
    inflow.connect(write_fd)
    received = bytearray()
    while chunk := os.read(read_fd, CHUNK_BYTES):
        received += chunk
        if inflow.buffered_bytes:
            loop.run_once()
    assert (bytes(received), inflow.buffered_bytes) == (data, 0)
    os.close(read_fd)


def test_input_that_nobody_reads_is_dropped(loop: EventLoop) -> None:
    """The client is not held up by a run that has closed its input."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    inflow = Inflow(loop, Owner(), write_fd)
    inflow.feed(bytes(BIG))
    assert inflow.buffered_bytes > 0
    os.close(read_fd)
    loop.run_once()
    assert inflow.buffered_bytes == 0
    inflow.feed(b"more")
    assert inflow.buffered_bytes == 0


def test_a_settled_terminal_has_taken_what_was_typed() -> None:
    """The kernel hands typed bytes on some time after the write; `settle` waits for that."""
    master_fd, terminal_fd = pty.openpty()
    with open(master_fd, "rb", 0), open(terminal_fd, "rb", 0) as terminal:
        for _ in range(100):
            os.write(master_fd, b"x\n")
            settle(master_fd)
            assert pending_bytes(terminal_fd) == 2
            terminal.read(2)
