"""What the presence table shows, held against the catalog it is written by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kvstore_client.lookup.presence import LookupAnswer, answer_of, answer_of_few

from kvstore.catalog import Catalog, Namespace
from kvstore.catalog.spaces import parent_digest
from kvstore.controller import LookupResult
from kvstore.keys import ROOT_DIGEST
from kvstore.presence import (
    LENGTHS_PER_WORD,
    NEWS_MASK,
    TAG_MASK,
    PresenceTable,
    Words,
    find,
    lengths_tag,
    tag_of,
    tags_of,
    unpack_news,
)


def difference(catalog: Catalog) -> str:
    """What the table says otherwise than the catalog, or holds of what the catalog does not know; empty: nothing."""
    expected: dict[int, int] = {}
    for space in catalog.spaces.numbered:
        if space.is_looked_up:
            for digest in {*space.index, *space.pending, *space.departures, *space.tails}:
                expected[tag_of(space.salt, digest)] = catalog.spaces.news(space, digest)
            for row in space.index.values():
                count = catalog.table.token_counts[row]
                if space.is_tail(count):
                    tag = lengths_tag(space.salt, parent_digest(catalog.table, row), count // LENGTHS_PER_WORD)
                    expected[tag] = expected.get(tag, 0) | 1 << count % LENGTHS_PER_WORD
    words = catalog.presence.known().tolist()
    shown = {word & TAG_MASK: word & NEWS_MASK for word in words}
    if len(shown) != len(words):
        return f"{len(words) - len(shown)} chunks are shown twice"
    for tag in {*expected, *shown}:
        if expected.get(tag, 0) != shown.get(tag, 0):
            said, true = unpack_news(shown.get(tag, 0)), unpack_news(expected.get(tag, 0))
            return f"the presence table says {said} where the catalog has {true}"
    return ""


def words_of(table: PresenceTable) -> Words:
    """What clients read."""
    return table.mapping.bytes.view(np.uint64)


def answer(catalog: Catalog, space: Namespace, digests: Sequence[bytes]) -> LookupAnswer:
    """What a client makes of the table. It must be able to tell."""
    found = find(words_of(catalog.presence), tags_of(space.salt, b"".join([ROOT_DIGEST, *digests])))
    assert found is not None
    assert found.is_whole
    few = answer_of_few(tuple(found.news.tolist()))
    assert few == answer_of(found.news)
    return few


def is_the_same(seen: LookupAnswer, said: LookupResult) -> bool:
    """Return True when a client sees what a lookup says."""
    runs = [(run.count, run.state, run.tier, run.encoding, run.reason) for run in seen.runs]
    told = [(run.chunk_count, run.state, run.tier, run.encoding, run.reason) for run in said.runs]
    return (seen.hit_count, runs, seen.has_tails) == (said.hit_count, told, bool(said.tails or said.tail_lengths))
