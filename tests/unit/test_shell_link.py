"""The link between PID 1 and a shell: what counts as a report, and whose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from runner.loop.loop import EventLoop
from runner.shell.link import STATE_BYTES, Link, Reports, new_name


@dataclass
class Rig:
    """A link, and this process in the place of the shell."""

    loop: EventLoop
    told: list[tuple[object, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        reports = Reports(
            on_ready=lambda: self.told.append(("ready",)),
            on_begun=lambda: self.told.append(("begun",)),
            on_end=lambda status: self.told.append(("end", status)),
        )
        self.errors: list[Exception] = []
        self.link = Link(self.loop, reports, self.errors.append, reads_lines=True)
        self.shell_fd = os.dup(self.link.child_fd)
        self.link.close_child_side(os.getpid())

    def say(self, text: bytes) -> None:
        while text:
            text = text[os.write(self.shell_fd, text[:50_000]) :]
            while self.link._read():
                pass

    def order(self) -> bytes:
        name = new_name("p")
        self.link.order(name)
        assert os.read(self.shell_fd, 4096) == f"{name}\n".encode()
        return name.encode()


@pytest.fixture
def rig() -> Iterator[Rig]:
    loop = EventLoop()
    rig = Rig(loop)
    yield rig
    assert rig.errors == []
    os.close(rig.shell_fd)
    rig.link.close()
    loop.close()


def test_a_command_is_reported_in_pieces(rig: Rig) -> None:
    """Byte by byte: ready, begun, ended, and the state."""
    for byte in b"0 0\n":
        rig.say(bytes([byte]))
    name = rig.order()
    for byte in b"%s +\n%s 7\nexport A=1\n%s .\n" % (name, name, name):
        rig.say(bytes([byte]))
    assert rig.told == [("ready",), ("begun",), ("end", 7)]
    assert rig.link.state == b"export A=1\n"


def test_bytes_of_another_process_are_dropped(rig: Rig) -> None:
    """A fork that holds the shell's end begins nothing, ends nothing and leaves no state."""
    rig.say(b"0 0\n")
    name = rig.order()
    pid = os.fork()
    if pid == 0:
        os.write(rig.shell_fd, b"%s +\n%s 0\nx\n%s .\n" % (name, name, name))
        os._exit(0)
    os.waitpid(pid, 0)
    rig.say(b"%s +\n" % name)
    rig.link._read()
    rig.say(b"%s 3\n" % name)
    assert rig.told[1:] == [("begun",), ("end", 3)]
    assert rig.link.state == b""


def test_a_report_in_another_name_is_none(rig: Rig) -> None:
    """Neither one that comes too late nor a value of a variable that looks like one."""
    rig.say(b"0 0\n")
    first = rig.order()
    rig.say(b"%s +\n%s 1\nexport A='\np00000000aa .\n'\n%s .\n" % (first, first, first))
    assert rig.link.state == b"export A='\np00000000aa .\n'\n"
    second = rig.order()
    rig.say(b"%s 0\n0 0\n%s +\n" % (first, second))
    assert rig.told[1:] == [("begun",), ("end", 1), ("begun",)]


def test_a_state_that_is_too_long_is_not_taken(rig: Rig) -> None:
    """The one before stays, and so do the reports after it."""
    rig.say(b"0 0\n")
    for size, kept in ((5, b"xxxxx\n"), (STATE_BYTES + 1, b"xxxxx\n"), (7, b"xxxxxxx\n")):
        name = rig.order()
        rig.say(b"%s +\n%s 0\n" % (name, name))
        rig.say(b"x" * size + b"\n%s .\n" % name)
        assert rig.link.state == kept
    assert rig.told[1:] == [("begun",), ("end", 0)] * 3


def test_an_order_is_given_again_until_it_is_begun(rig: Rig) -> None:
    """A shell whose read was cut short asks for the line."""
    rig.say(b"0 0\n")
    name = rig.order()
    rig.say(b"0 r\n")
    assert os.read(rig.shell_fd, 4096) == b"%s\n" % name
    rig.say(b"%s +\n0 r\n" % name)
    os.set_blocking(rig.shell_fd, False)
    with pytest.raises(BlockingIOError):
        os.read(rig.shell_fd, 4096)


def test_the_link_looks_away_until_it_is_told_to_listen(rig: Rig) -> None:
    """After an end and after an order nothing is read; the beginning, the end and the state before are read at once."""
    rig.say(b"0 0\n")
    first = rig.order()
    rig.say(b"%s +\n%s 0\n" % (first, first))
    os.write(rig.shell_fd, b"x\n%s .\n" % first)
    second = rig.order()
    os.write(rig.shell_fd, b"%s +\n%s 0\n" % (second, second))
    rig.loop.call_soon(lambda: None, rig.errors.append)
    rig.loop.run_once()
    assert (rig.link.state, rig.told[1:]) == (b"", [("begun",), ("end", 0)])
    rig.link.listen()
    assert (rig.link.state, rig.told[3:]) == (b"x\n", [("begun",), ("end", 0)])


def test_listening_goes_on_until_the_end(rig: Rig) -> None:
    """With nothing to read yet the loop brings the reports, also when another process writes without end."""
    rig.say(b"0 0\n")
    name = rig.order()
    rig.link.listen()
    pid = os.fork()
    if pid == 0:
        for _ in range(100):
            os.write(rig.shell_fd, b"%s 0\n" % name)
        os._exit(0)
    os.waitpid(pid, 0)
    os.write(rig.shell_fd, b"%s +\n%s 7\n" % (name, name))
    rig.link.listen()
    while rig.told[-1] != ("end", 7):
        rig.loop.run_once()
    assert rig.told[1:] == [("begun",), ("end", 7)]
