"""A cluster's primaries: each command goes to the node that has its key, and once more where another node has it by
now.

redis-py keeps the map of slots and the connections. It does not follow redirections here: it would send ASKING on one
connection and the command on another, close all connections when one node fails, and take 20 us for each command of a
pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from redis.asyncio.cluster import ClusterNode, PipelineCommand, RedisCluster
from redis.exceptions import AskError, ClusterDownError, MovedError, SlotNotCoveredError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvstore.config import RedisAddress
from kvstore.tiers.redis.access import Access, Server

REFRESH_S_MIN = 1.0
"""Seconds between two refreshes of the map that failures cause: each refresh makes all connections anew."""


class KeyCommand(NamedTuple):
    """A command for the node that has ``key``."""

    key: bytes
    words: tuple[object, ...]


class ClusterNodes:
    """The nodes of a cluster. Connects to nothing before the first question."""

    def __init__(self, address: RedisAddress, access: Access, options: dict[str, Any]) -> None:
        nodes = [ClusterNode(host, port) for host, port in address.places]
        options = {key: each for key, each in options.items() if key != "db"}
        self._access = access
        self._is_doubted = False
        self._refreshed_s = float("-inf")
        # A slot without a node costs the chunks of that slot: redis-py would refuse the whole cluster.
        self.client: Any = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)

    @property
    def cluster(self) -> ClusterNodes:
        return self

    # ------------------------------------------------------------ commands

    async def ask(self, key: bytes, *words: object) -> Any:
        """Return the result of one command. Raises redis-py's errors."""
        [found] = await self.ask_each([KeyCommand(key, words)])
        if isinstance(found, Exception):
            raise found
        return found

    async def ask_each(self, commands: Sequence[KeyCommand], node_s_max: float | None = None) -> list[Any]:
        """Return each command's result, or the error that it ends with: one pipeline per node, all at once. A command
        is asked once more where a node no longer has the key, or where a kept connection failed. ``node_s_max``: the
        seconds after which a node has failed, so that one which stands still does not keep the others' results. Raises
        where there is no map."""
        found = await self._round(commands, [None] * len(commands), node_s_max)
        again = [number for number, each in enumerate(found) if isinstance(each, AskError | RedisConnectionError)]
        if not again:
            return found
        if any(isinstance(found[number], MovedError) for number in again):
            await self.refresh()
        second = await self._round(
            [commands[number] for number in again], [found[number] for number in again], node_s_max
        )
        for number, each in zip(again, second, strict=True):
            found[number] = each
            if isinstance(each, RedisConnectionError | ClusterDownError):
                self.doubt()
        return found

    async def ask_all(self, *words: object) -> list[Any]:
        """Return each primary's result of one command, or the error that it ends with. Raises where there is no map."""
        await self._ready()
        asked = (node.execute_command(*words) for node in self.client.get_primaries())
        found = await asyncio.gather(*asked, return_exceptions=True)
        if any(isinstance(each, RedisConnectionError | ClusterDownError) for each in found):
            self.doubt()
        return found

    async def _round(self, commands: Sequence[KeyCommand], said: Sequence[Any], node_s_max: float | None) -> list[Any]:
        """Send each command once. ``said``: the result of each in the round before, if there was one."""
        await self._ready()
        piles: dict[str, tuple[Any, list[Any]]] = {}
        sent = []
        for command, before in zip(commands, said, strict=True):
            target = self._asked(before)
            sent.append(PipelineCommand(0, *command.words))
            try:
                node = target or self.client.get_node_from_key(command.key)
            except SlotNotCoveredError as error:
                sent[-1].result = error
                self.doubt()
                continue
            _, pile = piles.setdefault(node.name, (node, []))
            if target:
                pile.append(PipelineCommand(0, "ASKING"))
            pile.append(sent[-1])
        ends = await asyncio.gather(
            *(_in_time(partial(node.execute_pipeline, pile), node_s_max) for node, pile in piles.values()),
            return_exceptions=True,
        )
        for (_, pile), end in zip(piles.values(), ends, strict=True):
            if isinstance(end, BaseException):
                if isinstance(end, RedisTimeoutError):
                    self.doubt()
                for each in pile:
                    each.result = end
        return [each.result for each in sent]

    def _asked(self, said: Any) -> Any:
        """Return the node that an ASK error names as the one a slot is migrated to; None for any other result."""
        if isinstance(said, AskError) and not isinstance(said, MovedError):
            return self.client.get_node(host=said.host, port=said.port)
        return None

    # ------------------------------------------------------------ which node

    async def server_of(self, key: bytes) -> Server:
        await self._ready()
        return self._server(self.client.get_node_from_key(key))

    async def followed(self, key: bytes, said: str) -> Server:
        """Return the server that has a key after a node said ``said``: "MOVED" or "ASK", the slot, and HOST:PORT."""
        code, _, place = said.partition(" ")
        host, _, port = place.rpartition(" ")[2].rpartition(":")
        node = self.client.get_node(host=host, port=int(port)) if code == "ASK" and port.isdecimal() else None
        if node is not None:
            return replace(self._server(node), is_asked=True)
        await self.refresh()
        return await self.server_of(key)

    def _server(self, node: Any) -> Server:
        return Server(self._access, str(node.host), int(node.port))

    async def _ready(self) -> None:
        await self.client.initialize()
        if self._is_doubted and asyncio.get_running_loop().time() - self._refreshed_s >= REFRESH_S_MIN:
            await self.refresh()

    async def refresh(self) -> None:
        """Read the map of slots again. Raises redis-py's errors."""
        self._refreshed_s = asyncio.get_running_loop().time()
        await self.client.nodes_manager.initialize()
        self._is_doubted = False

    def doubt(self) -> None:
        """Record that a node failed: another one may have its slots soon."""
        self._is_doubted = True

    async def reconnect(self) -> None:
        """See ``Topology``: with the map of slots all connections are made anew."""
        self.doubt()

    async def close(self) -> None:
        await self.client.aclose()


async def _in_time(ask: Callable[[], Awaitable[Any]], seconds: float | None) -> Any:
    """Ask, and return the answer. Raises redis-py's TimeoutError where it takes longer; None: it may take any time. A
    caller that is cancelled before this begins asks nothing."""
    if seconds is None:
        return await ask()
    try:
        async with asyncio.timeout(seconds):
            return await ask()
    except TimeoutError as error:
        raise RedisTimeoutError(f"no answer within {seconds:g} s") from error
