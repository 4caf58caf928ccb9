"""The interface of a prefix that was asked for, and of its copies: the same on each plane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkLayout
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore.spec import Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import Layer, Tensor
from kvstore_client.copying import Copier
from kvstore_client.fetch.fused import Fused
from kvstore_client.fetch.wanted import Wanted

if TYPE_CHECKING:
    from kvstore_client.planes.shared_memory.chunk import MappedRun
    from kvstore_client.planes.stream.strips import Strips


LandedRange = Callable[[range], bool]
"""Is told the positions of layers that have come; returns False when no more are wanted."""


class Target(Protocol):
    """The destination of a prefix. The shared-memory plane copies runs of chunks into it; the stream plane, strips of
    messages."""

    is_callers: bool
    """True when the memory is the caller's own."""

    def layer(self, position: int, token_count: int) -> Layer:
        """Return a requested layer in the caller's form."""

    def layers(self, token_count: int) -> Iterable[Layer]:
        """Return all requested layers in the caller's form."""

    def rows(self, layer: int, token_count: int) -> Tensor:
        """Return the first ``token_count`` tokens of E of a requested hidden layer."""

    def places(self, token_count: int) -> tuple[Iterable[Tensor], NDArray[np.int64] | None]:
        """Return the memory of the first ``token_count`` tokens: tensors, and for pages the slots in them."""

    def copy_layer(self, position: int, runs: Sequence[MappedRun], bad: set[int], faults: FaultPoints) -> None:
        """Copy one requested layer of each chunk. With verify, a chunk whose strips fail joins ``bad``."""

    def fused(self, runs: Sequence[MappedRun], positions: range | None = None) -> Fused | None:
        """Return all copies of the requested layers, or those at ``positions``, for one pass. None where each layer has
        work of its own."""

    def in_turn(
        self, runs: Sequence[MappedRun], positions: Sequence[range], faults: FaultPoints, landed: LandedRange
    ) -> Callable[[], None] | None:
        """Return a call that copies ranges of requested layers one after the other, and tells ``landed`` each that has
        come, until it returns False. None where the layers' copies are made side by side."""

    def copy_hidden(self, layer: int, runs: Sequence[MappedRun], bad: set[int]) -> None:
        """Copy E of a hidden layer, as ``copy_layer`` does."""

    def copy_strips(self, position: int, strips: Strips) -> None:
        """Copy strips of one requested layer."""

    def copy_hidden_strips(self, layer: int, strips: Strips) -> None:
        """Copy strips of E of a hidden layer."""


class Landing(Protocol):
    """Copies of a prefix as it comes. ``layers``: per requested layer, the copies that run beside the caller; one copy
    may be of several layers."""

    layers: list[list[Future[None]]]

    def advance(self) -> bool:
        """Wait for news, and copy, or begin to copy, the bytes it brought. Returns False when no more will come."""

    @property
    def is_waiting(self) -> bool:
        """True while wanted bytes have not come yet."""

    def has_landed(self, position: int) -> bool:
        """Return True when all copies of a layer have been started."""

    def finish(self, timeout_s: float) -> None:
        """Wait for the copies. Raises DeadlineExceeded while one may still be running."""

    def stop(self, timeout_s: float) -> None:
        """Begin no more copies, wait for those that run, at most ``timeout_s`` s, and drop all of them."""


class WholeChunk(Protocol):
    """A chunk with all of its bytes in this process."""

    @property
    def token_start(self) -> int: ...

    @property
    def layout(self) -> ChunkLayout: ...

    def slab(self, index: int) -> Bytes:
        """Return the bytes of one slab."""

    def is_intact(self, index: int, head_start: int, head_stop: int | None) -> bool:
        """Return True when the strips of a slab match the header's checksums."""


class Received(Protocol):
    """The leading chunks of a query that are stored, whole."""

    @property
    def chunks(self) -> Sequence[WholeChunk]: ...

    @property
    def reason(self) -> MissReason:
        """Return why they are no more."""

    def settle(self, bad: set[int]) -> int:
        """Return the number of leading tokens that are good (``bad``: ids of chunks)."""

    def close(self) -> None:
        """See ``Prefix.close``."""


class Prefix(Protocol):
    """A prefix that was asked for. Its chunks are in memory, or on their way there, until it is closed or garbage.

    ``token_count``: its length in tokens; ``reason``: why no longer. ``tails`` and ``tail_lengths``: the partial chunks
    that may follow it. ``is_provisional``: some of it comes from stores that are not committed yet.
    """

    exactness: Exactness
    wanted: Wanted
    tier: Tier
    reason: MissReason
    token_count: int
    is_leased: bool
    """True when a lease keeps all of it in memory until it is closed. Without a lease, chunks that left under the copy
    must be asked for again."""

    @property
    def tails(self) -> Sequence[pb.PartialTail]: ...

    @property
    def tail_lengths(self) -> bytes: ...

    @property
    def is_provisional(self) -> bool: ...

    def copy_all(self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], timeout_s: float) -> None:
        """Copy every requested layer. A chunk that fails its checksums joins ``bad``."""

    def landing(
        self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> Landing:
        """Return copies of the requested layers, layer by layer. ``on_copied`` is called after each copy."""

    def received(self) -> Received:
        """Return its chunks, once all that come have come."""

    def settle(self, bad: set[int]) -> int:
        """Return the number of leading tokens whose copies are good (``bad``: ids of chunks). Sets ``reason`` when that
        is not all of them."""

    def cancel(self) -> None:
        """Stop waiting for bytes on their way. From any thread."""

    def abandon(self) -> None:
        """Cancel from a destructor."""

    def close(self) -> None:
        """Give the lease back, without waiting for bytes on their way. Idempotent."""


def land(landing: Landing, timeout_s: float) -> None:
    """Bring all that is wanted, and wait for the copies."""
    try:
        while landing.is_waiting and landing.advance():
            pass  # until ``advance`` says that no more will come
        landing.finish(timeout_s)
    except BaseException:
        landing.stop(timeout_s)
        raise


def nothing() -> None:
    """Do nothing."""
