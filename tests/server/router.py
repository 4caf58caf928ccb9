"""A router that listens to vLLM's events. The types are written after vLLM's own (0.32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Router:
    """Listens as vLLM's subscribers do, and keeps which block lies where."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.connect(f"ipc://{directory}/events")
        self.subscriber.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self.replay_endpoint = f"ipc://{directory}/replay"
        self.replay = self.dialled()
        self.known: dict[bytes, set[str]] = {}
        self.sequence = -1
        self.batches: dict[int, bytes] = {}

    def apply(self, payload: bytes) -> None:
        for event in DECODER.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockStored):
                for block in event.block_hashes:
                    self.known.setdefault(bytes(block), set()).add(event.medium or "")
            else:
                for block in event.block_hashes:
                    self.known[bytes(block)].discard(event.medium or "")
                    if not self.known[bytes(block)]:
                        del self.known[bytes(block)]

    def listen(self, wait_ms: int = 200) -> None:
        while self.subscriber.poll(wait_ms):
            topic, number, payload = self.subscriber.recv_multipart()
            assert topic == b"kv-events"
            sequence = int.from_bytes(number, "big")
            if sequence != self.sequence + 1:
                self.catch_up()
            if sequence > self.sequence:
                assert sequence == self.sequence + 1
                self.sequence = sequence
                self.batches[sequence] = payload
                self.apply(payload)

    def catch_up(self) -> None:
        for sequence, payload in self.replayed(self.sequence + 1):
            begins_anew = isinstance(DECODER.decode(payload).events[0], AllBlocksCleared)
            assert sequence == self.sequence + 1 or begins_anew
            self.sequence = sequence
            self.batches[sequence] = payload
            self.apply(payload)

    def dialled(self) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.replay_endpoint)
        return dealer

    def replayed(self, first: int) -> list[tuple[int, bytes]]:
        """A question that was on its way to a publisher that ended is lost with it: it is asked anew."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        if not self.replay.poll(2_000):
            self.replay.close(linger=0)
            self.replay = self.dialled()
            self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.replay.poll(10_000), "the replay does not end"
            _, topic, number, payload = self.replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self.context.destroy(linger=0)
