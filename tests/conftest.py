"""Shared by all tests: hypothesis without deadlines (machines are noisy), and a service on simulated parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from kvstore_ops.sidecar import Sidecar

settings.register_profile(
    "kvstore",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("kvstore")

if (
    os.environ.get("KVSTORE_TEST_SCALE") != "full"
):  # models this small wait longer for a second thread than they compute
    os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG_FILES = (
    "tests/ops/test_commands.py", "tests/ops/test_guides.py", "tests/crash/test_crash.py", "tests/sim/test_sim.py",
)  # fmt: skip
"""A minute each or so. They come first: one that began last would have a process to itself while the others rest."""

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, all else in its order."""
    names = [str(ROOT / name) for name in LONG_FILES]
    items.sort(key=lambda item: str(item.path) not in names)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """A real server process with a small arena, shared by a module's tests."""
    with Sidecar("--capacity", "64 MiB") as running:
        yield running


@pytest.fixture
def own_sidecar() -> Iterator[Sidecar]:
    """A real server process of one test's own: it may be killed."""
    with Sidecar("--capacity", "32 MiB") as running:
        yield running
