"""The same tests on both planes: shared memory, and gRPC over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from tests.ports import free_port

PLANES = ("local", "remote")


@pytest.fixture(autouse=True, scope="session")
def _token() -> Iterator[None]:
    """What clients of a remote plane say when a test does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module", params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sidecar(plane: str) -> Iterator[Sidecar]:
    """A real server process with a small arena, shared by a module's tests."""
    with Sidecar("--capacity", "64 MiB", plane=plane) as running:
        yield running


@pytest.fixture(scope="module")
def client(sidecar: Sidecar) -> Iterator[Client]:
    """A module's own client of it."""
    with connect(sidecar.address) as connected:
        yield connected


@pytest.fixture
def own_sidecar(plane: str) -> Iterator[Sidecar]:
    """A real server process of one test's own: it may be killed."""
    own = Sidecar("--capacity", "32 MiB", plane=plane)
    own.tcp_address = f"127.0.0.1:{free_port()}"  # no connection takes it while the sidecar is being restarted
    with own as running:
        yield running


@pytest.fixture
def local_sidecar() -> Iterator[Sidecar]:
    """For what only shared memory has."""
    with Sidecar("--capacity", "32 MiB") as running:
        yield running


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes the client's copies: compiled code's have a thread of that code's own, which cannot fail so."""
    monkeypatch.setattr("kvstore_copies.batch._copy", lambda: None)
