"""Copies in envelopes in a bucket that somebody else writes to, too."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvstore.errors import DataLoss, Exhausted
from kvstore.spec import ENVELOPES
from kvstore.tiers.s3 import S3Tier
from kvstore.tiers.s3.listing import examine, pages
from kvstore.tiers.s3.objects import object_key
from tests.contracts.chunks import LARGE, Chunk, chunk, layouts
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.scenario import scenario
from tests.tiers.attacks import BUCKET_COUNT, KEY, OLD, attacked, outcome_of, trust


def there(stand: S3Stand, what: Chunk) -> np.ndarray:
    return np.frombuffer(bytearray(stand.server.get(object_key(stand.settings, what.header.storage_key))), np.uint8)


async def put(tier: S3Tier, what: Chunk) -> Chunk:
    await tier.write(what.header, what.layout, what.pieces)
    return what


async def read(tier: S3Tier, what: Chunk) -> str:
    return await outcome_of(what, lambda each, memory: tier.open(each.name, memory))


@pytest.mark.parametrize("kind", ENVELOPES)
@scenario()
async def test_an_attacker_gets_a_wrong_byte_in_only_without_an_envelope(stand: S3Stand, kind: str) -> None:
    tier = tier_of(replace(stand.settings, timeout_s=30.0), trust(kind))  # ten thousand take their time

    async def get(what: Chunk) -> np.ndarray:
        return there(stand, await put(tier, what))

    async def set_to(what: Chunk, copy: np.ndarray) -> None:
        stand.put(what.header.storage_key, copy.tobytes())

    count = 70 if kind == "none" else BUCKET_COUNT
    is_ahead = itertools.cycle((True, True, False))  # read with the header, and by a request of its own
    outcomes = await attacked(
        get, set_to, lambda what, memory: tier.open(what.name, memory if next(is_ahead) else ()), count
    )
    assert (outcomes["wrong"] > 0) == (kind == "none"), outcomes
    await tier.close()


@pytest.mark.parametrize("kind", ENVELOPES)
@scenario()
async def test_chunks_of_any_shape_come_back(stand: S3Stand, kind: str) -> None:
    tier = tier_of(stand.settings, trust(kind))
    for number, layout in enumerate((*layouts().values(), LARGE)):
        what = await put(tier, chunk(number, layout))
        assert await read(tier, what) == "right"
        stored = await tier.open(what.name)
        assert stored is not None
        last = len(layout.slabs) - 1
        await stored.check(range(last, last + 1))
        target = np.zeros(layout.slabs[last].byte_count, np.uint8)
        await stored.read(range(last, last + 1), [target])
        assert (target == what.pieces[1 + last]).all()
    await tier.close()


@pytest.mark.parametrize("kind", ENVELOPES)
@scenario()
async def test_what_is_read_ahead_is_opened_once_and_only_where_it_lies(stand: S3Stand, kind: str) -> None:
    """A node that has keys expects a longer header than that of a copy without an envelope."""
    settings = replace(stand.settings, range_bytes=1 << 20)
    writer, reader = tier_of(settings, trust(kind)), tier_of(settings, trust("none", KEY))
    what = chunk(1, layouts()["kv many heads"])
    await put(writer, what)
    target = [np.full(slab.byte_count, 0x5A, np.uint8) for slab in what.layout.slabs]
    stored = await reader.open(what.name, target[:1])
    assert stored is not None
    for _ in range(2):
        await stored.read(range(1), target[:1])
        assert (target[0] == what.pieces[1]).all()
    await stored.read(range(1, len(target)), target[1:])
    assert all((one == other).all() for one, other in zip(target, what.pieces[1:], strict=True))
    for each in (writer, reader):
        await each.close()


@scenario()
async def test_keys_change_and_no_chunk_is_lost(stand: S3Stand) -> None:
    before, ours = tier_of(stand.settings, trust("aead", OLD)), trust("mac", KEY, OLD)
    tier = tier_of(stand.settings, ours)
    await put(before, chunk(1))
    assert await read(tier, chunk(1)) == "right"
    await put(tier, chunk(1))  # it is there, in an envelope that this node opens
    await put(tier, chunk(2))
    ours.ring.change((KEY,))
    assert await read(tier, chunk(2)) == "right"
    assert await read(tier, chunk(1)) == "miss"
    for each in (before, tier):
        await each.close()


@scenario()
async def test_what_others_sealed_is_a_miss_that_stays(stand: S3Stand) -> None:
    theirs = tier_of(stand.settings, trust("mac", OLD))
    others = [tier_of(stand.settings, trust("mac", KEY)), tier_of(stand.settings)]
    await put(theirs, chunk(1))
    before = there(stand, chunk(1))
    for tier in others:
        assert await read(tier, chunk(1)) == "miss"
        with pytest.raises(Exhausted, match="envelope key"):
            await put(tier, chunk(1))
    assert (there(stand, chunk(1)) == before).all()
    for each in (theirs, *others):
        await each.close()


@scenario()
async def test_what_has_no_envelope_is_refused_where_one_is_demanded_and_replaced(stand: S3Stand) -> None:
    tier = tier_of(stand.settings, trust("mac"))
    await stand.tier.write(chunk(1).header, chunk(1).layout, chunk(1).pieces)
    assert (there(stand, chunk(1)) == np.concatenate(chunk(1).pieces)).all(), "as ever"
    with pytest.raises(DataLoss, match="without an envelope"):
        await tier.open(chunk(1).name)
    await put(tier, chunk(1))
    assert await read(tier, chunk(1)) == "right"
    await tier.close()


@pytest.mark.parametrize("kind", ["mac", "aead"])
def test_a_scan_without_a_key_counts_them(stand: S3Stand, kind: str) -> None:
    tier = tier_of(stand.settings, trust(kind))

    async def scenario() -> None:
        await put(tier, chunk(1))
        await tier.close()

    stand.run(scenario)
    settings = replace(stand.settings, endpoint_url=stand.server.url)
    [(listed, _)] = list(pages(settings))
    for whole in (False, True):
        [found] = examine(settings, listed, whole=whole)
        assert found.header is not None, found.reason
        assert found.header.storage_key == chunk(1).header.storage_key
    broken = there(stand, chunk(1))
    broken[70] ^= 1
    stand.put(chunk(1).header.storage_key, broken.tobytes())
    [found] = examine(settings, listed, whole=False)
    assert found.header is None
