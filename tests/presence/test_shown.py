"""Changes that no lookup of the simulation meets: what is forgotten, and copies that take another's place."""

from __future__ import annotations

import hashlib
import resource
from dataclasses import replace

import pytest

from kvstore.catalog import NOWHERE
from kvstore.keys import ROOT_DIGEST, fingerprint
from kvstore.movement.removal import Removal
from kvstore.presence import SLOTS_MIN, find, tags_of, unpack_news
from kvstore.seams import SystemMemory
from kvstore.spec import Encoding, Exactness, MissReason, Provenance, Tier
from kvstore.telemetry import Counters
from tests.catalog.shelves import put as shelve
from tests.catalog.shelves import shelved_catalog
from tests.presence.shown import difference, words_of
from tests.specs import small_spec

RAW, LZ4 = Encoding.RAW << 56, Encoding.LZ4 << 56


def test_a_reason_that_is_too_long_ago_is_not_shown_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.catalog.namespace.DEPARTURE_COUNT_MAX", 3)
    catalog = shelved_catalog()
    space = catalog.register(small_spec()).namespace(None, Exactness.EXACT)
    for number in range(8):
        catalog.depart(space, bytes([number]) * 32, MissReason.EVICTED)
    assert difference(catalog) == ""
    assert catalog.presence.known().size == 3


async def test_a_copy_that_takes_the_place_of_a_damaged_one_is_shown_as_it_is_encoded() -> None:
    catalog = shelved_catalog()
    space = catalog.register(small_spec()).namespace(None, Exactness.EXACT)
    device, removal = catalog.table.copies[1], Removal(catalog, Counters())
    row = catalog.row_of(space, b"a" * 32, ROOT_DIGEST, 16)
    device.put(row, RAW | 1)
    catalog.publish(row)
    device.put_spare(row, LZ4 | 2, 7, is_proven=False)
    await removal.quarantine(device, row, RAW | 1)
    assert (device.residency(row), device.is_proven(row), catalog.table.write_marks[row]) == (LZ4 | 2, False, 7)
    assert difference(catalog) == ""
    assert unpack_news(catalog.spaces.news(space, b"a" * 32)).encoding is Encoding.LZ4


def test_why_chunks_of_a_model_nobody_named_yet_went_is_shown_once_it_is_named() -> None:
    catalog, spec = shelved_catalog(), small_spec()
    space = catalog.spaces.get(fingerprint(spec, spec.kind), Provenance.IN_CONTEXT, Exactness.EXACT)
    for name in (b"a", b"b"):
        row = catalog.row_of(space, name * 32, ROOT_DIGEST, 16)
        shelve(catalog, row, RAW | 1)
        catalog.publish(row)
    shelve(catalog, row, NOWHERE)
    catalog.withdraw(row, MissReason.EVICTED, Tier.NVME)
    assert catalog.presence.known().size == 0
    catalog.register(spec)
    assert difference(catalog) == ""
    assert catalog.presence.known().size == 2


def test_partial_chunks_of_a_model_nobody_named_yet_are_shown_at_once_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else is answered meanwhile, so nothing is put one by one of what hangs on each chunk."""
    catalog, spec = shelved_catalog(), replace(small_spec(), chunk_tokens=256)
    space = catalog.spaces.get(fingerprint(spec, spec.kind), Provenance.IN_CONTEXT, Exactness.EXACT)
    numbers = iter(range(1 << 20))

    def recovered(parent: bytes, token_count: int) -> bytes:
        digest = hashlib.sha256(next(numbers).to_bytes(4, "little")).digest()
        row = catalog.row_of(space, digest, parent, token_count)
        shelve(catalog, row, RAW | row)
        catalog.publish(row)
        return digest

    for number in range(200):
        parent = recovered(ROOT_DIGEST, 256)
        for token_count in {1 + number, 12, 255}:
            recovered(parent, token_count)
    gone = recovered(ROOT_DIGEST, 7)
    recovered(gone, 9)
    row = space.index[gone]
    shelve(catalog, row, NOWHERE)
    catalog.withdraw(row, MissReason.EVICTED, Tier.NVME)
    puts: list[int] = []
    put = catalog.presence.put

    def counted(tag: int, news: int) -> None:
        puts.append(tag)
        put(tag, news)

    monkeypatch.setattr(catalog.presence, "put", counted)
    catalog.register(spec)
    assert difference(catalog) == ""
    assert len(puts) < 10


def test_a_chunk_is_published_whole_where_no_descriptor_is_left() -> None:
    """The table must grow and cannot: the catalog is as it should be, and lookups are calls until it can."""
    catalog = shelved_catalog(SystemMemory())
    space = catalog.register(small_spec()).namespace(None, Exactness.EXACT)
    digests = [hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(SLOTS_MIN)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those that are open stay
    try:
        for digest in digests:
            row = catalog.row_of(space, digest, ROOT_DIGEST, 16)
            shelve(catalog, row, 7)
            catalog.publish(row)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(space.index) == len(catalog.table) == len(digests)
    assert space.byte_count == len(digests) * space.chunk_bytes(16)
    found = find(words_of(catalog.presence), tags_of(space.salt, b"".join(digests)))
    assert found is not None
    assert not found.is_whole, "what is not there may be stored: a client calls"
    for number in range(SLOTS_MIN):
        catalog.depart(space, number.to_bytes(32, "little"), MissReason.EVICTED)
    assert difference(catalog) == "", "all of it, once there is room"
