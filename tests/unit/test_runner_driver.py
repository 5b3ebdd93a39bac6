"""The text handed to shells: what a quoted word and a prologue mean to a real one."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.loop.settings import is_variable_name
from runner.shell import command_driver, terminal_driver

any_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def sh(script: str) -> bytes:
    return subprocess.run(["/bin/sh", "-c", script], check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout


@settings(max_examples=30, deadline=None)
@given(st.lists(any_text, min_size=1, max_size=20))
def test_a_quoted_word_means_itself(words: list[str]) -> None:
    """No character is special inside `quote`."""
    expected = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert sh("printf '%s\\0' " + " ".join(map(command_driver.quote, words))) == expected


@pytest.mark.parametrize("name", ["A", "_", "a1", "PATH", "LC_ALL"])
def test_variable_names_are_taken(name: str) -> None:
    """Names that a shell can assign to."""
    assert is_variable_name(name)


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a\n", "é", "a=b", "$(x)", "__sk_r"])
def test_other_names_are_refused(name: str) -> None:
    """Nothing that would be code, and not the driver's own variables."""
    assert not is_variable_name(name)


def test_the_driver_is_valid_in_every_shell() -> None:
    """The program parses, and every place-holder is filled in."""
    plain = command_driver.driver_text("/run/x", 7, link=9)
    busybox = command_driver.driver_text("/run/x", 7, link=9, is_busybox=True)
    terminal = [terminal_driver.enter("/run/x", interactive=interactive) for interactive in (False, True)]
    terminal += [terminal_driver.leave("/run/x", interactive=interactive) for interactive in (False, True)]
    terminal += [terminal_driver.restore()]
    for text in (plain, busybox, command_driver.busybox_text("/run/x", link=9), *terminal):
        assert not re.search("@[A-Z_]+@", text)
        subprocess.run(["/bin/sh", "-n"], input=text.encode(), check=True)
        subprocess.run(["/bin/bash", "-n"], input=text.encode(), check=True)


def test_the_text_that_reads_lines_is_valid_in_every_shell() -> None:
    """With the path of the shell as one word, whatever it is."""
    text = terminal_driver.read_lines("/run/x", ["/opt/my shell's/sh"])
    assert "'/opt/my shell'\\''s/sh' -n" in text
    subprocess.run(["/bin/sh", "-n"], input=text.encode(), check=True)
    subprocess.run(["/bin/bash", "-n"], input=text.encode(), check=True)


def test_news_are_taken_over_once() -> None:
    """A shell that knows a change already keeps what was made of it since."""
    news = command_driver.news([(1, "A", "first"), (2, "B", "it's"), (3, "C", None)])
    show = 'printf "$A $B ${C-unset} $__sk_g"'
    assert sh(f"A=0 B=0 C=0 __sk_g=0\n{news}{show}") == b"first it's unset 3"
    assert sh(f"A=own B=0 C=0 __sk_g=1\n{news}{show}") == b"own it's unset 3"
    assert sh(f"A=own B=own C=own __sk_g=3\n{news}{show}") == b"own own own 3"
    assert command_driver.news([]) == ""


@pytest.mark.parametrize("before", ["unset V", "V=old", "export V=old", "V="])
def test_epilogue_undoes_prologue(before: str) -> None:
    """A variable is set, or unset, as it was."""
    after = (
        command_driver.prologue("/tmp", {"V": "new"})
        + 'printf "$PWD $V,"\n'
        + command_driver.epilogue("/tmp", {"V": "new"})
    )
    show = 'printf "$PWD ${V-unset}"'
    expected = sh(f"cd /; {before}; {show}")
    assert sh(f"cd /; {before}\n{after}\n{show}") == b"/tmp new," + expected
