"""Reading opaque values: one by one, many at once, and whether they are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore.v1alpha import cache_pb2 as pb
from kvstore_client.arrays import destination
from kvstore_client.copying import Copier
from kvstore_client.prefix import Prefix, open_prefix
from kvstore_client.session import Session
from kvstore_client.value import CHUNK_BYTES, EXACT, HEAD, MAGIC, UNIT_BYTES, Key
from kvstore_client.wanted import Wanted

TRIES = 3
"""How often a read begins anew because the value was replaced under it."""


class Reader:
    """Reads values of one namespace in one session."""

    def __init__(self, session: Session, name: bytes, spec: ModelSpec, copier: Copier, timeout_s: float, verify: bool):
        self._session, self._name, self._copier, self._timeout_s = session, name, copier, timeout_s
        self._wanted = Wanted(spec, (), 0, None, (), verify)

    def _open(self, digests: list[bytes]) -> Prefix:
        """The leading ones of these chunks that are there, all of them in memory."""
        prefix = open_prefix(self._session, self._wanted, self._name, digests, EXACT, self._timeout_s)
        try:
            while prefix.is_arriving and prefix.advance():
                pass
        except BaseException:
            prefix.close()
            raise
        return prefix

    def _chunks(self, prefix: Prefix) -> list[Any]:
        """By position in the query. The first that is missing ends them."""
        step = self._wanted.spec.chunk_tokens
        found = {chunk.token_start // step: chunk for chunk in prefix.chunks}
        return [
            found[number] for number in range(len(found)) if number in found and all(k in found for k in range(number))
        ]

    def _copy(self, chunks: list[Any], skip: int, targets: list[NDArray[np.uint8]], prefix: Prefix) -> list[bool]:
        """Copy each chunk's bytes after ``skip`` into its target. Which of them are good."""
        bad: set[int] = set()

        def copy(batch: Sequence[tuple[Any, NDArray[np.uint8]]]) -> None:
            for chunk, target in batch:
                if self._wanted.verify and not chunk.is_intact(0, 0, None):
                    bad.add(id(chunk))
                np.copyto(target, chunk.slab(0)[skip : skip + target.size])

        self._copier.split(copy, list(zip(chunks, targets, strict=True)), self._timeout_s)
        good = prefix.settle(bad)
        return [chunk.token_start < good for chunk in chunks]

    def get(self, key: Key, into: NDArray[np.uint8] | None) -> NDArray[np.uint8] | None:
        """The whole value, or None."""
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

    def _get(self, key: Key, digest: bytes, into: NDArray[np.uint8] | None) -> tuple[NDArray[np.uint8] | None, bool]:
        """(value or None, whether to look again: it was replaced while it was read)."""
        prefix = self._open([digest])
        try:
            chunks = self._chunks(prefix)
            if not chunks:
                return None, False
            head = bytes(chunks[0].slab(0)[: HEAD.size])
            if prefix.settle(set()) == 0:
                return None, True
            magic, length, version = HEAD.unpack(head)
            room = chunks[0].layout.token_count * UNIT_BYTES - HEAD.size
            if magic != MAGIC or (digest == key.whole and length > room):
                return None, False
            target = _target(into, length)
            first = target[: min(room, length)]
            if not all(self._copy(chunks[:1], HEAD.size, [first], prefix)):
                return None, True
        finally:
            prefix.close()
        if digest == key.whole:
            return target, False
        return (target, False) if self._rest(key, version, target, first.size) else (None, True)

    def _rest(self, key: Key, version: bytes, target: NDArray[np.uint8], start: int) -> bool:
        count = -(-(HEAD.size + target.size) // CHUNK_BYTES)
        prefix = self._open(key.chain(version, count)[1:])
        try:
            chunks = self._chunks(prefix)
            if len(chunks) < count - 1:
                return False
            pieces = [target[at : at + CHUNK_BYTES] for at in range(start, target.size, CHUNK_BYTES)]
            return all(self._copy(chunks, 0, pieces, prefix))
        finally:
            prefix.close()

    def get_each(self, keys: Sequence[Key], targets: Sequence[NDArray[np.uint8]]) -> list[bool]:
        """Values of known sizes into their targets, one call for all that are there. A value of another size than its
        target's, or that is not there, is False; its target's bytes mean nothing then."""
        done = [False] * len(keys)
        start = 0
        while start < len(keys):
            prefix = self._open([key.whole for key in keys[start:]])
            try:
                chunks = self._chunks(prefix)
                heads = [HEAD.unpack(bytes(chunk.slab(0)[: HEAD.size])) for chunk in chunks]
                sizes = [target.size for target in targets[start : start + len(chunks)]]
                fit = [(head[0], head[1]) == (MAGIC, size) for head, size in zip(heads, sizes, strict=True)]
                wanted = [number for number, is_fit in enumerate(fit) if is_fit]
                good = self._copy(
                    [chunks[number] for number in wanted],
                    HEAD.size,
                    [targets[start + number] for number in wanted],
                    prefix,
                )
                for number, is_good in zip(wanted, good, strict=True):
                    done[start + number] = is_good
            finally:
                prefix.close()
            stop = start + len(chunks)
            if stop < len(keys):  # the one that is missing may be of several chunks
                found = self.get(keys[stop], targets[stop]) if targets[stop].size > CHUNK_BYTES - HEAD.size else None
                done[stop] = found is not None
            start = stop + 1
        return done

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each is there, whole."""
        found: list[bool] = []
        while len(found) < len(keys):
            count = self._hits([key.whole for key in keys[len(found) :]])
            found += [True] * count
            if len(found) < len(keys):
                found.append(self._has_parts(keys[len(found)]))
        return found

    def _hits(self, digests: list[bytes]) -> int:
        query = pb.ChainQuery(fingerprint=self._name, digests=b"".join(digests), exactness=EXACT)  # type: ignore[arg-type]
        reply = self._session.call(self._session.cache.Lookup, pb.LookupRequest(query=query), self._timeout_s)
        return int(reply.hit_count)

    def _has_parts(self, key: Key) -> bool:
        if not self._hits([key.first]):
            return False
        prefix = self._open([key.first])
        try:
            chunks = self._chunks(prefix)
            head = bytes(chunks[0].slab(0)[: HEAD.size]) if chunks else b""
            if not head or prefix.settle(set()) == 0:
                return False
        finally:
            prefix.close()
        magic, length, version = HEAD.unpack(head)
        count = -(-(HEAD.size + length) // CHUNK_BYTES)
        rest = key.chain(version, count)[1:]
        return bool(magic == MAGIC and self._hits(rest) == len(rest))


def _target(into: NDArray[np.uint8] | None, length: int) -> NDArray[np.uint8]:
    if into is None:
        return destination(length)
    if into.size != length:
        raise InvalidRequest(f"into has {into.size} bytes, the value {length}: give as much room as was put, or none")
    return into
