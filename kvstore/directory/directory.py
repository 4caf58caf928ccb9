"""The directory of nodes and their chunks, in Redis.

    <prefix>:v1:nodes:<tenant>      sorted set: "<node> <incarnation>", scored by when it was heard last (Redis's clock)
    <prefix>:v1:d:{<storage key>}   hash: node -> "<incarnation> <tier>", the fastest tier there that has the chunk
    <prefix>:v1:hot:<tenant>:<fingerprint>  hash: what the node that fetches most of a model fetches most (``hints``)

A node's entries count while its incarnation was heard within ``LIVE_S``: the entries of a dead node count no more at
once, and those of a living one need no renewal to count. A node begins a new incarnation, and tells all its chunks
again, at each start and whenever it cannot be sure that Redis has all that it told.

What bounds it: a chunk's hash expires ``ENTRY_S`` after a node told of the chunk or kept it. A living node keeps all
that it has (``keep``) within ``KEEP_S`` or, with very many chunks, somewhat more, so its entries never expire. Whoever
keeps a chunk removes the entries of others that were not heard for ``FORGOTTEN_S``, so a hash has no more entries than
nodes that were heard since the last pass. What only dead nodes had expires.

In a cluster a node that fails costs the entries that lie on it: it is said of how many chunks nothing is known. Where
it has the members, those that were heard last count for ``KEPT_S`` more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from itertools import chain
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from kvstore.directory.hints import HINT_BYTES_MAX
from kvstore.errors import DataLoss, KVStoreError, Unavailable
from kvstore.seams import Clock, Random
from kvstore.spec import Tier

LIVE_S = 30.0
ENTRY_S = 7 * 86400
"""The entries of a chunk expire when no node told of the chunk, or kept it, for so many seconds."""
KEEP_S = ENTRY_S / 4
"""Seconds between the beginnings of two passes in which a node keeps all that it has, at most."""
FORGOTTEN_S = 3600
"""A node that was not heard for so many seconds is removed from the members."""
KEPT_S = 600.0
"""Seconds for which the members that were heard last count while Redis does not say who they are."""
CALL_S_MAX = 5.0
PIPELINE_COUNT = 128
"""Commands of one pipeline: Redis answers other clients between two pipelines."""
PIPELINES_AT_ONCE = 4
"""Pipelines of all questions together: each takes a connection of its own."""
SLOW_S = 1.0
"""A question with a shorter timeout than this that was not answered in time does not show that Redis is down."""
INCARNATION_BYTES = 8
FORMER_COUNT_MAX = 16
"""Incarnations of this node of which it is not known that Redis has removed them; it forgets older ones by itself."""
DROP = """
for at = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[at]) == ARGV[at + 1] then redis.call('HDEL', KEYS[1], ARGV[at]) end
end
"""
"""Removes entries that are still as they were read: a node may have told of the chunk anew meanwhile."""
SEAL_BYTES_MAX = 256
"""Bytes that an envelope adds to hints, at most."""
HINT_S = 3600
"""Hints expire when their node has given none for so many seconds."""
GIVE_HINTS = """
local node, heat = redis.call('HGET', KEYS[1], 'node'), redis.call('HGET', KEYS[1], 'heat')
if node and node ~= ARGV[1] and (tonumber(heat) or 0) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'node', ARGV[1], 'heat', ARGV[2], 'runs', ARGV[3])
return redis.call('PEXPIRE', KEYS[1], ARGV[4])
"""
"""Replaces the hints of the same node, or of one that fetches less."""
READ_HINTS = """
if redis.call('HSTRLEN', KEYS[1], 'runs') > tonumber(ARGV[1]) then return false end
return redis.call('HGET', KEYS[1], 'runs')
"""
_TIERS: dict[str, Tier] = {str(int(tier)): tier for tier in Tier}
_log = logging.getLogger("kvstore.directory")
Command = tuple[str, Sequence[object]]
"""The key that says which server is asked, and the words."""
Member = tuple[str, str]
"""A node's name and its incarnation."""
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
Call = Callable[Concatenate["NodeDirectory", Asked], Coroutine[Any, Any, Answer]]


class DirectoryServers(Protocol):
    """The servers in which the directory lies."""

    async def ask_each(self, commands: Sequence[Command]) -> list[Any]:
        """Return each command's result, or the error that it ends with: PermissionDenied where this node lacks a right
        or the server takes no writes, DataLoss where something of another type has the key, Exhausted where the server
        is full, else Unavailable. Raises Unavailable where no server can be asked."""

    async def close(self) -> None:
        """Close the connections. Idempotent."""


class Whereabouts(NamedTuple):
    """Lists for each chunk the other nodes that have it, each with its fastest tier there; None where that is unknown.
    ``reason``: why some of it is unknown; empty: all is known."""

    chunks: list[dict[str, Tier] | None]
    reason: str


def _of_redis(call: Call[Asked, Answer]) -> Call[Asked, Answer]:
    """Have a call raise Unavailable where the answers are none that a Redis gives: these must not end the service."""

    @wraps(call)
    async def told(self: NodeDirectory, /, *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        try:
            return await call(self, *args, **kwargs)
        except KVStoreError:
            raise
        except Exception as error:
            self.is_reachable = False
            raise Unavailable(f"the server of tiers.redis.url answers as no Redis does ({error!r})") from error

    return told


class NodeDirectory:
    """One node's view of the directory. ``servers``: where it lies; they belong to the directory. ``node`` is this
    node's name for others, ``owner`` its tenant. All calls but ``renew`` and ``close`` raise Unavailable when Redis
    does not answer; those that tell something raise PermissionDenied where this node may only read, and Exhausted where
    Redis is full."""

    def __init__(
        self, servers: DirectoryServers, node: str, prefix: str, owner: str, clock: Clock, random: Random
    ) -> None:  # fmt: skip
        self.node = node
        self.is_reachable = False
        """True when Redis answered the last question, if only with a refusal."""
        self.problem = ""
        """The reason why others cannot hear of this node, for operators; empty while they can, or Redis is away."""
        self.lost_count = 0
        """The entries of this node that were gone when they were kept: Redis drops what nobody asks for when it is
        full."""
        self._servers = servers
        self._prefix = prefix
        self._nodes = f"{prefix}:v1:nodes:{owner or 'default'}"
        self._hot = f"{prefix}:v1:hot:{owner or 'default'}"
        self._clock = clock
        self._random = random
        self._formers: deque[str] = deque(maxlen=FORMER_COUNT_MAX)
        self._incarnation = self._drawn()
        self._began_s = float("inf")
        """The time at which this process was first heard, by Redis's clock."""
        self._beat_s = float("-inf")
        """The time of the last beat, by Redis's clock."""
        self._ahead_s = 0.0
        """The seconds by which Redis's clock is ahead of this process's."""
        self._newest_s = 0.0
        """When the member that was heard last was heard."""
        self._live: set[Member] = set()
        self._live_s = float("-inf")
        """The members that lived when they were last read, and when that was."""
        self._has_rival = False
        self._turns = asyncio.Semaphore(PIPELINES_AT_ONCE)
        self._beating = asyncio.Lock()

    def _drawn(self) -> str:
        return self._random.bytes(INCARNATION_BYTES).hex()

    @property
    def _member(self) -> str:
        return f"{self.node} {self._incarnation}"

    def renew(self) -> None:
        """Begin a new incarnation: entries told before count no more, from the next ``beat`` on."""
        self._formers.append(self._member)
        self._incarnation = self._drawn()

    # ------------------------------------------------------------ tell

    @_of_redis
    async def beat(self) -> bool:
        """Say that this node lives, and learn who else does; call it several times within ``LIVE_S``. False: Redis does
        not have the last beat of this incarnation. It lost its keys, or came back as it was before, as from a snapshot,
        and may have lost entries. A node that may only read learns who lives before this raises PermissionDenied."""
        async with self._beating:  # a beat of a former incarnation must not come after the end of that
            return await self._beat()

    async def _beat(self) -> bool:
        nodes = self._nodes
        time, heard = await self._asked([(nodes, ("TIME",)), (nodes, ("ZRANGE", nodes, 0, -1, "WITHSCORES"))])
        scores = {member: float(at_s) for member, at_s in zip(_members(_known(heard)[::2]), heard[1::2], strict=True)}
        self._learn(scores, time)
        is_known = scores.get((self.node, self._incarnation), 0.0) >= self._beat_s  # later: an answer was lost
        now_s, formers = _seconds(_known(time)), set(self._formers)
        beat = f"{now_s:.6f}"
        told = [
            ("ZADD", nodes, beat, self._member),
            ("ZREM", nodes, "", *formers),
            ("ZREMRANGEBYSCORE", nodes, "-inf", f"{now_s - FORGOTTEN_S:.6f}"),
        ]
        added, *_ = map(_known, await self._asked([(nodes, words) for words in told]))
        self._began_s, self._beat_s = min(self._began_s, now_s), float(beat)
        self._look_for_rival(scores)
        self._formers = deque((each for each in self._formers if each not in formers), FORMER_COUNT_MAX)
        return is_known and not added

    def _learn(self, scores: Mapping[Member, float], time: Any) -> None:
        """Learn Redis's time and the living members. ``scores``: when each was heard. A node that may not ask for the
        time takes that at which somebody was heard lately for it."""
        newest_s, now_s = max(scores.values(), default=0.0), self._clock.monotonic()
        if not isinstance(time, KVStoreError):
            self._ahead_s = _seconds(time) - now_s
        elif newest_s != self._newest_s:
            self._ahead_s = newest_s - now_s
        self._newest_s = newest_s
        since_s = now_s + self._ahead_s - LIVE_S
        self._live, self._live_s = {member for member, at_s in scores.items() if at_s >= since_s}, now_s

    def _look_for_rival(self, scores: Mapping[Member, float]) -> None:
        """Log an error, once, when another node uses this node's name. A member of that name that was heard after this
        process began is another node; one that was not is this node before it started again."""
        own = {self._member, *self._formers}
        has_rival = any(
            node == self.node and at_s > self._began_s and f"{node} {incarnation}" not in own
            for (node, incarnation), at_s in scores.items()
        )
        if has_rival and not self._has_rival:
            _log.error("another node has this node's name: set server.node to its own", extra={"node": self.node})
        self._has_rival = has_rival

    @_of_redis
    async def tell(self, changes: Mapping[bytes, Tier]) -> list[bytes]:
        """Publish changes: storage key -> the fastest tier here that has the chunk; NONE: no tier has it any more.
        Returns the keys of which the server did not answer."""
        keys, commands = list[bytes](), list[Command]()
        for key, tier in changes.items():
            name = self._entry(key)
            told: list[tuple[object, ...]] = [("HDEL", name, self.node)]
            if tier is not Tier.NONE:
                told = [("HSET", name, self.node, f"{self._incarnation} {int(tier)}"), _expiring(name, ENTRY_S)]
            keys += [key] * len(told)
            commands += [(name, words) for words in told]
        failed = dict[bytes, None]()
        for key, answer in zip(keys, await self._asked(commands), strict=True):
            if isinstance(answer, Unavailable):
                failed[key] = None
            elif not isinstance(answer, DataLoss):  # another program has the key: there is no entry to be had
                _known(answer)
        return list(failed)

    @_of_redis
    async def keep(self, here: Mapping[bytes, Tier]) -> list[bytes]:
        """``tell`` again what is here, so that it does not expire, and remove what nodes told of these chunks that are
        no members any more. A node that comes back begins anew, and tells all that it has."""
        names = [self._entry(key) for key in here]
        found = await self._asked([(name, ("HGETALL", name)) for name in names])
        self.lost_count += sum(isinstance(each, dict) and self.node.encode() not in each for each in found)
        failed = await self.tell(here)
        [heard] = await self._asked(
            [(self._nodes, ("ZRANGE", self._nodes, 0, -1))]
        )  # after the entries: who told, beat
        if not isinstance(heard, KVStoreError):
            members = set(_members(heard))
            dead = [(name, _dead(each, members)) for name, each in zip(names, found, strict=True)]
            await self._asked([(name, ("EVAL", DROP, 1, name, *words)) for name, words in dead if words])
        return failed

    # ------------------------------------------------------------ ask

    @_of_redis
    async def where(self, keys: Sequence[bytes], timeout_s: float) -> Whereabouts:
        """Return for each chunk the other nodes that have it. One round trip, or none where Redis did not answer the
        last question. Raises Unavailable where nothing is known, also after ``timeout_s`` seconds."""
        if not self.is_reachable:
            raise Unavailable("the directory in Redis does not answer at present")
        since_s = self._clock.monotonic() + self._ahead_s - LIVE_S
        names = [self._entry(key) for key in keys]
        members = (self._nodes, ("ZRANGE", self._nodes, f"{since_s:.6f}", "+inf", "BYSCORE"))
        live, *found = await self._asked([members, *((name, ("HGETALL", name)) for name in names)], timeout_s)
        failed = [each for each in found if isinstance(each, KVStoreError) and not isinstance(each, DataLoss)]
        if not isinstance(live, KVStoreError):
            who, said = set(_members(live)), ""
            self._live, self._live_s = who, self._clock.monotonic()
        elif isinstance(live, Unavailable) and len(failed) < len(keys) and self._knew_lately():
            who, said = self._live, f"it is not known which nodes still live ({live.message})"
        else:
            raise Unavailable(f"the directory in Redis did not answer: {live.message}") from live
        unknown = f"of {len(failed)} of {len(keys)} chunks it is not known which nodes have them" if failed else ""
        unknown += f" ({failed[0].message})" if failed else ""
        return Whereabouts([self._counted(each, who) for each in found], "; ".join(filter(None, (said, unknown))))

    def _knew_lately(self) -> bool:
        return self._clock.monotonic() - self._live_s <= KEPT_S

    @_of_redis
    async def give_hints(self, fingerprint: bytes, heat: float, runs: bytes) -> None:
        """Leave a model's hints for nodes that begin, unless a node that fetches more of it has left some."""
        name = f"{self._hot}:{fingerprint.hex()}"
        words = ("EVAL", GIVE_HINTS, 1, name, self.node, f"{heat:.6f}", runs, 1000 * HINT_S)
        [told] = await self._asked([(name, words)])
        _known(told)

    @_of_redis
    async def hints(self, fingerprint: bytes) -> bytes | None:
        """Return a model's hints; None: nobody left any, or they are larger than ours ever are."""
        name = f"{self._hot}:{fingerprint.hex()}"
        [found] = await self._asked([(name, ("EVAL", READ_HINTS, 1, name, HINT_BYTES_MAX + SEAL_BYTES_MAX))])
        hints = _known(found)
        return hints if isinstance(hints, bytes) else None

    def _counted(self, entries: Any, members: set[Member]) -> dict[str, Tier] | None:
        """Return the entries of other nodes that live; None where they are unknown. A malformed entry, or one with an
        unknown tier, is skipped: another program wrote it, or a newer release about a new tier."""
        if isinstance(entries, KVStoreError):
            return {} if isinstance(entries, DataLoss) else None
        found: dict[str, Tier] = {}
        for field, value in entries.items():
            member, number = _told(field, value)
            tier = _TIERS.get(number, Tier.NONE)
            if member[0] != self.node and member in members and tier is not Tier.NONE:
                found[member[0]] = tier
        return found

    # ------------------------------------------------------------ Redis

    async def close(self) -> None:
        """Withdraw this node's entries and close the connections. Never raises."""
        with suppress(Exception):
            if self.is_reachable:
                await self._asked([(self._nodes, ("ZREM", self._nodes, self._member))])
        with suppress(Exception):
            await self._answered(self._servers.close(), CALL_S_MAX)

    def _entry(self, key: bytes) -> str:
        return f"{self._prefix}:v1:d:{{{key.hex()}}}"

    async def _asked(self, commands: Sequence[Command], timeout_s: float = CALL_S_MAX) -> list[Any]:
        """Return each command's result, or the error that it ends with."""
        parts = [commands[first : first + PIPELINE_COUNT] for first in range(0, len(commands), PIPELINE_COUNT)]
        found: list[list[Any]] = await self._answered(self._all_executed(parts), timeout_s)
        return list(chain.from_iterable(found))

    async def _all_executed(self, parts: Sequence[Sequence[Command]]) -> list[list[Any]]:
        """Return each pipeline's results. Raises the first error once none of them is asked any more: one that hangs
        would keep its turn for ever."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._executed(part)) for part in parts]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _executed(self, commands: Sequence[Command]) -> list[Any]:
        async with self._turns:
            return await self._servers.ask_each(commands)

    async def _answered(self, asked: Awaitable[Any], timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await asked
        except TimeoutError as error:
            self.is_reachable = self.is_reachable and timeout_s < SLOW_S
            raise Unavailable("the directory in Redis did not answer in time") from error
        except KVStoreError as error:
            self.is_reachable = False
            raise Unavailable(f"the directory in Redis did not answer: {error.message}") from error
        self.is_reachable = True
        return answer


def _members(raw: Iterable[bytes]) -> list[Member]:
    """Return (node, incarnation) of each member. A node's name has no spaces."""
    parts = [each.decode(errors="replace").partition(" ") for each in raw]
    return [(node, incarnation) for node, _, incarnation in parts]


def _told(field: bytes, value: bytes) -> tuple[Member, str]:
    """Return who told an entry, and the number of the tier."""
    incarnation, _, number = value.decode(errors="replace").partition(" ")
    return (field.decode(errors="replace"), incarnation), number


def _dead(entries: Any, members: set[Member]) -> list[bytes]:
    """Return the entries that no member told, each as field and value."""
    if isinstance(entries, KVStoreError):
        return []
    return [word for each in entries.items() if _told(*each)[0] not in members for word in each]


def _known(answer: Any) -> Any:
    """Return a command's result. Raises the error that it ended with."""
    if isinstance(answer, KVStoreError):
        raise answer
    return answer


def _seconds(time: tuple[int, int]) -> float:
    return time[0] + time[1] / 1e6


def _expiring(name: str, seconds: float) -> tuple[object, ...]:
    return ("PEXPIRE", name, int(1000 * seconds))
