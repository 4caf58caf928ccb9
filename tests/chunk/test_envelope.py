"""Envelopes: what was sealed opens to the byte, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.chunk import (
    AEAD,
    MAC,
    ChunkHeader,
    Sealer,
    Trust,
    are_right,
    check_available,
    encode_chunk,
    envelope,
    is_newer_format,
    open_file,
    open_slabs,
    pack_header,
    parse_header,
    read_seat,
    seal_file,
    sealed,
    shown_header,
    slab_runs,
    stored_run,
    write_seat,
)
from kvstore.chunk.seal import StripSeal
from kvstore.errors import DataLoss, InvalidRequest
from kvstore.seams import EnvelopeKey, EnvelopeRing, TenantKeys
from kvstore.seams.memory import Bytes
from tests.contracts.chunks import SMALL, Chunk, chunk, layouts

KEY, OLD, FOREIGN = (EnvelopeKey.derived(text) for text in (b"new" * 20, b"old" * 20, b"another" * 9))
KINDS = (MAC, AEAD)


def ring(*keys: EnvelopeKey) -> EnvelopeRing:
    return EnvelopeRing(keys or (KEY,))


def copy_of(what: Chunk, kind: str, key: EnvelopeKey = KEY) -> Bytes:
    """One copy as it is written: header and body."""
    sealing = Trust(kind, ring(key)).sealing()
    assert sealing is not None
    header, layout = what.header, what.layout
    runs = slab_runs(layout, header.storage_key, header.write_id, range(len(layout.slabs)), what.pieces[1:])
    return np.concatenate(sealed(sealing, what.pieces[0], runs))


def checked(data: Bytes) -> Bytes:
    """With the checksum that its header should have: an attacker can do that."""
    size = int.from_bytes(data[12:16].tobytes(), "little")
    if 384 <= size <= data.size:
        data[368:384] = 0
        data[368:384] = np.frombuffer(xxhash.xxh3_128_digest(data[:size].data), np.uint8)
    return data


def opened(data: Bytes, what: Chunk, trust: Trust) -> tuple[ChunkHeader, list[Bytes]] | None:
    """The chunk that a copy is. None: it is refused, one way or the other."""
    layout, data = what.layout, data.copy()
    try:
        header = trust.read_header(data[: trust.header_bytes(layout)], layout)
    except DataLoss:
        return None
    if header is None or header.storage_key != what.header.storage_key:
        return None
    start = header.bytes_before(layout)
    if data.size < start + layout.body_bytes:
        return None
    slabs = [data[start + slab.offset : start + slab.offset + slab.byte_count] for slab in layout.slabs]
    numbers = range(len(slabs))
    runs = slab_runs(layout, header.storage_key, header.write_id, numbers, slabs, header.seal)
    return (header, slabs) if are_right(runs, header.checksums_of(0, layout.strip_count)) else None


def same(found: Any, what: Chunk) -> bool:
    assert found is not None
    header, slabs = found
    assert pack_header(header, what.layout) == what.pieces[0].tobytes()
    return all((one == other).all() for one, other in zip(slabs, what.pieces[1:], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(layouts()))
def test_what_was_sealed_opens_to_the_byte(kind: str, name: str) -> None:
    what = chunk(3, layouts()[name])
    before = [piece.copy() for piece in what.pieces]
    data = copy_of(what, kind)
    assert same(opened(data, what, Trust(kind, ring())), what)
    assert all((one == other).all() for one, other in zip(before, what.pieces, strict=True)), "memory was changed"
    body = np.concatenate(what.pieces[1:])
    assert (data[-body.size :] == body).all() == (kind == MAC)


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_slabs_open_in_their_place(kind: str) -> None:
    what = chunk(5, layouts()["kv float32"])
    layout = what.layout
    encoded = encode_chunk(what.header, layout, what.pieces)
    assert encoded.header.stored is not None
    sealing = Trust(kind, ring()).sealing()
    assert sealing is not None
    head, body = encoded.data[: layout.header_bytes], encoded.data[layout.header_bytes :].copy()
    run = stored_run(encoded.header, layout, range(len(layout.slabs)))
    copy = np.concatenate(sealed(sealing, head, [(body, run)]))
    header = Trust(kind, ring()).read_header(copy, layout)
    assert header is not None
    assert pack_header(header, layout) == head.tobytes()
    data = copy[header.bytes_before(layout) :].copy()
    for slab in range(len(layout.slabs)):
        start, stop = encoded.header.stored.slab_offsets[[slab, slab + 1]].tolist()
        part = data[start:stop]
        assert open_slabs(header, layout, range(slab, slab + 1), part)
        assert (part == body[start:stop]).all()
        part[3] ^= 1
        assert not open_slabs(header, layout, range(slab, slab + 1), part)


@pytest.mark.parametrize("kind", KINDS)
def test_no_altered_bit_is_believed(kind: str) -> None:
    """Every bit of the fixed header, and some of each strip, each with the checksum made anew."""
    what, trust = chunk(1), Trust(kind, ring())
    data = copy_of(what, kind)
    size = trust.header_bytes(SMALL)
    covered = range(size * 8)
    random = np.random.default_rng(1)
    outside = {8 * byte + bit for byte in range(368, 384) for bit in range(8)}
    for bit in [*range(384 * 8), *random.integers(384 * 8, covered.stop, 600).tolist()]:
        altered = data.copy()
        altered[bit // 8] ^= 1 << bit % 8
        found = opened(checked(altered), what, trust)
        assert found is None or (bit in outside and same(found, what)), bit
    for offset, length in zip(SMALL.strip_offsets.tolist(), SMALL.strip_lengths.tolist(), strict=True):
        for at in {0, length - 1, *random.integers(0, length, 20).tolist()}:
            altered = data.copy()
            altered[size + offset + at] ^= 1 << int(random.integers(8))
            assert opened(checked(altered), what, trust) is None


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_believed_in_another_place(kind: str) -> None:
    """Swapped strips, tags and rows; copies of other keys, writes and salts; parts of them; and none at all."""
    what, trust = chunk(1), Trust(kind, ring())
    size, count = trust.header_bytes(SMALL), SMALL.strip_count
    data = copy_of(what, kind)
    first, second = (
        slice(size + at, size + at + int(SMALL.strip_lengths[0])) for at in SMALL.strip_offsets[:2].tolist()
    )
    rows = [slice(384 + 32 * number, 384 + 32 * number + 32) for number in range(2)]
    tags = [slice(384 + 32 * count + 16 * number, 384 + 32 * count + 16 * number + 16) for number in range(2)]
    for pairs in ([(first, second)], [(first, second), tags], [(first, second), rows], [(first, second), rows, tags]):
        altered = data.copy()
        for one, other in pairs:
            altered[one], altered[other] = data[other], data[one]
        assert opened(checked(altered), what, trust) is None, pairs
    again, write, other = copy_of(what, kind), copy_of(chunk(1, write=1), kind), copy_of(chunk(2), kind)
    assert (again[328:344] != data[328:344]).any(), "a salt was drawn twice"
    for alien in (again, write, other):
        for part in (slice(0, size), slice(size, None), slice(384, size), slice(328, 384), slice(288, 344)):
            altered = data.copy()
            altered[part] = alien[part]
            found = opened(checked(altered), what, trust)
            # The body of one whose bytes are not encrypted is the same in each copy of one write.
            assert found is None or (kind == MAC and alien is again and same(found, what)), part
    assert opened(other, what, trust) is None
    for cut in (0, 100, 383, 384, size - 1, size, data.size - 1):
        assert opened(data[:cut], what, trust) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_the_ring_opens_and_no_other(kind: str) -> None:
    what = chunk(1)
    old, foreign = copy_of(what, kind, OLD), copy_of(what, kind, FOREIGN)
    assert same(opened(old, what, Trust(kind, ring(KEY, OLD))), what)
    assert Trust(kind, ring(KEY)).read_header(foreign, SMALL) is None, "it is somebody's, and stays"
    claimed = foreign.copy()
    claimed[304:320] = np.frombuffer(KEY.key_id, np.uint8)
    with pytest.raises(DataLoss, match="not ours"):
        Trust(kind, ring(KEY)).read_header(checked(claimed), SMALL)
    changing = Trust(kind, ring(OLD))
    changing.ring.change((KEY, OLD))
    assert same(opened(old, what, changing), what)
    sealing = changing.sealing()
    assert sealing is not None
    assert sealing.key == KEY


def test_an_envelope_is_demanded_where_settings_say_so() -> None:
    what = chunk(1)
    plain = np.concatenate(what.pieces)
    assert same(opened(plain, what, Trust()), what)
    assert same(opened(plain, what, Trust("none", ring())), what)
    for kind in KINDS:
        with pytest.raises(DataLoss, match="without an envelope"):
            Trust(kind, ring()).read_header(plain, SMALL)
        assert same(opened(copy_of(what, kind), what, Trust("none", ring())), what)
    stripped = copy_of(what, MAC)
    stripped[8:12] = np.frombuffer(np.array([1, 1], "<u2").tobytes(), np.uint8)
    stripped[36:38] = 0
    assert opened(checked(stripped), what, Trust(MAC, ring())) is None


def test_earlier_releases_and_nodes_without_a_key_take_it_for_a_newer_ones() -> None:
    for kind in KINDS:
        data = copy_of(chunk(1), kind)
        assert is_newer_format(data.tobytes())
        assert Trust().read_header(data, SMALL) is None
        with pytest.raises(DataLoss, match="newer"):
            parse_header(data, SMALL)


def test_what_could_confirm_a_prompt_is_hidden() -> None:
    what = chunk(1)
    what.header = replace(what.header, parent=b"p" * 32, chain_digest=b"c" * 32, token_digest=b"t" * 32)
    what.pieces[0][:] = np.frombuffer(pack_header(what.header, SMALL), np.uint8)
    secrets = [b"p" * 32, b"c" * 32, b"t" * 32, what.header.checksums[0].tobytes(), what.pieces[1][:32].tobytes()]
    for kind in KINDS:
        data = copy_of(what, kind).tobytes()
        assert [each in data for each in secrets] == [kind == MAC] * len(secrets)
        assert what.header.storage_key in data
        shown = shown_header(data)
        assert (shown.storage_key, shown.fingerprint) == (what.header.storage_key, what.header.fingerprint)
        assert (shown.chain_digest, shown.token_count, shown.checksums.any()) == (bytes(32), 0, False)


@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_has_the_key_of_another(kind: str) -> None:
    """So nonces, which are strips' numbers, never repeat under one key."""
    seen = set()
    trust = Trust(kind, ring())
    for what in (chunk(1), chunk(1), chunk(1, write=1), chunk(2)):
        header = trust.read_header(copy_of(what, kind), SMALL)
        assert header is not None
        assert header.seal is not None
        seen.add(header.seal.key)
    assert len(seen) == 4


def test_bytes_that_went_bad_in_memory_are_not_sealed() -> None:
    what = chunk(1)
    what.pieces[1][5] ^= 1
    with pytest.raises(DataLoss, match="resident"):
        copy_of(what, MAC)


def test_keys_are_shown_nowhere() -> None:
    header = Trust(MAC, ring()).read_header(copy_of(chunk(1), MAC), SMALL)
    assert header is not None
    assert header.seal is not None
    for what in (KEY, header, header.seal, ring(), Trust(MAC, ring()), Trust(MAC, ring()).sealing()):
        assert repr(KEY.key) not in repr(what)
        assert repr(header.seal.key) not in repr(what)


def test_a_naming_secret_gives_a_key_that_is_not_the_secret() -> None:
    keys = TenantKeys.derived("a", b"x" * 32)
    one = EnvelopeKey.following(keys)
    assert one == EnvelopeKey.following(keys)
    assert one != EnvelopeKey.following(TenantKeys.derived("a", b"y" * 32))
    assert len({one.key, keys.secret, EnvelopeKey.derived(keys.secret).key, one.key_id}) == 4


def test_without_its_package_aead_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_available(AEAD, "tiers.redis.envelope")
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    check_available(MAC, "tiers.redis.envelope")
    with pytest.raises(InvalidRequest, match=r"tiers\.redis\.envelope = aead .* pip install 'kvstore\[aead\]'"):
        check_available(AEAD, "tiers.redis.envelope")


def test_equal_strips_are_not_equal_once_they_are_sealed() -> None:
    key = StripSeal(AEAD, bytes(32), b"about")
    strips = [np.zeros(4096, np.uint8) for _ in range(2)]
    tags = [key.seal(number, strip, strip) for number, strip in enumerate(strips)]
    assert tags[0] != tags[1]
    assert (strips[0] != strips[1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tag_is_of_one_strip_and_of_one_chunk(kind: str) -> None:
    """Also where a header would not tell."""
    key, data = StripSeal(kind, bytes(32), b"about"), np.zeros(4096, np.uint8)
    tag = key.seal(0, data, data)
    assert not key.opens(1, data.copy(), tag)
    assert not replace(key, about=b"other").opens(0, data.copy(), tag)
    assert key.opens(0, data.copy(), tag)


def test_a_key_follows_from_all_that_a_copy_is() -> None:
    """Storage key, write, encoding, envelope and salt: each alone makes another key."""
    header = bytearray(pack_header(chunk(1).header, SMALL))
    keys = {envelope._seal_of(MAC, KEY, header, bytes(16)).key, envelope._seal_of(AEAD, KEY, header, bytes(16)).key}
    keys |= {envelope._seal_of(MAC, OLD, header, bytes(16)).key, envelope._seal_of(MAC, KEY, header, b"s" * 16).key}
    for at in (128, 159, 288, 303, 35):
        altered = header.copy()
        altered[at] ^= 1
        keys.add(envelope._seal_of(MAC, KEY, altered, bytes(16)).key)
    assert len(keys) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_given_to_others_meanwhile_is_not_sealed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the header is read, or between two looks at one strip."""
    what = chunk(1)
    what.pieces[0][:] = 0xDB
    with pytest.raises(DataLoss):
        copy_of(what, kind)
    what, seal = chunk(1), StripSeal.seal

    def changed(self: StripSeal, number: int, source: Bytes, target: Bytes, more: bytes = b"") -> bytes:
        what.pieces[1][:] = 0xDB
        return seal(self, number, source, target, more)

    monkeypatch.setattr(StripSeal, "seal", changed)
    with pytest.raises(DataLoss, match="resident"):
        copy_of(what, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seat_is_part_of_what_is_proven(kind: str) -> None:
    """And of no chunk: what is opened does not say it."""
    what, trust = chunk(1), Trust(kind, ring())
    sealing = trust.sealing()
    assert sealing is not None
    runs = slab_runs(SMALL, what.header.storage_key, what.header.write_id, range(2), what.pieces[1:])
    sealer = Sealer(sealing, what.pieces[0], 77)
    bodies = [sealer.body(*run) for run in runs]
    data = np.concatenate([sealer.header(), *bodies])
    assert read_seat(data) == 77
    assert same(opened(data, what, trust), what)
    write_seat(data[: trust.header_bytes(SMALL)], 78)
    with pytest.raises(DataLoss, match="not ours"):
        trust.read_header(data, SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sealed_file_opens_with_its_key_and_unaltered(kind: str) -> None:
    sealing = Trust(kind, ring()).sealing()
    assert sealing is not None
    data = seal_file(sealing, b"what it is", b"which chunks there are")
    assert open_file(ring(), b"what it is", data) == b"which chunks there are"
    assert (b"which chunks" in data) == (kind == MAC)
    assert seal_file(sealing, b"what it is", b"which chunks there are") != data, "a salt was drawn twice"
    assert open_file(ring(OLD), b"what it is", data) is None
    assert open_file(ring(), b"", b"without an envelope") == b"without an envelope"
    with pytest.raises(DataLoss):
        open_file(ring(), b"another", data)
    for at in range(32, len(data)):
        with pytest.raises(DataLoss):
            open_file(ring(), b"what it is", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for cut in range(8, len(data)):
        with pytest.raises(DataLoss):
            open_file(ring(), b"what it is", data[:cut])
