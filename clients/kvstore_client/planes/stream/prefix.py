"""A prefix that arrives in messages."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.seams import FaultPoints
from kvstore_client.copying import Copier
from kvstore_client.planes.prefix import Target, land, nothing
from kvstore_client.planes.stream.landing import StreamLanding
from kvstore_client.planes.stream.received import ReceivedPrefix
from kvstore_client.planes.stream.streamed import StreamedChunks


class StreamPrefix(StreamedChunks):
    """Streamed chunks that can be taken in each of the ways that a prefix is."""

    is_leased = True
    is_provisional = False
    """The server sends committed bytes only: it waits for the commit of a store in flight."""

    def copy_all(self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], timeout_s: float) -> None:
        """Copy every requested layer, message by message."""
        land(self.landing(target, copier, faults, bad, nothing), timeout_s)

    def landing(
        self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> StreamLanding:
        """Return copies that run on the thread that waits for the messages."""
        return StreamLanding(self, target, faults, bad, on_copied)

    def received(self) -> ReceivedPrefix:
        """Receive its chunks to the end, and return them."""
        return ReceivedPrefix(self)
