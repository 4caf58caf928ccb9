"""A cluster's primaries: each command goes to the node that has its key, and once more where another node has it by
now.

redis-py keeps the map of slots and the connections. It does not follow redirections here: it would send ASKING on one
connection and the command on another, close all connections when one node fails, and take 20 us for each command of a
pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from redis.asyncio.cluster import ClusterNode, PipelineCommand, RedisCluster
from redis.asyncio.connection import SSLConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MaxConnectionsError,
    MovedError,
    RedisClusterException,
    RedisError,
    SlotNotCoveredError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvstore.config import RedisAddress
from kvstore.tiers.redis.access import Access, Server
from kvstore.tiers.redis.tls import renewable

REFRESH_S_MIN = 1.0
"""Seconds between two refreshes of the map that failures cause: each refresh makes all connections anew."""
NODE_S_MAX = 1.0
"""A node that takes more seconds than this for an answer has failed: the others' answers do not wait for it."""
MAP_S_MAX = 1.5 * NODE_S_MAX
"""The same where redis-py watches the time, which asks for the map by itself."""
TRIAL_S = 0.5
"""Seconds between two looks whether a node that has failed answers again."""
NODE_FAILURES = (RedisConnectionError, RedisTimeoutError)
"""redis-py's errors for a node that did not answer, or not in time."""


class KeyCommand(NamedTuple):
    """A command for the node that has ``key``."""

    key: bytes
    words: tuple[object, ...]


class ClusterNodes:
    """The nodes of a cluster. Connects to nothing before the first question."""

    def __init__(self, address: RedisAddress, access: Access, options: dict[str, Any]) -> None:
        nodes = [ClusterNode(host, port) for host, port in address.places]
        options = {key: each for key, each in options.items() if key != "db"} | {"socket_timeout": MAP_S_MAX}
        self._access = access
        self._is_doubted = False
        self._refreshed_s = float("-inf")
        self._away: dict[str, Exception] = {}
        """Nodes that did not answer, by name, each with its error. Nothing is asked of them, so that nobody waits for
        them, until a trial is answered."""
        self._trials: set[asyncio.Task[None]] = set()
        # A slot without a node costs the chunks of that slot: redis-py would refuse the whole cluster.
        self.client: Any = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
        if access.is_tls:
            kind = self.client.connection_kwargs["connection_class"] = renewable(SSLConnection, access)
            for each in self.client.startup_nodes:
                each.connection_class = kind
        self._named: dict[str, Any] = dict(self.client.nodes_manager.startup_nodes)
        """The nodes that the settings name."""

    @property
    def cluster(self) -> ClusterNodes:
        return self

    # ------------------------------------------------------------ commands

    async def ask(self, key: bytes, *words: object) -> Any:
        """Return the result of one command. Raises redis-py's errors."""
        [found] = await self.ask_each([KeyCommand(key, words)])
        if isinstance(found, Exception):
            raise found.with_traceback(None)  # that of a node that is away is raised again and again
        return found

    @property
    def is_away(self) -> bool:
        """True when no node answers, as far as we know."""
        primaries = self.client.get_primaries()
        return all(each.name in self._away for each in primaries)

    async def ask_each(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """Return each command's result, or the error that it ends with: one pipeline per node, all at once. A command
        is asked once more where a node no longer has the key, or where a kept connection failed. A node that does not
        answer within ``NODE_S_MAX`` does not keep the others' results. Raises where there is no map."""
        found = await self._round(commands, [None] * len(commands))
        again = [number for number, each in enumerate(found) if isinstance(each, AskError | RedisConnectionError)]
        if not again:
            return found
        if any(isinstance(found[number], MovedError) for number in again):
            await self.refresh()
        second = await self._round(
            [commands[number] for number in again], [found[number] for number in again], is_second=True
        )
        for number, each in zip(again, second, strict=True):
            found[number] = each
            if isinstance(each, RedisConnectionError):
                self.doubt()
        return found

    async def ask_all(self, *words: object) -> list[Any]:
        """Return each primary's result of one command, or the error that it ends with. Raises where there is no map."""
        await self._ready()
        nodes = self.client.get_primaries()
        away = dict(self._away)  # one may be back before the others have answered
        asked = [node for node in nodes if node.name not in away]
        ends = await asyncio.gather(*(_answer(node, *words) for node in asked), return_exceptions=True)
        for node, end in zip(asked, ends, strict=True):
            if isinstance(end, ClusterDownError):
                self.doubt()
            elif isinstance(end, NODE_FAILURES):
                self._leave(node, end)
        found = dict(zip([node.name for node in asked], ends, strict=True)) | away
        return [found[node.name] for node in nodes]

    async def _round(
        self, commands: Sequence[KeyCommand], said: Sequence[Any], *, is_second: bool = False
    ) -> list[Any]:  # fmt: skip
        """Send each command once. ``said``: the result of each in the round before, if there was one. A node that fails
        in the second round is away: in the first one its connections may be to blame."""
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
                continue
            if node.name in self._away:
                sent[-1].result = self._away[node.name]
                self.doubt()
                continue
            _, pile = piles.setdefault(node.name, (node, []))
            if target:
                pile.append(PipelineCommand(0, "ASKING"))
            pile.append(sent[-1])
        ends = await asyncio.gather(
            *(_in_time(node, partial(node.execute_pipeline, pile)) for node, pile in piles.values()),
            return_exceptions=True,
        )
        for (node, pile), end in zip(piles.values(), ends, strict=True):
            if isinstance(end, BaseException):
                for each in pile:
                    each.result = end
            failed = next((each.result for each in pile if isinstance(each.result, NODE_FAILURES)), None)
            if failed is not None:
                await _renew_connections(node)
                if is_second or isinstance(failed, RedisTimeoutError):
                    self._leave(node, failed)
        if any(isinstance(each.result, ClusterDownError | SlotNotCoveredError) for each in sent):
            self.doubt()  # a node that is no longer of the cluster says so, too
        return [each.result for each in sent]

    # ------------------------------------------------------------ nodes that are away

    def _leave(self, node: Any, error: Exception) -> None:
        """Ask nothing of a node that failed until it answers a trial. Where it is we that lack a connection it has not
        failed."""
        self.doubt()
        if node.name in self._away or isinstance(error, MaxConnectionsError):
            return
        self._away[node.name] = error
        loop = asyncio.get_running_loop()
        trial = loop.create_task(self._try(node.name))  # seam: it outlives the call that failed; ``close`` ends it
        self._trials.add(trial)
        trial.add_done_callback(self._trials.discard)

    async def _try(self, name: str) -> None:
        """Look for a node until it answers, if only with a refusal, or the map has it no more."""
        try:
            while (node := self.client.get_node(node_name=name)) is not None:
                await asyncio.sleep(TRIAL_S)
                try:
                    await _in_time(node, partial(node.execute_command, "PING"))
                    return
                except NODE_FAILURES as error:
                    self._away[name] = error
                except RedisError:
                    return
        finally:
            del self._away[name]

    def _asked(self, said: Any) -> Any:
        """Return the node that an ASK error names as the one a slot is migrated to; None for any other result."""
        if isinstance(said, AskError) and not isinstance(said, MovedError):
            return self.client.get_node(host=said.host, port=said.port)
        return None

    # ------------------------------------------------------------ which node

    async def server_of(self, key: bytes) -> Server:
        await self._ready()
        node = self.client.get_node_from_key(key)
        if node.name in self._away:
            self.doubt()
            raise self._away[node.name].with_traceback(None)  # it is raised again and again
        return self._server(node)

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
        await self._mapped(self.client.initialize())
        if self._is_doubted and asyncio.get_running_loop().time() - self._refreshed_s >= REFRESH_S_MIN:
            await self.refresh()

    async def refresh(self) -> None:
        """Read the map of slots again. Raises redis-py's errors."""
        self._refreshed_s = asyncio.get_running_loop().time()
        nodes = self.client.nodes_manager
        await self._mapped(nodes.initialize(last_failed_node_name=next(iter(self._away), None)))
        self._is_doubted = False

    async def _mapped(self, reading: Awaitable[object]) -> None:
        """Await a reading of the map. After it redis-py asks the nodes of the map alone. Where none of these answers
        they may all have other addresses by now: the nodes of the settings are asked, too, from then on. The same
        where no node has a slot: redis-py fails with an IndexError, and forgets whom to ask, but an operator may give
        them slots later."""
        nodes = self.client.nodes_manager
        try:
            await reading
        except RedisClusterException:
            nodes.startup_nodes = self._named | nodes.startup_nodes
            raise
        except IndexError as error:
            nodes.startup_nodes = dict(self._named)
            raise SlotNotCoveredError("no node has slots") from error

    def doubt(self) -> None:
        """Record that a node failed: another one may have its slots soon."""
        self._is_doubted = True

    async def reconnect(self) -> None:
        """See ``Topology``: with the map of slots all connections are made anew."""
        self.doubt()

    async def close(self) -> None:
        for each in list(self._trials):
            each.cancel()
        await asyncio.gather(*self._trials, return_exceptions=True)
        await self.client.aclose()


async def _answer(node: Any, *words: object) -> Any:
    """Return a node's answer to one command, which it is asked once more where a kept connection failed."""
    ask = partial(node.execute_command, *words)
    try:
        return await _in_time(node, ask)
    except RedisConnectionError:
        await _renew_connections(node)
        return await _in_time(node, ask)


async def _renew_connections(node: Any) -> None:
    """Close a node's kept connections: they may be as dead as the one that was used. Each is taken first, so that
    nobody begins to use one that is being closed. The first that is closed already was put back by the call that
    failed."""
    with suppress(MaxConnectionsError):
        while (kept := node.acquire_connection()).is_connected:
            try:
                await kept.disconnect(nowait=True)
            finally:
                node.release(kept)
        node.release(kept)


async def _in_time(node: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask a node, and return the answer. Raises redis-py's TimeoutError where it takes longer than ``NODE_S_MAX``. A
    caller that is cancelled before this begins asks nothing."""
    try:
        async with asyncio.timeout(NODE_S_MAX):
            return await ask()
    except TimeoutError as error:
        raise RedisTimeoutError(f"no answer of {node.name} within {NODE_S_MAX:g} s") from error
