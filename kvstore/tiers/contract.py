"""The interfaces of tiers. The service alone uses a local tier's room; a shared tier's room belongs to an engine that
other nodes use, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkHeader, ChunkLayout, write_mark
from kvstore.errors import DataLoss, Unavailable
from kvstore.keys import DIGEST_BYTES
from kvstore.seams.devices import DeviceMemory
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Exactness, Provenance, Tier
from kvstore.tiers.choice import EncodingFigures

Residency = int
"""The place of one copy in a local tier: a number of that tier, 0 <= number < RESIDENCY_STOP, meaningless elsewhere."""
RESIDENCY_STOP = 1 << 62
"""The catalog uses the bits from here on for itself. It never passes them to a tier."""
PART = "part"
"""The field of an Unavailable that says: only a part of a shared engine failed, other chunks may well be had."""
IS_FULL = "is_full"
"""The field of an Exhausted that says: a shared engine has no room for any chunk, or may take none now."""
NOTHING = 0
"""Stands for "no write" where the first 8 bytes of a write id are expected."""
SpaceName = tuple[bytes, Provenance, Exactness]
HelpingCopies = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""Says of many copies which ones would help a tier that needs room; False for a negative number, which is no copy's.
Equal ones say the same."""


Buffer = Bytes | DeviceMemory
"""Memory that bytes are read from or written into. Host memory is a uint8 array."""


def host_memory(buffers: Sequence[Buffer]) -> list[Bytes]:
    """Return the buffers as arrays, for a tier that reaches host memory only. A caller that moves bytes of a device
    stages them in host memory first: anything else is a bug of ours."""
    arrays = [each for each in buffers if isinstance(each, np.ndarray)]
    assert len(arrays) == len(buffers), "this tier reaches host memory only"
    return arrays


@dataclass(frozen=True, slots=True)
class ChunkName:
    """Names the chunk that is asked for. ``mark`` is the first 8 bytes of the write id that the catalog knows; None
    accepts any write."""

    storage_key: bytes
    layout: ChunkLayout
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A tier's account, in bytes: ``file_bytes`` = ``allocated_bytes`` + ``free_bytes`` + ``quarantined_bytes`` +
    ``overhead_bytes``, and never above ``capacity_bytes``. ``state`` is "up", "read-only" or "failing". ``is_shared``:
    other nodes use the tier, too. ``envelope``: the means that proves copies in the tier to be ours, where it is
    known. ``state_s``: the seconds for which it has been in that state, 0 where nobody counts them. ``reason``: why it
    is not "up", or takes less than its capacity, in words. ``encodings``: where the tier chooses its copies'
    encodings, each model's choice."""

    name: str
    state: str
    capacity_bytes: int
    file_bytes: int
    allocated_bytes: int
    free_bytes: int
    quarantined_bytes: int
    overhead_bytes: int
    chunk_count: int
    read_bytes: int
    written_bytes: int
    is_shared: bool = False
    envelope: str = ""
    state_s: float = 0.0
    reason: str = ""
    encodings: tuple[EncodingFigures, ...] = ()

    @property
    def state_seconds(self) -> float:
        """``state_s``, as the wire calls it."""
        return self.state_s

    @property
    def verified_bytes(self) -> int:
        """Count bytes that were read and passed their checksums: a tier counts no others as read."""
        return self.read_bytes


@dataclass
class IndexColumns:
    """The copies that a local tier holds, a row per copy, the least recently used first. Digests and parents are 32
    bytes each, concatenated. ``spaces`` are positions in ``names``. ``stored_s`` are as in the catalog, and empty where
    no time is known."""

    names: list[SpaceName] = field(default_factory=list)
    residencies: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    marks: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    token_counts: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    spaces: NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    digests: bytes = b""
    parents: bytes = b""
    stored_s: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))

    @property
    def times(self) -> NDArray[np.uint32]:
        """``stored_s`` with a row per copy; 0 where the time is not known."""
        return self.stored_s if len(self.stored_s) else np.zeros(len(self), np.uint32)

    def __len__(self) -> int:
        return len(self.residencies)

    def each_digest(self) -> Iterator[bytes]:
        return (self.digests[at : at + DIGEST_BYTES] for at in range(0, len(self.digests), DIGEST_BYTES))

    def where(self, stays: NDArray[np.bool_]) -> IndexColumns:
        """Return the rows for which ``stays`` is true."""
        if stays.all():
            return self

        def kept(digests: bytes) -> bytes:
            return np.frombuffer(digests, f"V{DIGEST_BYTES}")[stays].tobytes()

        return IndexColumns(
            self.names, self.residencies[stays], self.marks[stays], self.token_counts[stays], self.spaces[stays],
            kept(self.digests), kept(self.parents), self.times[stays],
        )  # fmt: skip

    def followed_by(self, other: IndexColumns) -> IndexColumns:
        """Return these rows, then the other's."""
        if not len(other):
            return self
        names = list(dict.fromkeys([*self.names, *other.names]))
        places = {name: place for place, name in enumerate(names)}
        spaces = np.array([places[name] for name in other.names], np.uint16)[other.spaces]
        return IndexColumns(
            names,
            np.concatenate([self.residencies, other.residencies]),
            np.concatenate([self.marks, other.marks]),
            np.concatenate([self.token_counts, other.token_counts]),
            np.concatenate([self.spaces, spaces]),
            self.digests + other.digests,
            self.parents + other.parents,
            np.concatenate([self.times, other.times]),
        )


@dataclass(frozen=True, slots=True)
class Recovered:
    """The copies that a local tier holds at a start. ``is_proven`` is a flag per row. True: a clean stop recorded the
    copy. False: a scan found the copy, and no promise may rest on it before it was read and renewed."""

    columns: IndexColumns
    is_proven: NDArray[np.bool_]


class StoredChunk(Protocol):
    """An opened copy: its header was read and is that of the chunk that was asked for. The tier does not reuse the
    copy's room before ``close``."""

    @property
    def header(self) -> ChunkHeader: ...

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        """Fill ``target`` (one buffer per slab of the run, of the slab's raw size) with raw, verified bytes.

        Raises: DataLoss when a strip fails its check; Unavailable when the tier fails. ``target`` then holds
        anything.
        """

    async def check(self, slabs: range) -> None:
        """Verify slabs without handing out their bytes. Raises as ``read``."""

    def close(self) -> None:
        """Idempotent."""


class Evictor(Protocol):
    """Decides which copies leave a local tier. The tier says which copies would help; the policy says in which order
    they go. Both calls give copies up through the tiers' own ``remove``, before they return."""

    def evict(
        self, helps: Callable[[Residency], bool], enough: Callable[[], bool], *, among: HelpingCopies | None = None
    ) -> bool:
        """Give up copies in the policy's order until ``enough`` is true, which is asked after each copy. A copy goes if
        it ``helps``, or if its parent does, which can only go after it. What faster tiers alone have below a chunk that
        leaves the node goes with it. Returns whether ``enough`` came true.
        ``among``: the same as ``helps``, for many copies at once, from a tier of whose copies perhaps few help."""

    def evict_all(self, residencies: Sequence[Residency]) -> bool:
        """Give up all of these copies, or none: none go where one is held, or is not in the catalog yet because it is
        being written. Returns whether they went."""


class LocalTier(Protocol):
    """Keeps whole chunks in room of our own. Calls may run concurrently; a cancelled call leaves the tier
    consistent."""

    @property
    def name(self) -> str:
        """The tier's name in its settings (``tiers.<name>``), its statistics and logs."""

    @property
    def kind(self) -> Tier:
        """The tier's kind in replies and events."""

    @property
    def durability(self) -> Durability:
        """The durability level of a copy in this tier."""

    async def recover(self, evictor: Evictor) -> Recovered:
        """Return the copies that the tier holds. Call once, before any other call. Raises Unavailable, and the tier is
        closed then; its subclass NotOurs ends the start of the service."""

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> Residency:
        """Keep a raw chunk: ``pieces`` are its packed header and its slabs. When this returns the copy is as durable as
        this tier makes any copy. ``pieces`` must not change meanwhile. Without free room the tier asks the evictor for
        some.

        Raises: Exhausted when no copy that may go makes room; Unavailable when the tier fails.
        """

    async def open(self, name: ChunkName, residency: Residency) -> StoredChunk:
        """Find one copy. Raises: DataLoss when the bytes there are not that chunk; Unavailable as above."""

    async def renew(self, residency: Residency) -> bool:
        """Make a copy that a scan found as durable as one that was written just now. False where this tier cannot.
        Raises Unavailable."""

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """Prepare for new writes (storage key -> first 8 bytes of the write id, or ``NOTHING``) before they are
        promised: no later start brings back what was stored under these keys before. The caller has already removed the
        old copies. Waits at most ``wait_s`` seconds for old writes that still run. Raises KVStoreError where this
        cannot be ensured."""

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        """Give these copies up at once; the room of an open copy is free when that copy is closed. ``erase``: give them
        up for ever, so that no scan finds them either. Their room is free once ``tidy`` has erased them."""

    async def quarantine(self, residency: Residency) -> None:
        """Give up a copy that failed a check, and keep its place out of use for a while. No scan brings it back. Raises
        KVStoreError where that cannot be ensured yet; the copy is gone all the same, and ``tidy`` tries again."""

    async def tidy(self) -> None:
        """Erase the copies that are to be erased. Costs nothing where there are none."""

    def has_room(self, layout: ChunkLayout) -> bool:
        """Return True when one chunk fits without giving up a copy. False, too, where the tier cannot tell now. Raises
        nothing."""

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the encoding of each copy: numbers of ``kvstore.spec.Encoding``."""

    def stalled_s(self) -> float:
        """Return for how many seconds the tier has answered no call although it was asked. 0: it answers."""

    async def close(self, held: Recovered | None) -> None:
        """Stop. ``held`` is what the catalog has in this tier, with the copies that are still in doubt: the stop is
        clean. None: the stop is not clean, and the next start scans the tier and believes nothing else."""

    def statistics(self) -> TierStatistics: ...


class UploadState(Enum):
    """The state of a chunk that this node is about to write to a shared tier. THERE: the tier probably has it already.
    FREE: no other node is known to write it. TAKEN: another node says that it writes it now."""

    THERE = "there"
    FREE = "free"
    TAKEN = "taken"


class UploadClaims(Protocol):
    """A place where nodes tell each other what they are about to write to a shared tier, for a tier that has no such
    place itself."""

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float) -> Sequence[bool]:
        """Return a flag per key: True when the key was free, and this node claims it from now on, as in
        ``SharedTier.claim``. Ends soon and raises nothing: where no answer comes in time all keys count as free."""

    async def release(self, storage_keys: Sequence[bytes]) -> None:
        """Say that this node no longer writes these chunks. Ends soon and raises nothing: a claim expires by itself,
        too."""

    async def close(self) -> None:
        """Idempotent."""


class SharedTier(Protocol):
    """Keeps whole chunks in an engine that other nodes use. The engine may drop any chunk at any time, and may give
    back bytes that we did not write. Calls may run concurrently."""

    @property
    def name(self) -> str:
        """As for ``LocalTier``."""

    @property
    def kind(self) -> Tier:
        """As for ``LocalTier``."""

    @property
    def durability(self) -> Durability:
        """As for ``LocalTier``."""

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool | None]:
        """Return a flag per key: True when the chunk is probably there, None where that is unknown, as a part of the
        engine does not answer, or a limit of this node lets no more be asked. A flag is a hint: only a read proves it.
        ``chains``: the number of keys of each chain; the keys are in order, each chain root first. A chain is of use
        only up to its first missing chunk, so a tier that pays for each question need not ask for every key; without
        ``chains`` it asks for every key. Raises Unavailable, DeadlineExceeded."""

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        """``probe`` for a node that is about to write these chunks: it claims each FREE one for ``claim_s`` seconds, so
        that other nodes find it TAKEN. A claim is a hint, never a promise: it expires by itself, and a write needs
        none. A tier that keeps no claims finds nothing TAKEN. Raises as ``probe``."""

    def takes(self, layout: ChunkLayout) -> bool:
        """Return True when the tier accepts chunks of this size."""

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        """Write a chunk, as for a local tier. A cancelled write reads ``pieces`` no more once it has ended. Raises:
        Exhausted when the engine is full, or keeps a copy that this node cannot read; PermissionDenied where this node
        may only read; Unavailable."""

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> StoredChunk | None:
        """Find a chunk; None when it is not there. ``ahead``: the memory of the leading slabs, for a caller that reads
        these next: the tier may fill it in the same request, and ``read`` of these slabs into the same buffers then
        only checks them. ``ahead`` belongs to the chunk until that is closed. A cancelled open, or a cancelled read of
        the opened chunk, fills its target no more once it has ended. Raises: DataLoss when the bytes there are not that
        chunk; Exhausted where a limit of this node lets no more be read; Unavailable."""

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        """Remove these chunks. A chunk that is not there is no error. Raises Unavailable."""

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        """Report that this node used these chunks from a faster tier: an engine that drops unused chunks is to keep
        them. A chunk that is not there is no error; a tier that drops nothing by use does nothing. No caller waits for
        the result: the tier may do it later, and fail silently. May raise Unavailable."""

    def stalled_s(self) -> float:
        """As for ``LocalTier``."""

    async def close(self) -> None:
        """Idempotent."""

    def statistics(self) -> TierStatistics: ...


class WritePolicy(StrEnum):
    """The time at which a chunk is written to a shared tier. BACK: at once; REUSE: at its second use; DEMOTE: when it
    is about to leave its last local tier; NEVER: not by itself. A store that asks for the tier's level always writes at
    once."""

    BACK = "back"
    REUSE = "reuse"
    DEMOTE = "demote"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class SharedUse:
    """A shared tier, and how this node uses it: a lookup waits at most ``lookup_s_max`` seconds for the tier. A read of
    many bytes may have pieces of up to ``piece_bytes_max``; 0: the tier gains nothing by pieces that are larger than
    any tier's. ``ends_with_us``: True for an engine that this service runs itself: its chunks are lost with a stop."""

    tier: SharedTier
    lookup_s_max: float
    write: WritePolicy = WritePolicy.BACK
    piece_bytes_max: int = 0
    ends_with_us: bool = False


class NotOurs(Unavailable):
    """A newer release, or another tenant, wrote the data that a tier was to use. Nothing was changed, and the start
    ends here, so that its owner can still use that data."""


def check_header(name: ChunkName, header: ChunkHeader) -> ChunkHeader:
    """Verify that a copy is the chunk that was asked for: every read passes here. Raises DataLoss."""
    if header.storage_key != name.storage_key:
        raise DataLoss("another chunk lies where this one should", reason="header")
    if name.mark is not None and write_mark(header.write_id) != name.mark:
        raise DataLoss("another write of the chunk lies where this one should", reason="write id")
    return header
