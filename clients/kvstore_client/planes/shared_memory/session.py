"""A session by shared memory: opens prefixes, with a call or without one, and begins stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.errors import Unavailable
from kvstore.handoff.messages import Redeemed
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.copying import Copier
from kvstore_client.fetch.ticket import TicketFields
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName, LookupAnswer
from kvstore_client.planes.incoming import opened
from kvstore_client.planes.returns import Returns
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.mapped import MappedMemory
from kvstore_client.planes.shared_memory.placed import PlacedPrefix, placed_prefix
from kvstore_client.planes.shared_memory.prefix import MappedPrefix
from kvstore_client.planes.shared_memory.store import StagedUpload
from kvstore_client.planes.shared_memory.warm import WarmPrefix, warm_prefix
from kvstore_client.planes.store import StoreSource
from kvstore_client.prompt import EXACTNESSES


class MappedSession(MappedMemory):
    """A session whose chunks lie in memory that both processes map."""

    maps_chunks = True

    def open_prefix(
        self, wanted: Wanted, request: pb.FetchRequest, digests: list[bytes], timeout_s: float
    ) -> MappedPrefix:
        """Open a prefix by a stream: the first message names the chunks' places, the later ones report arrivals."""
        if self.pool_for(wanted) is not None:
            request.on_device = True
        stream, response = opened(self, self.cache.Fetch, request, timeout_s, self._lease)
        prefix = MappedPrefix(self, wanted, response, digests, stream, EXACTNESSES[request.query.exactness])
        if self._is_told and prefix.was_in_memory:
            query = request.query
            name = ChainName(query.fingerprint, query.exactness, query.provenance)
            self.warm.note(name, digests, [each for each in prefix.chunks if each.part == 0], wanted.spec.chunk_tokens)
        return prefix

    def _lease(self, response: pb.FetchResponse) -> Callable[[], object]:
        return partial(self.returns.lease, response.lease_id)

    def open_warm(
        self, wanted: Wanted, name: ChainName, digests: Sequence[bytes], seen: LookupAnswer
    ) -> WarmPrefix | None:
        """Open a prefix from places known from earlier fetches, and shared memory. None for a sidecar that takes no
        reports of use: it would not know that the chunks are used."""
        if not self._is_told:
            return None
        return warm_prefix(self, wanted, name, digests, seen, partial(self._note_use, name, digests))

    def _note_use(self, name: ChainName, digests: Sequence[bytes], chunks: Sequence[Chunk]) -> None:
        """Report a fetch without a call, which brought these chunks."""
        if self.presence is not None:
            byte_count = sum([chunk.layout.total_bytes for chunk in chunks])
            hits, misses = len(chunks), len(digests) - len(chunks)
            token_count = chunks[-1].token_start + chunks[-1].layout.token_count
            self.presence.use(name, digests[hits - 1], token_count)
            self.presence.count(fetch_calls=1, fetch_hit_chunks=hits, fetch_miss_chunks=misses, fetch_bytes=byte_count)

    def open_placed(self, wanted: Wanted, held: TicketFields) -> PlacedPrefix | None:
        """Open the prefix of a ticket from its places. The sidecar is told when it has been copied. None where a call
        is needed, and where the bytes go to the device of the pool: a call says what lies there."""
        if self.pool_for(wanted) is not None:
            return None
        say = partial(self._say, Redeemed(held.ticket.hex()))
        return placed_prefix(self, wanted, held, partial(_said_soon, say, self.returns))

    def upload(self, source: StoreSource, copier: Copier, timeout_s: float) -> StagedUpload:
        """Return an upload by staging, which the sidecar reads."""
        return StagedUpload(self, source, copier, timeout_s)


def _said_soon(say: Callable[[], bool], returns: Returns) -> None:
    """Say it now, or beside the caller as soon as the sidecar takes it: unsaid, it would keep a ticket open until that
    is too old."""
    if not say():
        returns.soon(partial(_said, say))


def _said(say: Callable[[], bool]) -> None:
    if not say():
        raise Unavailable("the sidecar takes no packets now")
