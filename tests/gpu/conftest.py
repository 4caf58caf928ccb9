"""The device, and a real sidecar on both planes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from tests.gpu.tensors import DEVICE

PLANES = ("local", "remote")


@pytest.fixture(autouse=True, scope="session")
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="module", params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sidecar(plane: str) -> Iterator[Sidecar]:
    with Sidecar("--capacity", "256 MiB", plane=plane) as running:
        yield running


@pytest.fixture(scope="module")
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address) as connected:
        yield connected


@pytest.fixture
def own_sidecar(plane: str) -> Iterator[Sidecar]:
    """A sidecar of one test's own: it may be killed."""
    with Sidecar("--capacity", "64 MiB", plane=plane) as running:
        yield running
