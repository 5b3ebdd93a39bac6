"""A pytest plugin that leaves this process its share of the tests; the machine's other processor has the rest.

The share is every `WORKERS`-th test, so that each worker gets some of every file. Loaded with `-p` in the guest only.
"""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    worker, workers = int(os.environ["WORKER"]) - 1, int(os.environ["WORKERS"])
    others = [item for place, item in enumerate(items) if place % workers != worker]
    config.hook.pytest_deselected(items=others)
    items[:] = items[worker::workers]
