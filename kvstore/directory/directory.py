"""The directory of nodes and their chunks, in Redis.

    <prefix>:v1:nodes:<tenant>      sorted set: "<node> <incarnation>", scored by when it was heard last (Redis's clock)
    <prefix>:v1:d:{<storage key>}   hash: node -> "<incarnation> <tier>", the fastest tier there that has the chunk
    <prefix>:v1:hot:<tenant>:<fingerprint>  hash: what the node that fetches most of a model fetches most (``hints``)

A node's entries count while its incarnation was heard within ``LIVE_S``: so no entry needs to be renewed, and the
entries of a dead node count no more. A node begins a new incarnation, and tells all its chunks again, at each start and
whenever it cannot be sure that Redis has all that it told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvstore.directory.hints import HINT_BYTES_MAX
from kvstore.errors import Unavailable
from kvstore.seams import Clock, Random
from kvstore.spec import Tier

LIVE_S = 30.0
ENTRY_S = 7 * 86400
"""The entries of a chunk expire when no node told of the chunk for so many seconds."""
FORGOTTEN_S = 3600
"""A node that was not heard for so many seconds is removed from the members."""
CALL_S_MAX = 5.0
PIPELINE_COUNT = 128
"""Commands of one pipeline: Redis answers other clients between two pipelines."""
PIPELINES_AT_ONCE = 4
"""Pipelines of all questions together: each takes a connection of its own."""
SLOW_S = 1.0
"""A question with a shorter timeout than this that was not answered in time does not show that Redis is down."""
INCARNATION_BYTES = 8
BEAT = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local added = redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])
return {string.format('%.6f', now), added, redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')}
"""
"""Adds a member; removes the node's former incarnation and the members that were not heard for long. Returns Redis's
time, 1 where the member is new, and all members with when they were heard."""
SEAL_BYTES_MAX = 256
"""Bytes that an envelope adds to hints, at most."""
HINT_S = 3600
"""Hints expire when their node has given none for so many seconds."""
GIVE_HINTS = """
local node, heat = unpack(redis.call('HMGET', KEYS[1], 'node', 'heat'))
if node and node ~= ARGV[1] and (tonumber(heat) or 0) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'node', ARGV[1], 'heat', ARGV[2], 'runs', ARGV[3])
return redis.call('EXPIRE', KEYS[1], ARGV[4])
"""
"""Replaces the hints of the same node, or of one that fetches less."""
READ_HINTS = """
if redis.call('HSTRLEN', KEYS[1], 'runs') > tonumber(ARGV[1]) then return false end
return redis.call('HGET', KEYS[1], 'runs')
"""
_TIERS: dict[str, Tier] = {str(int(tier)): tier for tier in Tier}
_log = logging.getLogger("kvstore.directory")


class NodeDirectory:
    """One node's view of the directory, through an asyncio ``client`` of redis-py of its own. ``node`` is this node's
    name for others, ``owner`` its tenant. All calls but ``renew`` and ``close`` raise Unavailable when Redis does not
    answer."""

    def __init__(self, client: Any, node: str, prefix: str, owner: str, clock: Clock, random: Random) -> None:
        self.node = node
        self.is_reachable = False
        """True when Redis answered the last question."""
        self._client = client
        self._prefix = prefix
        self._nodes = f"{prefix}:v1:nodes:{owner or 'default'}"
        self._hot = f"{prefix}:v1:hot:{owner or 'default'}"
        self._clock = clock
        self._random = random
        self._former = ""
        self._incarnation = self._drawn()
        self._began_s = float("inf")
        """The time at which this process was first heard, by Redis's clock."""
        self._ahead_s = 0.0
        """The seconds by which Redis's clock is ahead of this process's."""
        self._has_rival = False
        self._turns = asyncio.Semaphore(PIPELINES_AT_ONCE)

    def _drawn(self) -> str:
        return self._random.bytes(INCARNATION_BYTES).hex()

    @property
    def _member(self) -> str:
        return f"{self.node} {self._incarnation}"

    def renew(self) -> None:
        """Begin a new incarnation: entries told before count no more, from the next ``beat`` on."""
        self._former, self._incarnation = self._member, self._drawn()

    async def beat(self) -> bool:
        """Say that this node lives; call it several times within ``LIVE_S``. False: Redis did not know this
        incarnation, and may have lost its entries."""
        told = self._client.eval(BEAT, 1, self._nodes, self._member, self._former, FORGOTTEN_S)
        now, added, heard = await self._answered(told, CALL_S_MAX)
        self._ahead_s = float(now) - self._clock.monotonic()
        self._began_s = min(self._began_s, float(now))
        lately = [member for member, at_s in zip(heard[::2], heard[1::2], strict=True) if float(at_s) > self._began_s]
        self._look_for_rival(_members(lately))
        return not added

    def _look_for_rival(self, heard: Iterable[tuple[str, str]]) -> None:
        """Log an error, once, when another node uses this node's name. A member of that name that was heard after this
        process began is another node; one that was not is this node before it started again."""
        has_rival = any(node == self.node and each != self._incarnation for node, each in heard)
        if has_rival and not self._has_rival:
            _log.error("another node has this node's name: set server.node to its own", extra={"node": self.node})
        self._has_rival = has_rival

    async def tell(self, changes: Mapping[bytes, Tier]) -> None:
        """Publish changes: storage key -> the fastest tier here that has the chunk; NONE: no tier has it any more."""
        pipeline = self._client.pipeline(transaction=False)
        for key, tier in changes.items():
            name = self._entry(key)
            if tier is Tier.NONE:
                pipeline.hdel(name, self.node)
            else:
                pipeline.hset(name, self.node, f"{self._incarnation} {int(tier)}")
                pipeline.expire(name, ENTRY_S)
        await self._answered(pipeline.execute(), CALL_S_MAX)

    async def where(self, keys: Sequence[bytes], timeout_s: float) -> list[dict[str, Tier]]:
        """Return for each chunk the other nodes that have it, each with its fastest tier there. One round trip, or none
        where Redis did not answer the last question. Raises Unavailable, also after ``timeout_s`` seconds."""
        if not self.is_reachable:
            raise Unavailable("the directory in Redis does not answer at present")
        since_s = self._clock.monotonic() + self._ahead_s - LIVE_S
        pipelines = [self._client.pipeline(transaction=False).zrangebyscore(self._nodes, since_s, "+inf")]
        for first in range(0, len(keys), PIPELINE_COUNT):
            pipelines.append(self._client.pipeline(transaction=False))
            for key in keys[first : first + PIPELINE_COUNT]:
                pipelines[-1].hgetall(self._entry(key))
        asked = asyncio.gather(*map(self._executed, pipelines))
        (live,), *found = await self._answered(asked, timeout_s)
        if isinstance(live, Exception):
            raise Unavailable(f"the directory in Redis did not answer: {live}") from live
        members = set(_members(live))
        return [self._counted(each, members) if isinstance(each, dict) else {} for some in found for each in some]

    async def give_hints(self, fingerprint: bytes, heat: float, runs: bytes) -> None:
        """Leave a model's hints for nodes that begin, unless a node that fetches more of it has left some."""
        told = self._client.eval(
            GIVE_HINTS, 1, f"{self._hot}:{fingerprint.hex()}", self.node, f"{heat:.6f}", runs, HINT_S
        )
        await self._answered(told, CALL_S_MAX)

    async def hints(self, fingerprint: bytes) -> bytes | None:
        """Return a model's hints; None: nobody left any, or they are larger than ours ever are."""
        asked = self._client.eval(READ_HINTS, 1, f"{self._hot}:{fingerprint.hex()}", HINT_BYTES_MAX + SEAL_BYTES_MAX)
        found: bytes | None = await self._answered(asked, CALL_S_MAX)
        return found

    async def _executed(self, pipeline: Any) -> list[Any]:
        async with self._turns:
            found: list[Any] = await pipeline.execute(raise_on_error=False)
            return found

    def _counted(self, entries: Mapping[bytes, bytes], members: set[tuple[str, str]]) -> dict[str, Tier]:
        """Return the entries of other nodes that live. A malformed entry, or one with an unknown tier, is skipped:
        another program wrote it, or a newer release about a new tier."""
        found: dict[str, Tier] = {}
        for field, value in entries.items():
            node, (incarnation, _, number) = (
                field.decode(errors="replace"),
                value.decode(errors="replace").partition(" "),
            )
            tier = _TIERS.get(number, Tier.NONE)
            if node != self.node and (node, incarnation) in members and tier is not Tier.NONE:
                found[node] = tier
        return found

    async def close(self) -> None:
        """Withdraw this node's entries and close the client. Never raises."""
        with suppress(Unavailable):
            if self.is_reachable:
                await self._answered(self._client.zrem(self._nodes, self._member), CALL_S_MAX)
        with suppress(Unavailable):
            await self._answered(self._client.aclose(), CALL_S_MAX)

    def _entry(self, key: bytes) -> str:
        return f"{self._prefix}:v1:d:{{{key.hex()}}}"

    async def _answered(self, asked: Awaitable[Any], timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await asked
        except TimeoutError as error:
            self.is_reachable = self.is_reachable and timeout_s < SLOW_S
            raise Unavailable("the directory in Redis did not answer in time") from error
        except Exception as error:
            from redis.exceptions import RedisError  # here, not above: importing redis-py costs memory and time

            if not isinstance(error, RedisError | OSError):
                raise
            self.is_reachable = False
            raise Unavailable(f"the directory in Redis did not answer: {error}") from error
        self.is_reachable = True
        return answer


def _members(raw: Iterable[bytes]) -> list[tuple[str, str]]:
    """Return (node, incarnation) of each member. A node's name has no spaces."""
    parts = [each.decode(errors="replace").partition(" ") for each in raw]
    return [(node, incarnation) for node, _, incarnation in parts]
