"""A client that has the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_client import Client
from kvstore_ops.sidecar import Sidecar

from tests.presence.looking import looking


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with looking(sidecar) as found:
        yield found
