"""Opaque values by namespace and key: the states of engines whose caches have no known layers.

A value is stored as chunks of its namespace, through the same staging, arena, checksums, device and recovery as
attention caches. Its first chunk begins with its length and a random version of this put. The names of the other chunks
follow from that version, so that chunks of two puts never meet. A value of one chunk and one of several have different
names, so that ``exists`` needs no bytes of the first chunk.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.seams.memory import Bytes
from kvstore.spec import ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import Buffer, check_memory, is_tensor, torch_module
from kvstore_client.planes.prefix import WholeChunk
from kvstore_client.planes.store import Unit
from kvstore_client.prompt import EXACT

UNIT_BYTES = 1024
CHUNK_BYTES = 4 << 20
HEAD = struct.Struct("<8sQ16s32x")
MAGIC = b"kvvalue1"
KEY_BYTES_MAX = 1024
_NAMESPACE = re.compile(r"[A-Za-z0-9._:/-]{1,200}")


def namespace_spec(namespace: str) -> ModelSpec:
    """Return the spec of a namespace of opaque values. Raises InvalidRequest for an invalid name."""
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise InvalidRequest(
            f"namespace {namespace!r:.80} must be 1..200 letters, digits and . _ : / - that name the engine "
            "and what it keeps"
        )
    return ModelSpec(
        model_id=f"bytes/{namespace}", weights_digest="unverified:bytes", layers=(), hidden_size=UNIT_BYTES,
        vocab_size=1, cache_dtype="float8_e4m3fn", hidden_dtype="float8_e4m3fn", chunk_tokens=CHUNK_BYTES // UNIT_BYTES,
    )  # fmt: skip


def flat(data: Buffer, name: str = "data") -> NDArray[np.uint8]:
    """Return any contiguous buffer, array or CPU tensor as bytes, without a copy. Raises InvalidRequest."""
    if isinstance(data, np.ndarray) and (data.dtype.hasobject or isinstance(data, np.ma.MaskedArray)):
        raise InvalidRequest(
            f"{name} has no plain bytes: {type(data).__name__} of {data.dtype}; give an array of numbers"
        )
    try:
        if is_tensor(data):
            check_memory(data, name)
            data = data.detach().contiguous().view(-1).view(torch_module().uint8).numpy()
        view = memoryview(data)
        return np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidRequest(
            f"{name} must be bytes, or a contiguous array or CPU tensor, not {type(data).__name__}: {error}"
        ) from error


def writable(target: Buffer) -> NDArray[np.uint8]:
    """Return a buffer as bytes to write to. Raises InvalidRequest."""
    if is_tensor(target) and not target.is_contiguous():
        raise InvalidRequest("into must be contiguous: a copy of it would be filled in its place")
    view = flat(target, "into")
    if not view.flags.writeable:
        raise InvalidRequest("into must be writable: give a bytearray, an array or a tensor")
    return view


@dataclass(frozen=True)
class Key:
    """A key's two chunk names: ``whole`` for a value in one chunk, ``first`` for one in several."""

    whole: bytes
    first: bytes

    @staticmethod
    def of(key: str | bytes) -> Key:
        """Return a key's names. Raises InvalidRequest for a key that is too long, empty, or not text or bytes."""
        data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
        if not isinstance(data, bytes) or not 0 < len(data) <= KEY_BYTES_MAX:
            raise InvalidRequest(
                f"key {key!r:.80} must be text or bytes of 1..{KEY_BYTES_MAX} bytes: hash what is longer"
            )
        return Key(blake3(b"kvstore/value/1\0" + data).digest(), blake3(b"kvstore/values/1\0" + data).digest())

    def chain(self, version: bytes, chunk_count: int) -> list[bytes]:
        """Return the names of a value's chunks."""
        if chunk_count == 1:
            return [self.whole]
        return [self.first, *self.parts(version, range(1, chunk_count))]

    def parts(self, version: bytes, numbers: range) -> list[bytes]:
        """Return the names of the chunks with these numbers, from 1 on: those after the first."""
        rest = (self.first + version + struct.pack("<Q", number) for number in numbers)
        return [blake3(b"kvstore/value/part/1\0" + each).digest() for each in rest]


class Head(NamedTuple):
    """The beginning of a value: its length, and the version that names its other chunks."""

    size: int
    version: bytes

    @staticmethod
    def of(chunk: WholeChunk, *, is_whole: bool) -> Head | None:
        """Decode the head in a value's first chunk. ``is_whole``: this chunk is the whole value. None for other bytes,
        and for a length that such a chunk cannot have: readers trust it, so nothing is allocated before this check."""
        magic, size, version = HEAD.unpack(bytes(chunk.slab(0)[: HEAD.size]))
        room = room_of(chunk) - HEAD.size
        if magic != MAGIC or (size <= room) != is_whole or not (is_whole or room == CHUNK_BYTES - HEAD.size):
            return None
        return Head(size, version)

    @property
    def chunk_count(self) -> int:
        return -(-(HEAD.size + self.size) // CHUNK_BYTES)


def room_of(chunk: WholeChunk) -> int:
    """Return the bytes of a value that a chunk has."""
    return int(chunk.layout.token_count) * UNIT_BYTES


class Pieces:
    """Buffers that are one run of bytes."""

    def __init__(self, arrays: Sequence[NDArray[np.uint8]]) -> None:
        self.arrays = arrays
        self.size = sum(array.size for array in arrays)

    def parts(self, start: int, count: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """Yield the buffers under a run of the bytes: each part, and its offset in the run."""
        begin = 0
        for array in self.arrays:
            low, high = max(start, begin), min(start + count, begin + array.size)
            if low < high:
                yield array[low - begin : high - begin], low - start
            begin += array.size


@dataclass(frozen=True)
class Value:
    """A value to be stored: the source of a store. Its bytes are the head, then the data, then zeros."""

    spec: ModelSpec
    content: Pieces
    hidden_layers = ()

    @staticmethod
    def of(spec: ModelSpec, version: bytes, data: Sequence[NDArray[np.uint8]]) -> Value:
        size = sum(piece.size for piece in data)
        return Value(spec, Pieces([np.frombuffer(HEAD.pack(MAGIC, size, version), np.uint8), *data]))

    @property
    def token_count(self) -> int:
        return -(-self.content.size // UNIT_BYTES)

    @property
    def chunk_count(self) -> int:
        return -(-self.token_count // self.spec.chunk_tokens)

    def copy(
        self, unit: Unit, slab: int, memory: Bytes, *, first: int = 0, stop: int | None = None, count: int = 1,
        stride: int = 0,
    ) -> None:  # fmt: skip
        """Copy as ``planes.store.StoreSource.copy`` does: strips are runs of units of the only slab."""
        layout = unit.layout
        skip = int(layout.strip_offsets[first])
        end = layout.token_count * UNIT_BYTES if stop is None else skip + memory.size
        for number in range(count):
            start = (unit.token_start + number * layout.token_count) * UNIT_BYTES
            self._fill(start + skip, memory[number * stride : number * stride + end - skip])

    def fused(self, *_: object) -> None:
        """Return None: a value has one slab."""

    def _fill(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill ``target`` with the value's bytes from ``start`` on."""
        for part, place in self.content.parts(start, target.size):
            np.copyto(target[place : place + part.size], part)
        target[max(0, self.content.size - start) :] = 0


def reserve_value(value: Value, name: bytes, digests: list[bytes], replaces: bytes) -> pb.StoreRequest:
    """Return the request that reserves room for a value, in place of the chunks that ``replaces`` names."""
    digest = b"".join(digests)
    query = pb.ChainQuery(fingerprint=name, digests=digest, exactness=EXACT)  # type: ignore[arg-type]  # the wire's number
    tail = value.token_count % value.spec.chunk_tokens
    return pb.StoreRequest(
        reserve=pb.Reserve(query=query, token_digests=digest, tail_token_count=tail, replaces=replaces)
    )
