"""What a client can do with the memory it was handed: read the arena, write its staging, and nothing else."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.chunk import layout_of, parse_header, strip_seeds, verify_slab
from kvstore.v1 import cache_pb2 as pb
from tests.server.raw import Raw
from tests.specs import small_spec, tokens_of

_libc = ctypes.CDLL(None, use_errno=True)
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
F_ADD_SEALS = 1033


@pytest.fixture
def raw(sidecar: Sidecar) -> Iterator[Raw]:
    with Raw(sidecar) as session:
        yield session


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def punch(descriptor: int) -> None:
    mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    _checked(_libc.fallocate(descriptor, mode, ctypes.c_int64(0), ctypes.c_int64(4096)))


def reopen(descriptor: int) -> None:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        os.pwrite(again, b"x", 0)
    finally:
        os.close(again)


def read_only_then_writable(descriptor: int) -> None:
    with mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ) as mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        _checked(_libc.mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ | mmap.PROT_WRITE))


ATTEMPTS: dict[str, Callable[[int], Any]] = {
    "map writable": lambda descriptor: mmap.mmap(descriptor, 4096),
    "make a mapping writable": read_only_then_writable,
    "write": lambda descriptor: os.pwrite(descriptor, b"x", 0),
    "truncate": lambda descriptor: os.ftruncate(descriptor, 0),
    "grow": lambda descriptor: os.ftruncate(descriptor, 1 << 40),
    "punch a hole": punch,
    "reopen and write": reopen,
    "seal further": lambda descriptor: fcntl.fcntl(descriptor, F_ADD_SEALS, 8),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_arena_cannot_be_written(raw: Raw, attempt: str) -> None:
    """The generations page and every region; the presence table."""
    _, presence = raw.exchange(op="presence")
    raw.descriptors += presence
    for descriptor in raw.descriptors:
        with pytest.raises((PermissionError, BufferError)):
            ATTEMPTS[attempt](descriptor)
    assert raw.stats().arena.capacity_bytes


@pytest.mark.parametrize("attempt", ["truncate", "grow", "seal further"])
def test_staging_keeps_its_size(raw: Raw, attempt: str) -> None:
    """Shrinking it under the server's copy would end the server."""
    reply, (descriptor,) = raw.exchange(op="staging", bytes=1 << 20)
    with pytest.raises(PermissionError):
        ATTEMPTS[attempt](descriptor)
    assert os.fstat(descriptor).st_size == reply["bytes"]
    os.close(descriptor)


def test_punching_staging_out_leaves_the_server_up(raw: Raw) -> None:
    spec, tokens = small_spec(model_id="punch"), tokens_of(16)
    reply, (descriptor,) = raw.exchange(op="staging", bytes=1 << 20)
    punch(descriptor)
    os.close(descriptor)
    layout = layout_of(spec, spec.kind, 16)
    fill = pb.Fill(strip_count=layout.strip_count, staging_id=reply["staging_id"])
    commit = pb.Commit(reservation_id=raw.reserve(spec, tokens).reservation_id, fills=[fill])
    assert raw.call("Store", pb.StoreRequest(commit=commit)).committed_count == 1


def resident(raw: Raw, spec: Any, tokens: Any) -> bytes:
    """The first chunk's bytes, as they lie in the arena."""
    (fetched,) = raw.call("Fetch", pb.FetchRequest(query=raw.query(spec, tokens)))
    raw.call("Release", pb.ReleaseRequest(lease_ids=[fetched.lease_id]))
    sizes = dict(raw.welcome["regions"])
    data = b""
    for extent in fetched.chunks[0].extents:
        with mmap.mmap(raw.descriptors[1 + extent.region], sizes[extent.region], prot=mmap.PROT_READ) as region:
            data += region[extent.offset : extent.offset + extent.byte_count]
    return data


def test_scribbling_on_staging_after_a_commit_changes_nothing(raw: Raw) -> None:
    spec, tokens = small_spec(model_id="scribble"), tokens_of(16)
    fills, memory = raw.staged(spec, 1)
    commit = pb.Commit(reservation_id=raw.reserve(spec, tokens).reservation_id, fills=fills)
    raw.call("Store", pb.StoreRequest(commit=commit))
    before = resident(raw, spec, tokens)
    memory[:] = b"\xee" * len(memory)
    assert resident(raw, spec, tokens) == before
    layout = layout_of(spec, spec.kind, 16)
    header = parse_header(np.frombuffer(before, np.uint8)[: layout.header_bytes], layout)
    seeds = strip_seeds(header.storage_key, layout, header.write_id)
    body = np.frombuffer(before, np.uint8)[layout.header_bytes :]
    for index, slab in enumerate(layout.slabs):
        stored = body[slab.offset : slab.offset + slab.byte_count].copy()
        assert verify_slab(stored, layout, index, seeds, header.checksums)
        stored[0] ^= 1
        assert not verify_slab(stored, layout, index, seeds, header.checksums)
