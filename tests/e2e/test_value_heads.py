"""A value's head says how long it is. Whoever wrote it, nothing is allocated before all its chunks are stored, and at
most a chunk's size for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, connect
from kvstore_client.opaque import reader as reading
from kvstore_client.opaque.encoder import MAGIC as ENCODER_MAGIC
from kvstore_client.opaque.encoder import PREFACE, unpacked
from kvstore_client.opaque.value import CHUNK_BYTES, HEAD, MAGIC, UNIT_BYTES, Key, namespace_spec
from kvstore_ops.sidecar import Sidecar

from kvstore.chunk import layout_of
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import spec_to_message
from tests.server.raw import Raw

SPEC = namespace_spec("heads")
CHUNK_UNITS = CHUNK_BYTES // UNIT_BYTES


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """Local: what is written here is written by hand."""
    with Sidecar("--capacity", "64 MiB") as running:
        yield running


@pytest.fixture
def raw(sidecar: Sidecar) -> Iterator[Raw]:
    with Raw(sidecar) as connected:
        yield connected


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what a reader allocates."""
    sizes: list[int] = []
    allocate = reading.destination

    def noted(size: int) -> Any:
        sizes.append(size)
        return allocate(size)

    monkeypatch.setattr(reading, "destination", noted)
    return sizes


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, timeout_s=60.0) as connected:
        yield connected


def write(raw: Raw, digest: bytes, head: bytes, units: int = 1) -> None:
    """A chunk of so many units that begins with this head."""
    name = raw.call("RegisterModel", pb.RegisterModelRequest(spec=spec_to_message(SPEC))).fingerprint
    query = pb.ChainQuery(fingerprint=name, digests=digest, exactness=1)  # type: ignore[arg-type]
    tail = units % CHUNK_UNITS
    reply = raw.call(
        "Store", pb.StoreRequest(reserve=pb.Reserve(query=query, token_digests=digest, tail_token_count=tail))
    )
    layout = layout_of(SPEC, SPEC.kind, units)
    staging_id, memory = raw.staging(layout.body_bytes)
    memory[: len(head)] = head
    fill = pb.Fill(chunk=0, strip_first=0, strip_count=layout.strip_count, staging_id=staging_id)
    done = raw.call("Store", pb.StoreRequest(commit=pb.Commit(reservation_id=reply.reservation_id, fills=[fill])))
    assert done.committed_count == 1


@pytest.mark.parametrize("size", [UNIT_BYTES, 100_000, CHUNK_BYTES + 1, 1 << 33, 1 << 45, (1 << 64) - 1])
@pytest.mark.parametrize("which", ["whole", "first, a unit of it", "first"])
def test_a_head_that_says_more_than_is_stored_is_a_miss(
    raw: Raw, client: Client, allocated: list[int], which: str, size: int
) -> None:
    name = f"{which}-{size}"
    key = Key.of(name)
    digest = key.whole if which == "whole" else key.first
    write(raw, digest, HEAD.pack(MAGIC, size, bytes(16)), CHUNK_UNITS if which == "first" else 1)
    assert client.get_bytes("heads", name) is None
    assert allocated == []
    assert client.exists("heads", name) is (which == "whole")  # that there is a chunk; a read says what it is worth
    if size < 1 << 30:
        assert client.get_each("heads", [name], [np.zeros(size, np.uint8)]) == [False]


def test_chunks_that_follow_and_are_too_short_are_a_miss(raw: Raw, client: Client, allocated: list[int]) -> None:
    key, size = Key.of("short"), 2 * CHUNK_BYTES
    write(raw, key.first, HEAD.pack(MAGIC, size, bytes(16)), CHUNK_UNITS)
    for digest in key.parts(bytes(16), range(1, 3)):
        assert client.get_bytes("heads", "short") is None
        assert allocated == []
        write(raw, digest, b"", 1)
    assert client.get_bytes("heads", "short") is None
    assert max(allocated) <= 3 * CHUNK_BYTES


def test_other_bytes_are_no_value(raw: Raw, client: Client, allocated: list[int]) -> None:
    write(raw, Key.of("other").whole, HEAD.pack(b"kvvalue9", 10, bytes(16)))
    assert client.get_bytes("heads", "other") is None
    assert allocated == []


def test_a_value_that_says_what_it_is_allocates_just_that(client: Client, allocated: list[int]) -> None:
    for size in (0, 10, CHUNK_BYTES + 10):
        client.put_bytes("heads", "good", np.full(size, 7, np.uint8)).wait(20)
        found = client.get_bytes("heads", "good")
        assert found is not None
        assert found.tobytes() == bytes([7]) * size
        assert allocated.pop() == size
        assert allocated == []


@pytest.mark.parametrize(
    ("dtype", "tokens", "hidden"),
    [(b"bfloat16", 1 << 62, 0), (b"bfloat16", 0, (1 << 64) - 1), (b"bfloat16", 1 << 33, 1 << 33), (b"float64", 1, 1),
     (b"bfloat16", 3, 1), (b"bfloat16", 1, 2)],
)  # fmt: skip
def test_an_encoder_items_preface_is_believed_as_far_as_its_bytes_go(dtype: bytes, tokens: int, hidden: int) -> None:
    value = np.frombuffer(PREFACE.pack(ENCODER_MAGIC, dtype, tokens, hidden) + bytes(6), np.uint8)
    found = unpacked(value if tokens * hidden else value[: PREFACE.size])
    assert (None if found is None else tuple(found.shape)) == ((3, 1) if (tokens, hidden) == (3, 1) else None)


def test_the_chunks_of_two_versions_of_a_value_have_no_name_in_common_but_the_first() -> None:
    """A reader that has the first chunk of one version finds no part of another, whenever that is stored."""
    key = Key.of("k")
    one, other = key.chain(b"1" * 8, 4), key.chain(b"2" * 8, 4)
    assert set(one) & set(other) == {key.first}
    assert not set(one) & set(Key.of("other").chain(b"1" * 8, 4))
