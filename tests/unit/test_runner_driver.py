"""The text handed to shells: what a quoted word and a prologue mean to a real one."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import driver

any_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def sh(script: str) -> bytes:
    return subprocess.run(["/bin/sh", "-c", script], check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout


@settings(max_examples=30, deadline=None)
@given(st.lists(any_text, min_size=1, max_size=20))
def test_a_quoted_word_means_itself(words: list[str]) -> None:
    """No character is special inside `quote`."""
    expected = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert sh("printf '%s\\0' " + " ".join(map(driver.quote, words))) == expected


@pytest.mark.parametrize("name", ["A", "_", "a1", "PATH", "LC_ALL"])
def test_variable_names_are_taken(name: str) -> None:
    """What a shell can assign to."""
    assert driver.is_variable_name(name)


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a\n", "é", "a=b", "$(x)", "__sk_r"])
def test_other_names_are_refused(name: str) -> None:
    """Nothing that would be code, and not the driver's own variables."""
    assert not driver.is_variable_name(name)


def test_the_driver_is_valid_in_every_shell() -> None:
    """The program parses, and every place-holder is filled in."""
    text = driver.driver_text("/run/x")
    assert "@" not in text.replace('"$@"', "")
    subprocess.run(["/bin/sh", "-n"], input=text.encode(), check=True)
    subprocess.run(["/bin/bash", "-n"], input=text.encode(), check=True)


@pytest.mark.parametrize("before", ["unset V", "V=old", "export V=old", "V="])
def test_epilogue_undoes_prologue(before: str) -> None:
    """A variable is set, or unset, as it was."""
    after = driver.prologue("/tmp", {"V": "new"}) + 'printf "$PWD $V,"\n' + driver.epilogue("/tmp", {"V": "new"})
    show = 'printf "$PWD ${V-unset}"'
    expected = sh(f"cd /; {before}; {show}")
    assert sh(f"cd /; {before}\n{after}\n{show}") == b"/tmp new," + expected
