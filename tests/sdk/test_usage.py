"""The clients in use, against a daemon with real sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import daemon as daemon  # one daemon for this file
from tests.e2e.daemon import KEY, Daemon
from tests.sdk import usage
from tests.sdk.flavours import FLAVOURS, run

pytestmark = pytest.mark.e2e


@pytest.fixture
def make(daemon: Daemon) -> Iterator[Callable[[Any], Any]]:
    """Maker of a client of the daemon; every session it made is gone afterwards."""
    yield lambda cls: cls(base_url=daemon.wait_url(), api_key=KEY)
    with daemon.client() as client:
        for session in client.get("/v1/sessions").json():
            client.delete(f"/v1/sessions/{session['id']}")


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("use", usage.USES, ids=lambda use: use.__name__)
def test_uses(use: Callable[..., Any], flavour: str, make: Callable[[Any], Any]) -> None:
    """Each is what its docstring says, on asyncio, on trio and in a thread."""
    run(flavour, use, make)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_files(flavour: str, make: Callable[[Any], Any], tmp_path: Path) -> None:
    """Contents, directories, changes and edits, with local files beside them."""
    run(flavour, usage.files, make, tmp_path)
