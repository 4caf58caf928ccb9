"""The other tenants of the sidecar, for the default tenant's operator: one connection each, kept while ``top`` runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from kvstore_client import Client

from kvstore.errors import KVStoreError
from kvstore.v1alpha import admin_pb2
from kvstore_ops.door import Door
from kvstore_ops.tenants import beside

TENANT_COUNT_MAX = 32
"""Most tenants that are asked with each sample."""


class Others:
    """Connections to tenants, by name; in place of one the reason why there is none."""

    def __init__(self, clients: Mapping[str, Client | str]) -> None:
        self._clients = clients

    def stats(self) -> dict[str, admin_pb2.StatsResponse | str]:
        """Return the statistics of each tenant, or why it tells none."""
        return {name: each if isinstance(each, str) else _asked(each) for name, each in self._clients.items()}


def _asked(client: Client) -> admin_pb2.StatsResponse | str:
    try:
        return client.stats()
    except KVStoreError as error:
        return error.message


ALONE = Others({})


@contextmanager
def others_of(door: Door, *, is_default: bool) -> Iterator[Others]:
    """Connect to the tenants beside the default one. Another tenant's operator is shown none, nor is one by TCP."""
    with ExitStack() as stack:
        clients: dict[str, Client | str] = {}
        for name, each in list(beside(door).items())[:TENANT_COUNT_MAX] if is_default else ():
            try:
                clients[name] = stack.enter_context(each.open())
            except KVStoreError as error:  # its sockets may serve another user only
                clients[name] = error.message
        yield Others(clients)
