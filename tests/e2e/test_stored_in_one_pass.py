"""Stores prepare the copies of all layers together: out of tensors and out of pages, whole chunks and parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged, connect
from kvstore_client.planes import store as units
from kvstore_client.store.pages import PagesSource
from kvstore_client.store.tensors import Tensors
from kvstore_ops.sidecar import Sidecar

from kvstore.keys import Extra
from kvstore.spec import LayerSpec
from tests.specs import bits, random_cache, small_spec, tokens_of

SHAPES = {
    "alike": (LayerSpec(kv_heads=2, k_dim=8, v_dim=8),) * 3,
    "other widths": (LayerSpec(kv_heads=2, k_dim=24, v_dim=8),) * 3,
    "one head": (LayerSpec(kv_heads=1, k_dim=8, v_dim=8),) * 3,
}
PAGE_TOKENS = 8


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Sidecar("--capacity", "16 MiB") as own, connect(own.address) as connected:
        yield connected


def as_tensors(cache: list[Any]) -> list[Any]:
    """The same cache in the middle of larger tensors."""
    made = []
    for layer in cache:
        planes = []
        for plane in layer:
            heads, tokens, dim = plane.shape
            room = torch.zeros(heads, tokens + 9, dim, dtype=torch.bfloat16)[:, 4 : 4 + tokens]
            room.copy_(torch.from_numpy(bits(plane).view(np.int16)).view(torch.bfloat16))
            planes.append(room)
        made.append(tuple(planes))
    return made


def as_pages(cache: list[Any], count: int) -> Paged:
    """The same cache in pages in random order, K and V by themselves."""
    pages = -(-count // PAGE_TOKENS) + 2
    order = np.random.default_rng(5).permutation(pages)
    slots = (order[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)[:count]
    made = []
    for layer in cache:
        planes = []
        for plane in layer:
            heads, _, dim = plane.shape
            room = np.zeros((pages * PAGE_TOKENS, heads, dim), np.uint16)
            room[slots] = bits(plane).transpose(1, 0, 2)
            planes.append(room.reshape(pages, PAGE_TOKENS, heads, dim))
        made.append(tuple(planes))
    return Paged(made, slots, "page slot head dim")


@pytest.mark.parametrize("unit_bytes", [units.UNIT_BYTES_MAX, 5000], ids=["whole chunks", "runs of slabs"])
@pytest.mark.parametrize("in_pages", [False, True], ids=["tensors", "pages"])
@pytest.mark.parametrize("count", [16, 48, 56])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_stored_is_fetched(
    client: Client, monkeypatch: pytest.MonkeyPatch, shape: str, count: int, in_pages: bool, unit_bytes: int
) -> None:
    """No slab is copied by itself: the way for that is gone here."""
    monkeypatch.setattr(units, "UNIT_BYTES_MAX", unit_bytes)
    for source in (Tensors, PagesSource):
        monkeypatch.delattr(source, "copy")
    spec = small_spec(layers=SHAPES[shape], model_id=f"one-pass-{shape}")
    tokens, cache = tokens_of(count, 3), random_cache(spec, count, 3)
    salt = [Extra(0, f"{in_pages}/{unit_bytes}/{count}".encode())]
    receipt = client.store(spec, tokens, as_pages(cache, count) if in_pages else as_tensors(cache), extras=salt)
    receipt.wait(10)
    assert receipt.stored_token_count == count, receipt.reason
    found = client.fetch(spec, tokens, extras=salt, verify=True)
    assert found.token_count == count
    for planes, right in zip(found, cache, strict=True):
        for plane, expected in zip(planes, right, strict=True):
            assert (bits(plane) == bits(expected)).all()
