"""Sidecars with a remote plane: one of a file, and one of a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_ops.sidecar import Sidecar


@pytest.fixture(scope="module")
def remote() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "64 MiB", plane="remote") as running:
        yield running


@pytest.fixture
def own_remote() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "32 MiB", plane="remote") as running:
        yield running
