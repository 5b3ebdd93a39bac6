"""Fixtures of the egress tests: network namespaces, which need root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.egress.harness import world

_NEED_NO_ROOT = {"test_protocol.py", "test_names.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs namespaces where there can be none."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and item.path.name not in _NEED_NO_ROOT:
            item.add_marker(pytest.mark.kernel)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture
def outside() -> Iterator[None]:
    """Be in a network of the test's own."""
    with world():
        yield
