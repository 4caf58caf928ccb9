"""Events for routers that listen to vLLM: its KV-event schema over ZMQ, with replay.

A message is [topic, sequence as u64 big-endian, msgpack of [wall seconds, [event, ...]]]. A router that missed messages
sends the first sequence number that it lacks to the replay endpoint. It gets those messages that are kept, then
[empty, -1, empty]. A batch with AllBlocksCleared begins a new account of all chunks: at the start, and whenever this
publisher lost events. The first sequence number of a start is the time in microseconds. A router that followed an
earlier start may hear none of the first batches, but it sees a gap, asks for what it missed, and begins anew.

Source: vLLM 0.32, vllm/distributed/kv_events.py. Departures: vLLM's numbers begin at 0 again after a restart; the
service never sees tokens, so ``token_ids`` is empty; hashes are chunks' 32-byte chain digests, which a router computes
with ``kvstore.keys.chain_digests``, or gets from vLLM where its connector names chunks by vLLM's hashes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvstore.catalog import Event, Namespace
from kvstore.config import EventSettings
from kvstore.controller import Controller
from kvstore.errors import Unavailable
from kvstore.keys import ROOT_DIGEST
from kvstore.seams import Clock, LongWork
from kvstore.spec import CacheKind, EventKind, Exactness, Provenance, Tier
from kvstore.telemetry import BoundedLines

BATCH_COUNT_MAX = 512
KEPT_BYTES_MAX = 64 << 20
"""Bytes of batches that are kept for replay, and that ZMQ queues for a slow router, beside the limit of their
number. A batch of ``BATCH_COUNT_MAX`` events has 44 KB, so that ten thousand of them would be 435 MB; 64 MiB are
700,000 events."""
MESSAGE_BYTES_MIN = 4096
"""Batches up to so many bytes are never divided."""
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
REQUEST_BYTES_MAX = 4096
"""A router sends a sequence number or a topic, both shorter. A peer that sends more is disconnected."""
STORAGE = "STORAGE"
"""vLLM's name for any tier below memory."""
_MEDIA = {Tier.HBM: "GPU", Tier.DRAM: "CPU"}
_log = logging.getLogger("kvstore.events")


def open_publisher(settings: EventSettings, controller: Controller, clock: Clock) -> Publisher | None:
    """Return the publisher that the settings ask for, bound to its addresses; None: they ask for none. Raises
    Unavailable when its packages are missing or an address cannot be bound."""
    if not settings.endpoint:
        return None
    try:
        importlib.import_module("zmq.asyncio")
        zmq, msgpack = importlib.import_module("zmq"), importlib.import_module("msgspec.msgpack")
    except ImportError as error:
        raise Unavailable(
            f"events.endpoint is set and {error.name} is not installed: install kvstore[events], or unset it"
        ) from error
    return Publisher(settings, controller, clock, zmq, msgpack.Encoder())


class KeptBatches:
    """The last batches, for routers that missed some. The oldest go first."""

    def __init__(self, count_max: int, byte_count_max: int) -> None:
        self._count_max = count_max
        self._byte_count_max = byte_count_max
        self._batches: deque[tuple[int, bytes]] = deque()
        self.byte_count = 0

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a batch, and forget the oldest ones past the limits."""
        self._batches.append((sequence, payload))
        self.byte_count += len(payload)
        while len(self._batches) > self._count_max or self.byte_count > self._byte_count_max:
            self.byte_count -= len(self._batches.popleft()[1])

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches that are kept of those from sequence number ``first`` on."""
        return [each for each in self._batches if each[0] >= first]


class Publisher:
    """A watcher of the catalog that tells routers. Nothing here waits for a router: ZMQ drops messages that a router
    does not take."""

    def __init__(self, settings: EventSettings, controller: Controller, clock: Clock, zmq: Any, encoder: Any) -> None:
        self._controller = controller
        self._clock = clock
        self._encoder = encoder
        self._lines = BoundedLines(_log, clock)
        self._topic = settings.topic.encode()
        self._sequence = int(clock.wall() * 1e6)  # above an earlier start's: its routers see a gap, and ask for all
        self._kept = KeptBatches(settings.buffer_count, KEPT_BYTES_MAX)
        self._context = zmq.asyncio.Context()
        self._sender, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._message_bytes = max(MESSAGE_BYTES_MIN, KEPT_BYTES_MAX // settings.buffer_count)
        """Longer batches are divided: ZMQ bounds its queues by their number of messages only."""
        self._sender.set_hwm(min(settings.buffer_count, max(1, KEPT_BYTES_MAX // self._message_bytes)))
        self._replay.set_hwm(settings.buffer_count)
        for socket in (self._sender, self._replay):
            socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        try:
            self._sender.bind(settings.endpoint)
            if settings.replay_endpoint:
                self._replay.bind(settings.replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise Unavailable(
                f"events.endpoint = {settings.endpoint} or events.replay_endpoint = {settings.replay_endpoint} cannot "
                f"be bound ({error}): set others"
            ) from error
        self._watcher = controller.watch_all()

    def close(self) -> None:
        """Close the sockets. Messages still queued for a router are dropped. Idempotent."""
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Publish and replay, until the watcher is closed or the task cancelled."""
        async with asyncio.TaskGroup() as group:
            replaying = group.create_task(self._answer())
            await self._tell_all()
            while (news := await self._watcher.take(BATCH_COUNT_MAX)) is not None:
                await self._send([block for event in news.events for block in _blocks(event)])
                if news.lost_count:
                    await self._tell_all()
            replaying.cancel()

    async def _tell_all(self) -> None:
        """Begin a new account: clear everything, then tell all chunks again. Changes meanwhile follow as events."""
        await self._send([{"type": "AllBlocksCleared"}])
        for events in self._controller.stored(BATCH_COUNT_MAX):
            await self._send([block for event in events for block in _blocks(event)])
            await self._clock.sleep(0)

    async def _send(self, blocks: Sequence[dict[str, Any]]) -> None:
        if not blocks:
            return
        payload = self._encoder.encode([self._clock.wall(), blocks])
        if len(payload) > self._message_bytes and len(blocks) > 1:
            await self._send(blocks[: len(blocks) // 2])
            await self._send(blocks[len(blocks) // 2 :])
            return
        self._kept.add(self._sequence, payload)
        await self._sender.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1

    async def _answer(self) -> None:
        """Replay kept messages to routers that ask. It pauses for other work, because nothing in this loop waits while
        requests are there: a reply that nobody reads does not wait either."""
        pauses = LongWork(self._clock).begin()
        while True:
            frames = await self._replay.recv_multipart()
            await pauses.between()
            if len(frames) != 3 or len(frames[2]) != 8:
                self._lines.line(logging.WARNING, "a replay request is no sequence number", frames=len(frames))
                continue
            first = int.from_bytes(frames[2], "big")
            for sequence, payload in self._kept.since(first):
                number = sequence.to_bytes(8, "big")
                await self._replay.send_multipart((frames[0], b"", self._topic, number, payload))
                await pauses.between()
            await self._replay.send_multipart((frames[0], b"", b"", END_SEQUENCE, b""))


def _is_told(space: Namespace) -> bool:
    """True for the namespaces that routers hear of: exact attention caches, computed in context, of registered
    models."""
    is_prefix = space.exactness is Exactness.EXACT and space.provenance is Provenance.IN_CONTEXT
    return is_prefix and space.model_kind in (CacheKind.KV, CacheKind.MLA)


def _medium(tier: Tier) -> str:
    return _MEDIA.get(tier, STORAGE)


def _stored(event: Event) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [event.digest],
        "parent_block_hash": None if event.parent == ROOT_DIGEST else event.parent,
        "token_ids": [],
        "block_size": event.token_count,
        "lora_id": None,
        "medium": _medium(event.tier),
        "lora_name": event.space.spec.adapter_id or None,
    }


def _removed(digest: bytes, medium: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [digest], "medium": medium}


def _blocks(event: Event) -> list[dict[str, Any]]:
    """Return vLLM's events for an event. vLLM has no event for a move: the block is stored in the new medium, then
    removed from the old one, so that it is always somewhere."""
    if not _is_told(event.space):
        return []
    if event.kind is EventKind.REMOVED:
        return [_removed(event.digest, _medium(event.tier))]
    blocks = [_stored(event)]
    if event.kind is EventKind.MOVED:
        blocks.append(_removed(event.digest, STORAGE if event.tier is Tier.DRAM else _MEDIA[Tier.DRAM]))
    return blocks
