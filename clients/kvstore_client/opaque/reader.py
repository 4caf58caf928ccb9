"""Reads opaque values, one by one or many at once, and checks that they exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import presence_salt
from kvstore.spec import Exactness, MissReason, ModelSpec, Provenance
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import destination
from kvstore_client.copying import Copier, stopped, wait_all
from kvstore_client.fetch.open import open_prefix
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName
from kvstore_client.opaque.value import CHUNK_BYTES, HEAD, Head, Key, Pieces, room_of
from kvstore_client.planes.prefix import Received, WholeChunk
from kvstore_client.planes.session import ClientSession
from kvstore_client.prompt import EXACT

BATCH = 256
"""The most keys in one call: a call with many keys delays the sidecar's other clients."""
LARGE_BATCH = 64
"""The most chunks of values of several in one call: a client of another host has all of them in memory before it copies
any."""
FIRST_BYTES = CHUNK_BYTES - HEAD.size
"""The bytes of a value in the first of several chunks; a smaller value is in one."""
TRIES = 3
"""The most attempts at a read whose value is replaced meanwhile."""


class Destination(NamedTuple):
    """The place that a chunk's bytes are copied to. ``skip``: bytes of the chunk before them; ``start``: their place in
    the target."""

    skip: int
    target: Pieces
    start: int
    byte_count: int


class Reader:
    """Reads values of one namespace in one session."""

    def __init__(
        self, session: ClientSession, name: bytes, spec: ModelSpec, copier: Copier, timeout_s: float, verify: bool
    ):
        self._session, self._name, self._copier, self._timeout_s = session, name, copier, timeout_s
        self._wanted = Wanted(spec, (), 0, None, (), verify)

    def _open(self, digests: list[bytes]) -> Received:
        """Open the leading chunks of these that are stored, all of them in memory: the sidecar's, or received."""
        prefix = open_prefix(self._session, self._wanted, ChainName(self._name, EXACT, 0), digests, self._timeout_s)
        try:
            return prefix.received()
        except BaseException:
            prefix.close()
            raise

    def _chunks(self, prefix: Received) -> list[WholeChunk]:
        """Return the chunks by position in the query, up to the first that is missing."""
        step = self._wanted.spec.chunk_tokens
        found = {chunk.token_start // step: chunk for chunk in prefix.chunks}
        return [found[number] for number in takewhile(found.__contains__, range(len(found)))]

    def _copy(self, prefix: Received, work: Sequence[tuple[WholeChunk, int, Pieces, int, int]]) -> list[bool]:
        """Copy each (chunk, bytes to skip in it, target, start in the target, byte count). Returns True for each that
        is good. However it ends, nothing is written afterwards: after a miss the caller may put something else
        there."""
        bad: set[int] = set()
        is_over = False

        def copy(batch: Sequence[tuple[WholeChunk, int, Pieces, int, int]]) -> None:
            for chunk, skip, target, start, count in batch:
                if is_over:
                    return
                if self._wanted.verify and not chunk.is_intact(0, 0, None):
                    bad.add(id(chunk))
                source = chunk.slab(0)[skip : skip + count]
                for part, place in target.parts(start, count):
                    np.copyto(part, source[place : place + part.size])

        if work:
            halves = self._copier.halves(copy, work)
            try:
                wait_all(halves, self._timeout_s)
            except BaseException:
                is_over = True
                stopped(halves, None)  # each has at most one chunk left
                raise
        good = prefix.settle(bad)
        return [chunk.token_start < good for chunk, *_ in work]

    def get(self, key: Key, into: Pieces | None) -> Pieces | None:
        """Return the whole value, or None."""
        for _ in range(TRIES):
            for digest in (key.whole, key.first):
                found, again = self._get(key, digest, into)
                if found is not None:
                    return found
                if again:
                    break
            else:
                return None
        return None

    def _get(self, key: Key, digest: bytes, into: Pieces | None) -> tuple[Pieces | None, bool]:
        """Return (value or None, True to look again because it was replaced while it was read). The target is allocated
        once all chunks are there: at most a chunk's size for each. The first chunk's version names the others, so that
        all are of one put, though a large value is leased in runs."""
        prefix = self._open([digest])
        try:
            chunks = self._chunks(prefix)
            if not chunks:
                return None, False
            head = Head.of(chunks[0], is_whole=digest == key.whole)
            if prefix.settle(set()) == 0:
                return None, True
            if head is None:
                return None, False
            if not self._are_there(key, head):
                return None, True
            target = _target(into, head.size)
            if not all(self._copy(prefix, [(chunks[0], HEAD.size, target, 0, min(head.size, FIRST_BYTES))])):
                return None, True
        finally:
            prefix.close()
        return (target, False) if all(self._have_rest([(key, head, target)])) else (None, True)

    def _are_there(self, key: Key, head: Head) -> bool:
        """Return True when every chunk after a value's first is stored. The first missing one ends the search, whatever
        length the value claims."""
        starts = range(1, head.chunk_count, BATCH)
        batches = (range(start, min(start + BATCH, head.chunk_count)) for start in starts)
        return all(all(self._found(key.parts(head.version, batch))) for batch in batches)

    def get_each(self, keys: Sequence[Key], targets: Sequence[Pieces]) -> list[bool]:
        """Fetch values of known sizes into their targets, many chunks in one call (``BATCH``, ``LARGE_BATCH``). A value
        that is not stored, or of another size than its target, is False; its target's bytes are then
        undefined."""
        done = [False] * len(keys)
        for in_parts, get in ((False, self._get_whole_ones), (True, self._get_ones_in_parts)):
            some = [number for number, each in enumerate(targets) if (each.size > FIRST_BYTES) == in_parts]
            found = get([keys[number] for number in some], [targets[number] for number in some])
            for number, is_good in zip(some, found, strict=True):
                done[number] = is_good
        return done

    def _get_whole_ones(self, keys: Sequence[Key], targets: Sequence[Pieces]) -> list[bool]:
        """``get_each`` for values of one chunk."""

        def place(number: int, chunk: WholeChunk) -> Destination | None:
            head, target = Head.of(chunk, is_whole=True), targets[number]
            is_it = head is not None and head.size == target.size
            return Destination(HEAD.size, target, 0, target.size) if is_it else None

        return self._copied([key.whole for key in keys], place, BATCH)

    def _get_ones_in_parts(self, keys: Sequence[Key], targets: Sequence[Pieces]) -> list[bool]:
        """``get_each`` for values of several chunks. A first chunk's version names the others, so that all are of one
        put."""
        heads: dict[int, Head] = {}

        def first(number: int, chunk: WholeChunk) -> Destination | None:
            head, target = Head.of(chunk, is_whole=False), targets[number]
            if head is None or head.size != target.size:
                return None
            heads[number] = head
            return Destination(HEAD.size, target, 0, FIRST_BYTES)

        done = self._copied([key.first for key in keys], first, LARGE_BATCH)
        good = [number for number, is_good in enumerate(done) if is_good]
        have_rest = self._have_rest([(keys[number], heads[number], targets[number]) for number in good])
        for number, is_good in zip(good, have_rest, strict=True):
            done[number] = is_good
        return done

    def _have_rest(self, values: Sequence[tuple[Key, Head, Pieces]]) -> list[bool]:
        """Copy what follows each value's first chunk into its target. Returns True for each of which all is good."""
        parts = [(number, part) for number, (_, head, _) in enumerate(values) for part in range(1, head.chunk_count)]
        digests = [each for key, head, _ in values for each in key.parts(head.version, range(1, head.chunk_count))]

        def place(number: int, chunk: WholeChunk) -> Destination | None:
            owner, part = parts[number]
            target, start = values[owner][2], part * CHUNK_BYTES - HEAD.size
            count = min(CHUNK_BYTES, target.size - start)
            return Destination(0, target, start, count) if room_of(chunk) >= count else None

        done = [True] * len(values)
        for (owner, _), is_good in zip(parts, self._copied(digests, place, LARGE_BATCH), strict=True):
            done[owner] = done[owner] and is_good
        return done

    def _copied(
        self, digests: list[bytes], place: Callable[[int, WholeChunk], Destination | None], at_once: int
    ) -> list[bool]:
        """Copy each of these chunks that is there to the place that ``place`` says for its number. Returns True for
        each that has one and is good. Asks for ``at_once`` at a time, and for fewer where they exceed the limit on
        leases, or memory has no room for all of them."""
        done, start, most = [False] * len(digests), 0, at_once
        while start < len(digests):
            batch = digests[start : start + most]
            if most < at_once:  # there is room for few: what was read gives way first
                self._session.returns.settle(self._timeout_s)
            try:
                prefix = self._open(batch)
            except Exhausted:
                if len(batch) == 1:
                    raise
                most = len(batch) // 2
                continue
            try:
                chunks, reason = self._chunks(prefix), prefix.reason
                places = [(number, chunk, place(number, chunk)) for number, chunk in enumerate(chunks, start)]
                work = [(number, (chunk, *each)) for number, chunk, each in places if each is not None]
                good = self._copy(prefix, [each for _, each in work])
                for (number, _), is_good in zip(work, good, strict=True):
                    done[number] = is_good
            finally:
                prefix.close()
            start += len(chunks)
            if reason is MissReason.OVERLOADED and len(batch) > 1:  # the next one may be there, in a tier
                most = len(chunks) or len(batch) // 2
            elif len(chunks) < len(batch):
                start += 1  # the one after the last that came is not there
        return done

    def count_leading(self, keys: Sequence[str | bytes]) -> int:
        """Return the number of leading keys whose value is stored, whole. Digests no more keys than it looks up: an
        engine asks for all pages of a prompt, of which most often none is there. Raises as ``Key.of``."""
        for start in range(0, len(keys), BATCH):
            found = self.exists([Key.of(key) for key in keys[start : start + BATCH]])
            if not all(found):
                return start + found.index(False)
        return len(keys)

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return, per key, True when its value is stored, whole."""
        found = self._found([key.whole for key in keys])
        others = [number for number, is_there in enumerate(found) if not is_there]
        begun = self._found([keys[number].first for number in others])
        some = [number for number, is_there in zip(others, begun, strict=True) if is_there]
        for number, is_there in zip(some, self._have_parts([keys[number] for number in some]), strict=True):
            found[number] = is_there
        return found

    def _found(self, digests: list[bytes]) -> list[bool]:
        """Return, per chunk, True when it is stored."""
        if digests and self._session.presence is not None:
            salt = presence_salt(self._name, Provenance.IN_CONTEXT, Exactness.EXACT)
            seen = self._session.presence.holds(salt, digests)
            if seen is not None:
                return seen
        found: list[bool] = []
        while len(found) < len(digests):
            found += self._called(digests[len(found) : len(found) + BATCH])
        return found

    def _called(self, digests: list[bytes]) -> list[bool]:
        """Ask by a call which chunks are stored. An older sidecar looks up one chain at a time, and answers for the
        first chunk only."""
        exactness: Any = EXACT  # the wire's number
        first, *rest = (pb.ChainQuery(fingerprint=self._name, digests=each, exactness=exactness) for each in digests)
        request = pb.LookupRequest(query=first, segments=rest)
        reply = self._session.call(self._session.cache.Lookup, request, self._timeout_s)
        return [each.hit_count == 1 for each in (reply, *reply.segments)]

    def _have_parts(self, keys: Sequence[Key]) -> list[bool]:
        """Return, per key, True when its value of several chunks, whose first chunk is stored, is whole."""
        heads: dict[int, Head] = {}

        def look(number: int, chunk: WholeChunk) -> Destination | None:
            head = Head.of(chunk, is_whole=False)
            if head is None:
                return None
            heads[number] = head
            return Destination(0, Pieces([]), 0, 0)

        good = self._copied([key.first for key in keys], look, LARGE_BATCH)
        return [each and self._are_there(keys[number], heads[number]) for number, each in enumerate(good)]


def _target(into: Pieces | None, length: int) -> Pieces:
    if into is None:
        return Pieces([destination(length)])
    if into.size != length:
        raise InvalidRequest(f"into has {into.size} bytes, the value {length}: give as much room as was put, or none")
    return into
