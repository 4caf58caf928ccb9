"""What the S3 tier does with what lies in a bucket. By threads of this process, against a real server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import layout_of, making
from kvstore.errors import DataLoss, Exhausted, PermissionDenied
from kvstore.seams import SystemClock, WorkerThreads
from kvstore.spec import CacheKind, Encoding, LayerSpec
from kvstore.tiers.s3 import Lanes, S3Tier, writing
from kvstore.tiers.s3.reading import read_object
from tests.contracts.chunks import SMALL, Chunk, chunk
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.contracts.shared.stands import found, write
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.s3.objects import bytes_of, gets, newer, put_bytes, there, with_header

ALTERATIONS = 10_000 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 250

AT_ONCE = 8


def altered(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    """What a store, an operator or an attacker may make of an object."""
    changed = bytearray(data)
    place = int(random.integers(len(data)))
    match int(random.integers(9)):
        case 0 | 1 | 2:
            changed[place] ^= 1 << int(random.integers(8))
        case 3:
            del changed[place:]
        case 4:
            changed = bytearray(other)
        case 5:
            changed = bytearray(newer(data))
        case 6:
            changed = bytearray(with_header(data, 8, 0))
        case 7:
            changed[place:] = bytes(len(data) - place)
        case _:
            changed += other[:place]
    return bytes(changed)


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.LZ4])
@scenario()
async def test_no_altered_object_gives_a_wrong_byte(
    stand: S3Stand, encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``found`` fails on any other byte. What is right all the same was altered where no strip lies."""
    monkeypatch.setattr(making, "SAVES_MIN", -1.0)
    tier = tier_of(replace(stand.settings, timeout_s=30.0))  # ten thousand take their time

    async def one(number: int, limit: asyncio.Semaphore) -> str:
        random = np.random.default_rng((5, number))
        what = chunk(number)
        async with limit:
            data = altered(bytes_of(what, encoding), bytes_of(chunk(number + 1), encoding), random)
            await asyncio.to_thread(put_bytes, stand, what, data)
            try:
                return "given" if await found(tier, what) else "miss"
            except DataLoss as error:
                return str(error.fields["reason"])

    limit = asyncio.Semaphore(AT_ONCE)
    outcomes = Counter(await asyncio.gather(*(one(number, limit) for number in range(ALTERATIONS))))
    print(outcomes)
    assert outcomes.total() == ALTERATIONS
    assert 0 < outcomes["given"] < ALTERATIONS // 4
    assert {"checksum", "header", "truncated", "miss"} <= set(outcomes), outcomes
    await tier.close()


@scenario()
async def test_what_is_damaged_is_replaced_and_what_is_right_adopted(stand: S3Stand) -> None:
    what, other = chunk(1), chunk(1, write=2)
    await write(stand.tier, what)
    await write(stand.other, other)
    assert there(stand, what) == bytes_of(what), "it was adopted"
    assert stand.other.statistics().written_bytes == 0
    for damaged in (b"", bytes_of(what)[:-1], bytes_of(chunk(2)), b"\0" + bytes_of(what)[1:], bytes(5)):
        put_bytes(stand, what, damaged)
        with pytest.raises(DataLoss):
            await found(stand.other, what)
        gets(stand)
        await write(stand.other, other)
        assert there(stand, what) == bytes_of(other)
        put_count = sum(method == "PUT" for method, _, _ in stand.switches.asked)  # Ceph's refuses the first
        if len(damaged) > SMALL.header_bytes:
            head = f"bytes=0-{SMALL.header_bytes - 1}"
            assert gets(stand) == [head] * put_count, "its header and its length tell: no body is read"


@scenario()
async def test_a_strip_that_failed_its_check_is_put_right_by_the_node_that_read_it(stand: S3Stand) -> None:
    what = chunk(1)
    await write(stand.tier, what)
    for is_read in (True, False):  # a level would be promised on what is only looked at
        stand.flip(what.header.storage_key, what.layout.header_bytes + 7)
        if is_read:
            with pytest.raises(DataLoss):
                await found(stand.tier, what)
        await write(stand.tier, what)
        assert await found(stand.other, what)
    await write(stand.tier, what)
    assert stand.tier.statistics().written_bytes == 3 * SMALL.total_bytes, "twice more, and no more"


@scenario()
async def test_what_is_damaged_is_replaced_where_no_etag_ever_matches(stand: S3Stand) -> None:
    what = chunk(1)
    stand.switches.never_matches = True
    put_bytes(stand, what, bytes_of(what)[:-1])
    await write(stand.tier, what)
    assert there(stand, what) == bytes_of(what)
    conditions = [headers.get("If-Match") for method, _, headers in stand.switches.asked if method == "PUT"]
    assert [bool(each) for each in conditions] == [True, False]


class Recorded(WorkerThreads):
    """Knows the slabs that its jobs read to check them."""

    def __init__(self) -> None:
        super().__init__(1, "recorded")
        self.checked: list[list[int]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        if function is read_object:
            assert not args[-1].target
            self.checked.append(sorted(set(args[-1].strips[0].layers.tolist())))
        return super().submit(function, *args)


@scenario()
async def test_a_copy_is_checked_a_few_slabs_at_a_time(stand: S3Stand) -> None:
    """A mover has room for a range of each of its threads, and not for whole chunks; and a thread that is kept for long
    would keep readers waiting."""
    layout = layout_of(small_spec(layers=(LayerSpec(kv_heads=2, k_dim=16, v_dim=16),) * 5), CacheKind.KV, 16)
    for slab_count, job_count in ((1, 5), (2, 3), (5, 1)):
        readers = Recorded()
        lanes = Lanes(readers, *(WorkerThreads(1, f"s3-{name}") for name in ("write", "ask", "near")))
        settings = replace(stand.settings, range_bytes=slab_count * layout.slabs[0].byte_count)
        tier = S3Tier(settings, lanes, SystemClock())
        what = chunk(slab_count, layout)
        await write(stand.other, what)
        await write(tier, what)  # it is adopted
        await tier.close()
        assert len(readers.checked) == job_count
        assert [slab for each in readers.checked for slab in each] == list(range(5))


@scenario()
async def test_a_newer_format_is_a_miss_and_stays(stand: S3Stand) -> None:
    what = chunk(1)
    data = newer(bytes_of(what))
    put_bytes(stand, what, data)
    assert await stand.tier.open(what.name) is None
    with pytest.raises(Exhausted, match="newer release"):
        await write(stand.tier, what)
    assert there(stand, what) == data


@scenario()
async def test_two_nodes_that_write_at_once_leave_one_whole_chunk(stand: S3Stand) -> None:
    ones, others = [chunk(number) for number in range(8)], [chunk(number, write=2) for number in range(8)]
    await asyncio.gather(*(write(stand.tier, each) for each in ones), *(write(stand.other, each) for each in others))
    for one, other in zip(ones, others, strict=True):
        assert there(stand, one) in (bytes_of(one), bytes_of(other))


@scenario()
async def test_a_chunk_takes_one_request_and_one_more_where_that_was_the_wrong_guess(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is encoded, and where its slabs take more than a range. After the first that is encoded nothing of the
    next is read in vain."""
    monkeypatch.setattr(making, "SAVES_MIN", -1.0)
    whole, page = f"bytes=0-{SMALL.total_bytes - 1}", f"bytes=0-{SMALL.header_bytes - 1}"
    body = f"bytes={SMALL.header_bytes}-{SMALL.total_bytes - 1}"
    encoder = tier_of(replace(stand.settings, encoding="lz4"))
    for number in range(3):
        await write(stand.other, chunk(number))
    for number in range(3, 6):
        await write(encoder, chunk(number))
    gets(stand)
    assert [await found(stand.tier, chunk(0)), gets(stand)] == [True, [whole]]
    assert stand.tier.statistics().read_bytes == SMALL.body_bytes
    for number, asked in ((3, whole), (4, page)):
        assert await found(stand.tier, chunk(number))
        first, second = gets(stand)
        assert first == asked
        assert second.startswith(f"bytes={SMALL.header_bytes}-")
    assert [await found(stand.tier, chunk(1)), gets(stand)] == [True, [page, body]]
    assert [await found(stand.tier, chunk(2)), gets(stand)] == [True, [whole]]
    small = tier_of(replace(stand.settings, range_bytes=4096))
    assert await found(small, chunk(2))
    assert gets(stand)[0] == page
    for each in (encoder, small):
        await each.close()


def in_parts(monkeypatch: pytest.MonkeyPatch, token_count: int) -> Chunk:
    """A chunk that goes in several parts."""
    monkeypatch.setattr(writing, "MULTIPART_BYTES", 4 << 20)
    monkeypatch.setattr(writing, "PART_BYTES", 5 << 20)
    wide = small_spec(layers=(LayerSpec(kv_heads=32, k_dim=128, v_dim=128),) * 2, chunk_tokens=token_count)
    return chunk(1, layout_of(wide, CacheKind.KV, token_count))


@scenario()
async def test_large_chunks_go_in_parts_and_no_part_is_left(stand: S3Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    what = in_parts(monkeypatch, 400)
    stand.settings = replace(stand.settings, range_bytes=1 << 20)
    tier = stand.node()
    await write(tier, what)
    assert await found(tier, what)
    assert there(stand, what) == bytes_of(what)
    await tier.remove([what.header.storage_key])
    stand.switches.denied = frozenset({"PUT"})  # the parts; the upload is begun by POST
    with pytest.raises(PermissionDenied, match="s3:PutObject"):
        await write(tier, what)
    stand.switches.turn_off()
    uploads = stand.server.client.list_multipart_uploads(Bucket=stand.server.bucket).get("Uploads", [])
    assert not uploads
    assert await tier.open(what.name) is None
    await tier.close()


@pytest.mark.parametrize("then", [(412, "PreconditionFailed"), (404, "NoSuchUpload")])
@scenario()
async def test_an_upload_whose_last_answer_was_lost_is_found_there(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch, then: tuple[int, str]
) -> None:
    """The store is asked once more to end it. One says that the object is there, another that it knows no upload."""
    what = in_parts(monkeypatch, 200)
    stand.settings = replace(stand.settings, range_bytes=4 << 20)
    tier = stand.node()
    stand.switches.loses = ("POST", "uploadId=", [then])
    await write(tier, what)
    assert stand.switches.loses is None
    assert await found(tier, what)
    assert sum(path.endswith("uploads") for _, path, _ in stand.switches.asked) == 1, "it is not sent again"
    await tier.close()


def test_byte_movers_carry_chunks_of_thousands_of_strips(stand: S3Stand) -> None:
    command = [sys.executable, "-m", "tests.tiers.s3.movers", stand.server.url, stand.server.bucket]
    subprocess.run(command, check=True, timeout=60)
