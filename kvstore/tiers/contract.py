"""What a tier promises. There are two kinds: the room of a local tier is ours, that of a shared tier belongs to an
engine that other nodes use, too."""

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
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Exactness, Provenance, Tier

Residency = int
"""Where a local tier keeps one copy: the tier's own number, 0 <= number < RESIDENCY_STOP, meaningless elsewhere."""
RESIDENCY_STOP = 1 << 62
"""The bits from here on are the catalog's. It never shows them to a tier."""
NOTHING = 0
"""In the place of a write's first 8 bytes: no write."""
SpaceName = tuple[bytes, Provenance, Exactness]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A run of bytes in the memory of an accelerator."""

    address: int
    byte_count: int
    device: int


Buffer = Bytes | DeviceMemory
"""What bytes are taken from and filled into. Host memory is a uint8 array."""


def host_memory(buffers: Sequence[Buffer]) -> list[Bytes]:
    """The arrays that these buffers are, for a tier that reaches host memory only. Whoever
    moves bytes of a device stages them in host memory first: anything else is a bug of ours."""
    arrays = [each for each in buffers if isinstance(each, np.ndarray)]
    assert len(arrays) == len(buffers), "this tier reaches host memory only"
    return arrays


@dataclass(frozen=True, slots=True)
class ChunkName:
    """Which chunk is asked for. ``mark`` is the first 8 bytes of the write id the catalog knows; None: any write."""

    storage_key: bytes
    layout: ChunkLayout
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A tier's account, in bytes: ``file_bytes`` = ``allocated_bytes`` + ``free_bytes`` + ``quarantined_bytes`` +
    ``overhead_bytes``, and never above ``capacity_bytes``. ``state`` is "up", "read-only" or "failing".
    ``is_shared``: other nodes use it, too. ``envelope``: what proves copies there to be ours, where it is known."""

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

    @property
    def verified_bytes(self) -> int:
        """Bytes count as read once they passed their checks."""
        return self.read_bytes


@dataclass
class IndexColumns:
    """What a local tier holds, a row per copy, the least recently used first. Digests and parents are 32 bytes each,
    concatenated; ``spaces`` are positions in ``names``; ``stored_s`` are as in the catalog, and empty where nothing of
    them is known."""

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
        """``stored_s``, a row per copy; 0 where it is not known."""
        return self.stored_s if len(self.stored_s) else np.zeros(len(self), np.uint32)

    def __len__(self) -> int:
        return len(self.residencies)

    def each_digest(self) -> Iterator[bytes]:
        return (self.digests[at : at + DIGEST_BYTES] for at in range(0, len(self.digests), DIGEST_BYTES))

    def where(self, stays: NDArray[np.bool_]) -> IndexColumns:
        """The rows for which ``stays`` is true."""
        if stays.all():
            return self

        def kept(digests: bytes) -> bytes:
            return np.frombuffer(digests, f"V{DIGEST_BYTES}")[stays].tobytes()

        return IndexColumns(
            self.names, self.residencies[stays], self.marks[stays], self.token_counts[stays], self.spaces[stays],
            kept(self.digests), kept(self.parents), self.times[stays],
        )  # fmt: skip

    def followed_by(self, other: IndexColumns) -> IndexColumns:
        """These rows, then the other's."""
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
    """What a local tier holds at a start. ``is_proven``, a flag per row: a clean stop left the copy. Else a scan found
    it, and nothing may be promised on it before it was read and renewed."""

    columns: IndexColumns
    is_proven: NDArray[np.bool_]


class StoredChunk(Protocol):
    """One copy, opened: its header was read and is the chunk that was asked for. Close it: the room it takes is not
    reused before."""

    @property
    def header(self) -> ChunkHeader: ...

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        """Fill ``target`` (one buffer per slab of the run, of the slab's raw size) with raw, verified bytes.

        Raises: DataLoss when a strip fails its check; Unavailable when the tier fails. ``target`` then holds
        anything.
        """

    async def check(self, slabs: range) -> None:
        """Verify slabs without giving their bytes to anybody. Raises as ``read``."""

    def close(self) -> None:
        """Idempotent."""


class Evictor(Protocol):
    """Who decides what leaves a local tier. The tier says what would help; the policy says in which order. Both calls
    give copies up by the tier's own ``remove``, before they return."""

    def evict(self, helps: Callable[[Residency], bool], enough: Callable[[], bool]) -> bool:
        """Give up copies in the policy's order until ``enough``, which is asked after each. A copy goes if it
        ``helps``, or if its parent's does, which may go next. Returns whether it came to ``enough``."""

    def evict_all(self, residencies: Sequence[Residency]) -> bool:
        """Give up all of these, or none where somebody holds one of them, or one is not known yet: it is being
        written. Returns whether they went."""


class LocalTier(Protocol):
    """Whole chunks in room of our own. Calls may run concurrently; a cancelled call leaves the tier whole."""

    @property
    def name(self) -> str:
        """As in its settings (``tiers.<name>``), its statistics and logs."""

    @property
    def kind(self) -> Tier:
        """As in replies and events."""

    @property
    def durability(self) -> Durability:
        """What a copy in this tier survives."""

    async def recover(self, evictor: Evictor) -> Recovered:
        """Once, before anything else. Raises Unavailable, of which NotOurs ends the start. The tier is closed then."""

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> Residency:
        """Keep a raw chunk: ``pieces`` are its packed header and its slabs. When it returns the copy is as durable
        as this tier makes anything. ``pieces`` must not change meanwhile. Where there is no room the evictor is asked
        for some.

        Raises: Exhausted when nothing that may go makes room; Unavailable when the tier fails.
        """

    async def open(self, name: ChunkName, residency: Residency) -> StoredChunk:
        """Find one copy. Raises: DataLoss when what lies there is not that chunk; Unavailable as above."""

    async def renew(self, residency: Residency) -> bool:
        """Make a copy that a scan found as durable as one that was written just now. False where this tier cannot.
        Raises Unavailable."""

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """Before new writes are promised (storage key -> first 8 bytes of the write id, or ``NOTHING``): no later start
        brings back what was stored under these keys before. The caller has removed it already; what of it is being
        written is waited for, ``wait_s`` seconds at most. Raises KVStoreError where that cannot be had."""

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        """Give these copies up at once; the room of one that is open is free when it is closed. ``erase``: for ever,
        also for a scan. Their room is free once they are erased, which ``tidy`` does."""

    async def quarantine(self, residency: Residency) -> None:
        """Give up a copy that failed a check, and keep its place out of use for a while. No scan brings it back.
        Raises KVStoreError where that cannot be had yet; the copy is gone all the same, and ``tidy`` tries again."""

    async def tidy(self) -> None:
        """Erase what is to be erased. Costs nothing where there is nothing to do."""

    def has_room(self, layout: ChunkLayout) -> bool:
        """Whether one chunk finds room without anything being given up for it. Raises nothing: False, too, where the
        tier cannot tell now."""

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        """How these copies are encoded: numbers of ``kvstore.spec.Encoding``."""

    def stalled_s(self) -> float:
        """For how long it has answered nobody though it was asked. 0: it answers."""

    async def close(self, held: Recovered | None) -> None:
        """A clean stop, ``held`` being what the catalog has in this tier, and what of it is still in doubt. None: the
        stop is not clean, and the next start believes nothing but the tier itself."""

    def statistics(self) -> TierStatistics: ...


class UploadState(Enum):
    """Of a chunk that this node is about to write to a shared tier. THERE: it is probably there already. FREE: nobody
    else is known to write it. TAKEN: another node says that it writes it now."""

    THERE = "there"
    FREE = "free"
    TAKEN = "taken"


class UploadClaims(Protocol):
    """Where nodes tell each other what they are about to write to a shared tier, for a tier that has no place for
    that."""

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float) -> Sequence[bool]:
        """Whether each is free: claimed by this node from now on, as ``SharedTier.claim`` has it. Ends soon and raises
        nothing: where nobody answers all of them are free."""

    async def release(self, storage_keys: Sequence[bytes]) -> None:
        """This node writes these no more. Ends soon and raises nothing: a claim ends by itself, too."""

    async def close(self) -> None:
        """Idempotent."""


class SharedTier(Protocol):
    """Whole chunks in an engine that other nodes use. It may drop any of them at any time, and what it gives back was
    perhaps not written by us. Calls may run concurrently."""

    @property
    def name(self) -> str:
        """As for a local tier."""

    @property
    def kind(self) -> Tier:
        """As for a local tier."""

    @property
    def durability(self) -> Durability:
        """As for a local tier."""

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool]:
        """Whether each of these is probably there: a hint, of which only a read tells if it was right. ``chains``: how
        many of the keys, in order, are one chain's, root first. A chain is of use as far as all of it is there, so a
        tier that pays for each question need not ask for every key of it; without ``chains`` it does. Raises
        Unavailable, DeadlineExceeded."""

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        """``probe`` for a node that is about to write these: what is FREE is claimed by this node for ``claim_s``
        seconds, so that others find it TAKEN. A claim is a hint, never a promise: it ends by itself, and a write needs
        none. A tier that keeps no claims finds nothing TAKEN. Raises as ``probe``."""

    def takes(self, layout: ChunkLayout) -> bool:
        """Whether chunks of this size go there at all."""

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        """As for a local tier; one that is cancelled reads ``pieces`` no more once it has ended. Raises: Exhausted when
        the engine is full; PermissionDenied where this node may only read; Unavailable."""

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> StoredChunk | None:
        """None: it is not there. ``ahead``: the memory of the leading slabs, where these are read next: a tier may fill
        it in the same request, and ``read`` of these slabs into the same buffers then only checks them. It belongs to
        the chunk until that is closed. An open, or a read of what was opened, that is cancelled fills its target no
        more once it has ended. Raises: DataLoss when what is there is not that chunk; Unavailable."""

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        """What is not there is no error. Raises Unavailable."""

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        """These were used on this node, from a faster tier: where the engine drops what nobody uses, it is to keep
        them. What is not there is no error, and nothing is to be done where use changes nothing. Nobody waits for it:
        it may be done later, and fail unheard. May raise Unavailable."""

    def stalled_s(self) -> float:
        """As for a local tier."""

    async def close(self) -> None:
        """Idempotent."""

    def statistics(self) -> TierStatistics: ...


class WritePolicy(StrEnum):
    """When a chunk is written to a shared tier. BACK: at once; REUSE: at its second use; DEMOTE: when it is about to
    leave its last local tier; NEVER: not by itself. A store that asks for the tier's level goes at once, always."""

    BACK = "back"
    REUSE = "reuse"
    DEMOTE = "demote"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class SharedUse:
    """A shared tier, and how this node uses it: a lookup waits ``lookup_s_max`` seconds for it."""

    tier: SharedTier
    lookup_s_max: float
    write: WritePolicy = WritePolicy.BACK


class NotOurs(Unavailable):
    """A newer release, or another tenant, wrote what a tier was to use. Nothing was changed, and the start ends here:
    what is left as it is can be used by whoever wrote it."""


def check_header(name: ChunkName, header: ChunkHeader) -> ChunkHeader:
    """The place where a copy proves that it is the chunk that was asked for. Raises DataLoss."""
    if header.storage_key != name.storage_key:
        raise DataLoss("another chunk lies where this one should", reason="header")
    if name.mark is not None and write_mark(header.write_id) != name.mark:
        raise DataLoss("another write of the chunk lies where this one should", reason="write id")
    return header
