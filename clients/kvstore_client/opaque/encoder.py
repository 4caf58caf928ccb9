"""Encoder caches: a multimodal item's embeddings, [tokens, hidden], by the hash of the item. vLLM's encoder-cache
connectors use them. A thin layer over opaque values."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.spec import DTYPES, ModelSpec
from kvstore_client.arrays import Tensor, check_memory, dtype_name, is_tensor, presented, raw_array
from kvstore_client.opaque.value import flat

PREFACE = struct.Struct("<8s24sQQ16x")
MAGIC = b"kvencod1"
AXIS_MAX = (1 << 31) - 1


def encoder_namespace(spec: ModelSpec) -> str:
    """Return the namespace of one model's encoder caches, by its fingerprint: users that share them must give the same
    weights and chunk size."""
    if not isinstance(spec, ModelSpec):
        raise InvalidRequest(f"spec must be a ModelSpec, not {type(spec).__name__}")
    return f"encoder/{fingerprint(spec, spec.kind).hex()}"


def packed(embeddings: Tensor, dtype: str | None) -> NDArray[np.uint8]:
    """Pack dtype, shape and bytes as one value. Raises InvalidRequest for anything but [tokens, hidden] of a known
    dtype."""
    check_memory(embeddings, "embeddings")
    found = dtype_name(embeddings)
    name = found if dtype is None else dtype
    if name not in DTYPES:
        raise InvalidRequest(f"embeddings are {name}: use one of {', '.join(DTYPES)}, or name it with dtype=")
    if found not in (name, f"uint{8 * DTYPES[name]}"):
        raise InvalidRequest(
            f"embeddings are {found}, dtype= says {name}: give {name}, or unsigned integers of {DTYPES[name]} bytes"
        )
    if embeddings.ndim != 2:
        raise InvalidRequest(f"embeddings must be [tokens, hidden], not of shape {tuple(embeddings.shape)}")
    plain = embeddings.detach().cpu() if is_tensor(embeddings) else raw_array(np.ascontiguousarray(embeddings))
    body = flat(plain, "embeddings")
    tokens, hidden = embeddings.shape
    return np.concatenate([np.frombuffer(PREFACE.pack(MAGIC, name.encode(), tokens, hidden), np.uint8), body])


def unpacked(value: NDArray[np.uint8]) -> Tensor | None:
    """Return the packed embeddings, a view of the value: a tensor when the process uses torch. None for other bytes."""
    if value.size < PREFACE.size:
        return None
    magic, name, tokens, hidden = PREFACE.unpack(value[: PREFACE.size].tobytes())
    dtype = name.rstrip(b"\0").decode("ascii", "replace")
    if magic != MAGIC or dtype not in DTYPES or value.size != PREFACE.size + tokens * hidden * DTYPES[dtype]:
        return None
    if max(tokens, hidden) > AXIS_MAX:  # the size check above allows any number when the other is 0
        return None
    array = value[PREFACE.size :].view(f"u{DTYPES[dtype]}").reshape(tokens, hidden)
    return presented(array, dtype)
