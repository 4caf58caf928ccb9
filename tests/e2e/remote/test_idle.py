"""A remote session lasts as long as its client does, however little that asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc._cython import cygrpc
from kvstore_client import connect
from kvstore_client.planes.stream import session
from kvstore_ops.sidecar import Sidecar

from tests.conftest import ROOT

PING_MS = 1_200
"""More than the sidecar's least interval between pings, and less than the clients' own."""
IDLE_S = 8.0
"""So many pings that gRPC's default would have ended the connection."""


def test_an_idle_client_keeps_its_session(remote: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**dict(session.OPTIONS), "grpc.keepalive_time_ms": PING_MS}
    monkeypatch.setattr(session, "OPTIONS", tuple(options.items()))
    with connect(remote.address) as client, client.watch():
        assert not client.connect_now().ended.wait(IDLE_S), "the sidecar ended it for its keepalive pings"
        assert client.statistics()["sessions"] == 1


def test_grpc_knows_every_option_that_it_is_given() -> None:
    """It ignores others in silence."""
    files = [file for room in ("kvstore", "clients", "ops") for file in (ROOT / room).rglob("*.py")]
    given = {name for file in files for name in re.findall(r'"(grpc\.[a-z0-9_.]+)"', file.read_text())}
    library = Path(cygrpc.__file__).read_bytes()
    assert "grpc.keepalive_time_ms" in given
    assert [name for name in sorted(given) if name.encode() not in library] == []
