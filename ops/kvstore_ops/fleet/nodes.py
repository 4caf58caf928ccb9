"""Nodes: what is stored where, how busy each tier is, and what was measured of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.planning.loading import ASSUMED, BusyTime, BusyTimes, HeldRun, TierFacts, TierRate, merged_runs
from kvstore.planning.loading.rates import is_probe_due
from kvstore.spec import Tier
from kvstore_ops.fleet.hardware import Hardware


class Room:
    """Blocks in the order of their use; what is too much goes, the least recently used first."""

    def __init__(self, block_count: int | None = None) -> None:
        """None: as many as come."""
        self._limit = block_count
        self._blocks = OrderedDict[int, None]()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, blocks: Sequence[int]) -> int:
        """Keep these, of one prompt: its end goes before its beginning. Returns how many were not there."""
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
    """A tier below memory, which delivers one after the other: until when it is busy, and what was measured of it."""

    def __init__(self, tier: Tier, rate: TierRate) -> None:
        self.tier = tier
        self.rate = rate
        self._free_s = 0.0
        self._times = BusyTimes()
        self._probed_s = float("-inf")

    def truth(self, now_s: float) -> TierFacts:
        """What it takes, with what is queued now."""
        return TierFacts(self.rate, max(0.0, self._free_s - now_s) / self.rate.byte_s)

    def known(self, now_s: float) -> TierFacts:
        """The same by what was measured: the queue's bytes are counted, not timed."""
        return TierFacts(self._times.rate or ASSUMED[self.tier], self.truth(now_s).queued_bytes)

    def delivered(self, now_s: float, busy: BusyTime) -> None:
        """It was asked for so much, and is busy so much longer."""
        self._free_s = max(self._free_s, now_s) + busy.busy_s
        self._times = self._times.observed(busy)

    def probe(self, now_s: float, byte_count: int) -> int:
        """Measure it by one block, if it is time. Returns the bytes."""
        known = self._times.rate or ASSUMED[self.tier]
        if not is_probe_due(known, byte_count, now_s - self._probed_s):
            return 0
        self._probed_s = now_s
        self.delivered(now_s, BusyTime(byte_count, self.rate.seconds(byte_count)))
        return byte_count


class Node:
    """One host: its memory and its device. ``shared`` is the tier of all nodes, ``shared_room`` what lies there."""

    def __init__(self, hardware: Hardware, shared: Line, shared_room: Room) -> None:
        self._hardware = hardware
        self._memory = Room(hardware.memory_bytes // hardware.block_bytes)
        self._device = Room(hardware.device_bytes // hardware.block_bytes)
        self._shared_room = shared_room
        self.lines = {Tier.NVME: Line(Tier.NVME, hardware.device), Tier.S3: shared}

    def runs(self, blocks: Iterable[int]) -> tuple[HeldRun, ...]:
        """Where a prompt's leading blocks are, in the fastest tier that has each."""
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
        """A prompt was computed or loaded: its blocks are in memory, and written behind to what lacks them. Returns
        how many bytes were written to each tier below memory."""
        size = self._hardware.block_bytes
        self._memory.use(blocks)
        return {Tier.NVME: size * self._device.use(blocks), Tier.S3: size * self._shared_room.use(blocks)}
