"""Clients that look in the table, and what both ways say of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore_client import Client, Match, connect
from kvstore_ops.sidecar import Sidecar

from tests.server.raw import eventually

STEP = 16


@contextmanager
def looking(sidecar: Sidecar) -> Iterator[Client]:
    """A client that has the table: it comes a moment after the session."""
    with connect(sidecar.address) as found:
        eventually(lambda: found.connect_now().presence.is_there)
        yield found


@contextmanager
def by_call(client: Client) -> Iterator[None]:
    """As a client whose sidecar offers no table."""
    session = client.connect_now()
    kept, session.presence = session.presence, None
    try:
        yield
    finally:
        session.presence = kept


@contextmanager
def no_calls(client: Client) -> Iterator[None]:
    """A lookup that calls the sidecar fails here."""
    session = client.connect_now()
    kept = session.cache

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called")

    session.cache = Refusing()
    try:
        yield
    finally:
        session.cache = kept


def agreed(client: Client, spec: Any, tokens: Any, **how: Any) -> Match:
    """What both ways say of a prompt."""
    seen = client.lookup(spec, tokens, **how)
    with by_call(client):
        assert client.lookup(spec, tokens, **how) == seen
    return seen
