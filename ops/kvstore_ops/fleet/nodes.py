"""Nodes: their stored blocks, and the queues and measured rates of their tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.planning.loading import ASSUMED, BusyTime, BusyTimes, HeldRun, TierFacts, TierRate, merged_runs
from kvstore.planning.loading.rates import is_probe_due
from kvstore.spec import Tier
from kvstore_ops.fleet.hardware import Hardware


class Room:
    """The blocks of one tier. When there are too many, the least recently used are dropped."""

    def __init__(self, block_count: int | None = None) -> None:
        """``block_count``: the capacity in blocks; None: no limit."""
        self._limit = block_count
        self._blocks = OrderedDict[int, None]()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, blocks: Sequence[int]) -> int:
        """Keep the blocks of one prompt; its last blocks are dropped before its first. Returns the number of new
        blocks."""
        if self._limit == 0:
            return 0
        new = 0
        for block in reversed(blocks):
            new += block not in self._blocks
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._limit is not None and len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)
        return new


class Line:
    """A tier below memory, which serves one request after the other: its queue, and its measured rate."""

    def __init__(self, tier: Tier, rate: TierRate) -> None:
        self.tier = tier
        self.rate = rate
        self._free_s = 0.0
        self._times = BusyTimes()
        self._probed_s = float("-inf")

    def truth(self, now_s: float) -> TierFacts:
        """Return the tier's true rate, with the bytes that are queued now."""
        return TierFacts(self.rate, max(0.0, self._free_s - now_s) / self.rate.byte_s)

    def known(self, now_s: float) -> TierFacts:
        """Return the tier's measured rate, with the same queued bytes: bytes in a queue can be counted."""
        return TierFacts(self._times.rate or ASSUMED[self.tier], self.truth(now_s).queued_bytes)

    def delivered(self, now_s: float, busy: BusyTime) -> None:
        """Add a read to the queue, and learn from its busy time."""
        self._free_s = max(self._free_s, now_s) + busy.busy_s
        self._times = self._times.observed(busy)

    def probe(self, now_s: float, byte_count: int) -> int:
        """Probe the tier with a read of ``byte_count``, if a probe is due. Returns the bytes read."""
        known = self._times.rate or ASSUMED[self.tier]
        if not is_probe_due(known, byte_count, now_s - self._probed_s):
            return 0
        self._probed_s = now_s
        self.delivered(now_s, BusyTime(byte_count, self.rate.seconds(byte_count)))
        return byte_count


class Node:
    """One host: its memory and its device. ``shared`` is the tier of all nodes, ``shared_room`` its blocks."""

    def __init__(self, hardware: Hardware, shared: Line, shared_room: Room) -> None:
        self._hardware = hardware
        self._memory = Room(hardware.memory_bytes // hardware.block_bytes)
        self._device = Room(hardware.device_bytes // hardware.block_bytes)
        self._shared_room = shared_room
        self.lines = {Tier.NVME: Line(Tier.NVME, hardware.device), Tier.S3: shared}

    def runs(self, blocks: Iterable[int]) -> tuple[HeldRun, ...]:
        """Return the stored leading blocks of a prompt as runs, each in the fastest tier that has it."""
        found, hardware = [], self._hardware
        for block in blocks:
            tier = self._tier_of(block)
            if tier is Tier.NONE:
                break
            found.append(HeldRun(hardware.block_tokens, tier, float(hardware.token_bytes)))
        return merged_runs(found)

    def _tier_of(self, block: int) -> Tier:
        if block in self._memory:
            return Tier.DRAM
        if block in self._device:
            return Tier.NVME
        return Tier.S3 if block in self._shared_room else Tier.NONE

    def keep(self, blocks: Sequence[int]) -> dict[Tier, int]:
        """Store the blocks of a prompt that was computed or loaded: in memory, and in the tiers that lack them. Returns
        the bytes written to each tier below memory."""
        size = self._hardware.block_bytes
        self._memory.use(blocks)
        return {Tier.NVME: size * self._device.use(blocks), Tier.S3: size * self._shared_room.use(blocks)}
