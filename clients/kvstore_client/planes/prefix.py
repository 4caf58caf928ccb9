"""What a plane says of a prefix that was asked for, and how its bytes come: the same on each plane."""

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
from kvstore_client.fetch.fused import Pair
from kvstore_client.fetch.wanted import Wanted

if TYPE_CHECKING:
    from kvstore_client.planes.shared_memory.chunk import MappedRun
    from kvstore_client.planes.stream.strips import Strips


class Target(Protocol):
    """Where a prefix goes. One plane has runs of chunks in memory, another one strips as messages bring them."""

    is_callers: bool
    """Whether the memory is the caller's own."""

    def layer(self, position: int, token_count: int) -> Layer:
        """A requested layer as the caller knows it."""

    def rows(self, layer: int, token_count: int) -> Tensor:
        """So many tokens of E of a requested hidden layer."""

    def places(self, token_count: int) -> tuple[Iterable[Tensor], NDArray[np.int64] | None]:
        """The memory of so many tokens: tensors, and of pages the slots in them."""

    def copy_layer(self, position: int, runs: Sequence[MappedRun], bad: set[int], faults: FaultPoints) -> None:
        """Copy one requested layer of each chunk. With verify, a chunk whose strips fail joins ``bad``."""

    def pairs(self, runs: Sequence[MappedRun]) -> list[Pair] | None:
        """All copies of the requested layers, for one pass. None where each layer has work of its own."""

    def copy_hidden(self, layer: int, runs: Sequence[MappedRun], bad: set[int]) -> None:
        """The same of E of a hidden layer."""

    def copy_strips(self, position: int, strips: Strips) -> None:
        """Copy strips of one requested layer."""

    def copy_hidden_strips(self, layer: int, strips: Strips) -> None:
        """The same of E of a hidden layer."""


class Landing(Protocol):
    """Copies of a prefix as it comes. ``layers``: of each requested layer the copies that run beside the caller."""

    layers: list[list[Future[None]]]

    def advance(self) -> bool:
        """Wait for news, and copy, or begin to copy, what it brought. False when no more will come."""

    @property
    def is_waiting(self) -> bool:
        """Whether something that is wanted has not come yet."""

    def has_landed(self, position: int) -> bool:
        """Whether all copies of a layer have been started."""

    def finish(self, timeout_s: float) -> None:
        """Wait for the copies. Raises DeadlineExceeded while one may still be running."""

    def stop(self, timeout_s: float) -> None:
        """Begin no more copies, wait for those that run, at most ``timeout_s`` s, and let go of all of them."""


class WholeChunk(Protocol):
    """A chunk all of whose bytes are at hand."""

    @property
    def token_start(self) -> int: ...

    @property
    def layout(self) -> ChunkLayout: ...

    def slab(self, index: int) -> Bytes:
        """The bytes of one slab."""

    def is_intact(self, index: int, head_start: int, head_stop: int | None) -> bool:
        """Whether the strips of a slab are what the header says."""


class Received(Protocol):
    """The leading chunks of a query that are there, whole."""

    @property
    def chunks(self) -> Sequence[WholeChunk]: ...

    def settle(self, bad: set[int]) -> int:
        """Leading tokens that are good (``bad``: ids of chunks)."""

    def close(self) -> None:
        """As ``Prefix.close``."""


class Prefix(Protocol):
    """A prefix that was asked for. Its chunks are there, or on their way, until it is closed or nobody has it.

    ``token_count``: how far it reaches; ``reason``: why no further. ``tails`` and ``tail_lengths``: what is said of the
    partial chunks behind it. ``is_provisional``: stores that some of it comes from have not been committed yet.
    """

    exactness: Exactness
    wanted: Wanted
    tier: Tier
    reason: MissReason
    token_count: int
    is_leased: bool
    """Whether none of it leaves before it is closed. Where not, what left under the copy is to be asked for."""

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
        """The same, layer by layer. ``on_copied`` is called after each copy."""

    def received(self) -> Received:
        """Its chunks, once all that come are here."""

    def settle(self, bad: set[int]) -> int:
        """Leading tokens whose copies are good (``bad``: ids of chunks). Where that is not all, ``reason`` says why."""

    def cancel(self) -> None:
        """Wait no longer for what is on its way. From any thread."""

    def abandon(self) -> None:
        """As ``cancel``, from a destructor."""

    def close(self) -> None:
        """Give the lease back, and wait for nothing that is on its way. Idempotent."""


def land(landing: Landing, timeout_s: float) -> None:
    """Bring all that is wanted, and wait for the copies."""
    try:
        while landing.is_waiting and landing.advance():
            pass  # each step says whether there is another
        landing.finish(timeout_s)
    except BaseException:
        landing.stop(timeout_s)
        raise


def nothing() -> None:
    """For who need not know of each copy."""
