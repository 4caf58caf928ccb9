"""Questions and scripts: all calls except the bytes of chunks, through redis-py, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.seams.scheduler import Result
from kvstore.tiers.contract import PART, UploadState
from kvstore.tiers.pace import Waits
from kvstore.tiers.redis.access import Server
from kvstore.tiers.redis.cluster import NODE_FAILURES, KeyCommand
from kvstore.tiers.redis.packed import run_packed
from kvstore.tiers.redis.replies import REPLICA, refusal, unreachable
from kvstore.tiers.redis.scripts import CLAIM, COMMIT, HEADER_BYTES_MAX, OPEN, THERE, TOUCH, Script
from kvstore.tiers.redis.topology import Topology

CALL_S_MAX = 5.0
"""A call that takes more seconds than this has failed."""
BATCH_COUNT = 512
"""Keys of one background call."""
_WHERE = "the server of tiers.redis.url"
_CODES = {
    OutOfMemoryError: "OOM", ReadOnlyError: "READONLY", NoPermissionError: "NOPERM", BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN", ClusterDownError: "CLUSTERDOWN", TryAgainError: "TRYAGAIN", AskError: "ASK",
    ClusterCrossSlotError: "CROSSSLOT", SlotNotCoveredError: "CLUSTERDOWN",
}  # fmt: skip
"""The code of a server's error reply for which redis-py has a class; MovedError is an AskError."""
_STATES = {ord("1"): UploadState.THERE, ord("f"): UploadState.FREE, ord("t"): UploadState.TAKEN}
REDIS_ERRORS = (RedisError, RedisClusterException, OSError)
"""The errors that redis-py raises where a server refuses something, or fails."""


class Opened(NamedTuple):
    """A chunk's header: its length ``byte_count``, its bytes as far as they were asked for, and the number of fields
    with it."""

    byte_count: int
    header: bytes
    field_count: int


class Account(NamedTuple):
    """The servers' reports on themselves, added up. ``capacity_bytes``: the memory that they may take; 0: they do not
    say. ``problem``: the reason why some nodes of a cluster did not report; empty where all did."""

    used_bytes: int = 0
    capacity_bytes: int = 0
    problem: str = ""


class Control:
    """At most ``count`` calls at once. Raises: the typed errors of a server's refusals; Unavailable when it does not
    answer."""

    def __init__(self, topology: Topology, count: int, waits: Waits) -> None:
        self._topology = topology
        self._client = topology.client
        self._cluster = topology.cluster
        self._turns = asyncio.Semaphore(count)
        self._waits = waits

    async def there(self, keys: Sequence[bytes], timeout_s: float) -> list[bool | None]:
        """Return a flag per key: True when it is there, None where its node of a cluster does not answer. Raises
        DeadlineExceeded, too."""
        return await self._answered(self._there, keys, timeout_s=timeout_s) if keys else []

    async def claim(
        self, claims: Sequence[bytes], chunks: Sequence[bytes], who: bytes, claim_ms: int, timeout_s: float
    ) -> list[UploadState]:
        """Claim chunks and return the state of each. ``claims`` are the keys of the claims, ``chunks`` the keys of the
        chunks; without ``chunks`` no chunk counts as there. Raises DeadlineExceeded, too."""
        if not claims:
            return []
        return await self._answered(self._claim, claims, chunks, who, claim_ms, timeout_s=timeout_s)

    async def release(self, claims: Sequence[bytes], timeout_s: float) -> None:
        """Remove these claims, whichever node made them. Raises DeadlineExceeded, too."""
        await self._answered(self._remove, claims, timeout_s=timeout_s)

    async def _claim(
        self, claims: Sequence[bytes], chunks: Sequence[bytes], who: bytes, claim_ms: int
    ) -> list[UploadState]:
        if self._cluster is None:
            found = await self._run(CLAIM, [*claims, *chunks], who, claim_ms, len(claims))
            return [_STATES[each] for each in found]
        there = await self._there(chunks) if chunks else [False] * len(claims)
        absent = list(compress(claims, map(not_, there)))
        commands: list[KeyCommand] = []
        for key in absent:
            commands += (KeyCommand(key, ("SET", key, who, "NX", "PX", claim_ms)), KeyCommand(key, ("GET", key)))
        answers = await self._cluster.ask_each(commands)
        found = list(zip(answers[::2], answers[1::2], strict=True))
        own = [key for key, (was_set, holder) in zip(absent, found, strict=True) if not was_set and holder == who]
        await self._cluster.ask_each([KeyCommand(key, ("PEXPIRE", key, claim_ms)) for key in own])
        states = (_state(was_set, holder, who) for was_set, holder in found)
        return [UploadState.THERE if each else next(states) for each in there]

    async def _answered(self, function: Callable[..., Awaitable[Result]], *args: object, timeout_s: float) -> Result:
        try:
            return await self._call(function, *args, timeout_s=timeout_s)
        except _Late as error:
            raise DeadlineExceeded(error.message) from error

    async def _there(self, keys: Sequence[bytes]) -> list[bool | None]:
        """See ``there``. Raises where all nodes of a cluster that were asked refuse, or none of it answers."""
        if self._cluster is None:
            return [found == ord("1") for found in await self._run(THERE, keys)]
        found = await self._cluster.ask_each([KeyCommand(key, ("EXISTS", key)) for key in keys])
        if all(isinstance(each, Exception) for each in found):
            if self._cluster.is_away or not isinstance(found[0], NODE_FAILURES):
                raise found[0].with_traceback(None)
        return [None if isinstance(each, Exception) else each == 1 for each in found]

    async def open(self, key: bytes, byte_count: int) -> Opened | None:
        """Return a chunk's header, at most ``byte_count`` bytes of it. None: there is no chunk."""
        found = await self._call(self._run, OPEN, [key], byte_count, HEADER_BYTES_MAX)
        return None if found is None else Opened(*found)

    async def commit(
        self, unfinished: bytes, key: bytes, claim: bytes, field_count: int, header: bytes, ttl_ms: int, key_ids: bytes
    ) -> str:
        """Commit a chunk. Returns the outcome: "stored", "incomplete" or "newer". ``header``: the first bytes of the
        header; ``key_ids``: the ids of the envelope keys that this node has, one after the other."""
        keys = [unfinished, key, claim]
        found: bytes = await self._call(self._run, COMMIT, keys, field_count, header, ttl_ms, key_ids)
        return found.decode()

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys. A key that is not there is no error."""
        await self._in_batches(self._remove, keys)

    async def _remove(self, keys: Sequence[bytes]) -> None:
        if self._cluster is None:
            await self._client.unlink(*keys)
        else:
            await self._done([KeyCommand(key, ("UNLINK", key)) for key in keys])

    async def touch(self, keys: Sequence[bytes], ttl_ms: int) -> None:
        """Have these chunks stay for ``ttl_ms`` from now on."""
        await self._in_batches(self._touch, keys, ttl_ms)

    async def _in_batches(self, function: Callable[..., Awaitable[None]], keys: Sequence[bytes], *args: object) -> None:
        """Call the function for all keys, in parts. A node of a cluster that fails costs its own keys: the other parts
        follow, and the first error is raised at the end."""
        failed: KVStoreError | None = None
        for first in range(0, len(keys), BATCH_COUNT):
            try:
                await self._call(function, keys[first : first + BATCH_COUNT], *args)
            except KVStoreError as error:
                if self._cluster is None:
                    raise
                failed = failed or error
        if failed is not None:
            raise failed

    async def _touch(self, keys: Sequence[bytes], ttl_ms: int) -> None:
        if self._cluster is None:
            await self._run(TOUCH, keys, ttl_ms)
        else:
            await self._done([KeyCommand(key, ("PEXPIRE", key, ttl_ms)) for key in keys])

    async def _done(self, commands: Sequence[KeyCommand]) -> None:
        """Run each command on its node of the cluster. Raises the first error, when all have ended."""
        assert self._cluster is not None
        for each in await self._cluster.ask_each(commands):
            if isinstance(each, Exception):
                raise each

    async def account(self) -> Account:
        """Return the account of the servers that answer; empty where this user may not ask. Raises when none of them
        answers."""
        return await self._call(self._account)

    async def _account(self) -> Account:
        try:
            found = [await self._client.info()] if self._cluster is None else await self._cluster.ask_all("INFO")
        except NoPermissionError:
            return Account()
        nodes = [each for each in found if not isinstance(each, Exception)]
        errors = [each for each in found if isinstance(each, Exception) and not isinstance(each, NoPermissionError)]
        if errors and not nodes:
            raise errors[0]
        return Account(
            sum(int(each["used_memory"]) for each in nodes),
            sum(int(each.get("maxmemory") or each.get("total_system_memory", 0)) for each in nodes),
            f"{len(errors)} of {len(found)} nodes do not answer: {errors[0]}" if errors else "",
        )

    async def server_of(self, key: bytes) -> Server:
        """Return the server that has a key's bytes. That is known without it as a rule, so it counts as no answer."""
        return await self._call(self._topology.server_of, key, is_answered=False)

    async def followed(self, key: bytes, said: str) -> Server:
        """Return the server that has a key's bytes, after a server said that another one has them."""
        return await self._call(self._topology.followed, key, said)

    def as_part(self, error: Unavailable) -> Unavailable:
        """Note in an error of one server that a cluster's others may well answer."""
        if self._cluster is not None and not self._cluster.is_away:
            error.fields[PART] = True
        return error

    def doubt(self) -> None:
        """Record that a server failed: the next ``server_of`` may name another one."""
        self._topology.doubt()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._topology.close()

    async def _run(self, script: Script, keys: Sequence[bytes], *args: object) -> Any:
        """Run a script by its name, which a server knows once it has seen the script; else send the source."""
        words = (len(keys), *keys, *args)
        with suppress(NoScriptError):  # unknown there: the source follows below
            return await self._ask(keys[0], "EVALSHA", script.name, *words)
        return await self._ask(keys[0], "EVAL", script.source, *words)

    async def _ask(self, key: bytes, *words: object) -> Any:
        return await (run_packed(self._client, words) if self._cluster is None else self._cluster.ask(key, *words))

    async def _call(
        self, function: Callable[..., Awaitable[Result]], *args: object, timeout_s: float = CALL_S_MAX,
        is_answered: bool = True,
    ) -> Result:  # fmt: skip
        """Call the function. ``is_answered``: its result, or a refusal, is an answer of the server."""
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                with self._waits.asked() as answered, _translated(heard := answered if is_answered else _not_heard):
                    found = await function(*args)
                    heard()
                    return found
        except TimeoutError as error:
            late = _Late(f"tiers.redis: no answer within {timeout_s} s: see tiers.redis.url")
            raise self.as_part(late) from error
        except Unavailable as error:
            self.as_part(error)
            if REPLICA in error.fields:
                await self._topology.reconnect()
            raise


def _state(was_set: object, holder: object, who: bytes) -> UploadState:
    """Return the state of a chunk from setting its claim and then reading it. Where claims cannot be set none is
    TAKEN."""
    is_taken = not was_set and isinstance(holder, bytes) and holder != who
    return UploadState.TAKEN if is_taken else UploadState.FREE


def _not_heard() -> None:
    """Do nothing: no server has said anything."""


@contextmanager
def _translated(answered: Callable[[], None]) -> Iterator[None]:
    """Translate redis-py's errors into ours. A refusal counts as an answer."""
    try:
        yield
    except REDIS_ERRORS as raised:
        if (refused := refused_by(raised)) is not None:
            answered()
        raise refused or outage_of(raised) from raised


def refused_by(raised: BaseException) -> KVStoreError | None:
    """Return a server's refusal, which redis-py raised, as our error. None: no server refused anything, one failed."""
    error = _said(raised)
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "")
    if isinstance(error, AuthenticationError):
        code = "NOAUTH" if "required" in str(error) else "WRONGPASS"
    return refusal(f"{code} {error}".strip(), _WHERE) if code or isinstance(error, ResponseError) else None


def outage_of(raised: BaseException) -> Unavailable:
    """Return our error for a server that failed: what redis-py raised, where that is no refusal."""
    if isinstance(raised, MasterNotFoundError) and "Authentication" in str(raised):
        return unreachable("a Sentinel", "it wants another tiers.redis.sentinel_password_file")
    return unreachable(_WHERE, _said(raised))


def _said(raised: BaseException) -> BaseException:
    """Return the server's own error. For a new connection it is the cause of a ConnectionError. For a request for a
    cluster's map it is the cause or the context of redis-py's error "no reachable node"."""
    if isinstance(raised, RedisClusterException):
        while isinstance(inner := raised.__cause__ or raised.__context__, RedisError | RedisClusterException):
            raised = inner
    return raised.__cause__ if isinstance(raised.__cause__, RedisError) else raised


class _Late(Unavailable):
    """No answer in time."""
