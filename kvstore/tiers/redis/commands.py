"""Commands on any keys, each answered by the server that has its key: the directory of nodes lies beside the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.errors import KVStoreError, PermissionDenied
from kvstore.tiers.redis.cluster import KeyCommand
from kvstore.tiers.redis.control import REDIS_ERRORS, outage_of, refused_by
from kvstore.tiers.redis.replies import NO_WRITES, REPLICA
from kvstore.tiers.redis.topology import Topology


class Commands:
    """Sends commands through a topology of its own, which ``close`` closes."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    async def ask_each(self, commands: Sequence[tuple[str, Sequence[object]]]) -> list[Any]:
        """Return each command's result, or the error that it ends with: PermissionDenied where the user lacks a right
        or the server takes no writes, DataLoss where something of another type has the key, Exhausted where the server
        is full, else Unavailable. ``commands``: the key that says which server is asked, and the words. Raises
        Unavailable where no server can be asked."""
        try:
            found = await self._sent(commands)
        except REDIS_ERRORS as raised:
            raise _as_ours(raised) from raised
        answers = [_as_ours(each) if isinstance(each, Exception) else each for each in found]
        if any(isinstance(each, KVStoreError) and REPLICA in each.fields for each in answers):
            await self._topology.reconnect()
        return answers

    async def _sent(self, commands: Sequence[tuple[str, Sequence[object]]]) -> list[Any]:
        if self._topology.cluster is not None:
            asked = [KeyCommand(key.encode(), tuple(words)) for key, words in commands]
            return await self._topology.cluster.ask_each(asked)
        pipeline = self._topology.client.pipeline(transaction=False)
        for _, words in commands:
            pipeline.execute_command(*words)
        found: list[Any] = await pipeline.execute(raise_on_error=False)
        return found

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._topology.close()


def _as_ours(raised: BaseException) -> KVStoreError:
    refused = refused_by(raised)
    if refused is not None and NO_WRITES in refused.fields:
        return PermissionDenied(refused.message, **refused.fields)
    return refused or outage_of(raised)
