"""Stores from a GPU's tensors, and fetches into them: each bit, and nothing beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged

from tests.gpu.tensors import FORMS, cache_on, is_poison, on, poisoned, same, seeds, unsigned
from tests.specs import random_cache, small_spec, tokens_of

pytestmark = pytest.mark.gpu

COUNT = 90
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
LAYOUTS = {
    "NHD": "kv page slot head dim", "HND": "page kv head slot dim", "one row": "page head slot dim",
    "slots last": "page head slot kv dim",
}  # fmt: skip


def spec_of(dtype: str = "bfloat16") -> Any:
    return small_spec(cache_dtype=dtype, model_id=f"gpu-{dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_gpu_stores_comes_back_in_owned_memory(client: Client, device: str, dtype: str) -> None:
    spec, seed = spec_of(dtype), next(seeds)
    kv, cache = cache_on(device, spec, COUNT, seed)
    receipt = client.store(spec, tokens_of(COUNT, seed), kv)
    receipt.wait(10.0)
    assert receipt.stored_token_count == COUNT, receipt.reason
    fetched = client.fetch(spec, tokens_of(COUNT, seed), verify=True)
    assert fetched.token_count == COUNT
    same(fetched, cache)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_planes_of_any_stride_are_stored_and_filled(client: Client, device: str, dtype: str, form: str) -> None:
    spec, seed = spec_of(dtype), next(seeds)
    tokens, cache = tokens_of(COUNT, seed), random_cache(spec, COUNT, seed)
    given = [[FORMS[form](device, (2, COUNT, 8), dtype) for _ in range(2)] for _ in range(2)]
    for layer, arrays in zip(given, cache, strict=True):
        for (plane, _), array in zip(layer, arrays, strict=True):
            plane.copy_(on(device, array, dtype))
    receipt = client.store(spec, tokens, [(k[0], v[0]) for k, v in given])
    receipt.wait(10.0)
    assert receipt.stored_token_count == COUNT, receipt.reason
    into = [[FORMS[form](device, (2, COUNT, 8), dtype) for _ in range(2)] for _ in range(2)]
    found = client.fetch(spec, tokens, into=[(k[0], v[0]) for k, v in into])
    assert found.token_count == COUNT
    same(found, cache)
    same([(k[0], v[0]) for k, v in into], cache)
    assert all(is_poison(rest) for layer in into for _, rest in layer)


def test_tokens_behind_a_prefix_stay_as_they_are(client: Client, device: str) -> None:
    spec, seed = spec_of(), next(seeds)
    kv, cache = cache_on(device, spec, 48, seed)
    client.store(spec, tokens_of(48, seed), kv).wait(10.0)
    longer = np.concatenate([tokens_of(48, seed), tokens_of(42, next(seeds))])
    into = [(poisoned(device, (2, COUNT, 8), "bfloat16"), poisoned(device, (2, COUNT, 8), "bfloat16")) for _ in "01"]
    assert client.fetch(spec, longer, into=into).token_count == 48
    same([(k[:, :48], v[:, :48]) for k, v in into], cache)
    assert all(is_poison(plane[:, 48:]) for pair in into for plane in pair)


@pytest.mark.parametrize("heads", [None, (1, 2)])
@pytest.mark.parametrize("layers", [None, [1], [1, 0]])
def test_layers_and_heads_that_are_asked_for(client: Client, device: str, layers: Any, heads: Any) -> None:
    spec, seed = spec_of(), next(seeds)
    kv, cache = cache_on(device, spec, COUNT, seed)
    client.store(spec, tokens_of(COUNT, seed), kv).wait(10.0)
    shape = (1 if heads else 2, COUNT, 8)
    into = [tuple(poisoned(device, shape, "bfloat16") for _ in range(2)) for _ in layers or range(2)]
    found = client.fetch(spec, tokens_of(COUNT, seed), into=into, layers=layers, heads=heads)
    assert found.token_count == COUNT
    some = slice(*(heads or (0, 2)))
    same(into, [(cache[layer][0][some], cache[layer][1][some]) for layer in layers or range(2)])


@pytest.mark.parametrize("size", [1, 16, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_pages_are_filled_and_stored(client: Client, device: str, dtype: str, layout: str, size: int) -> None:
    """Scattered pages; tokens without a slot, and slots of others, stay as they are."""
    spec, seed = spec_of(dtype), next(seeds)
    tokens, (kv, cache) = tokens_of(COUNT, seed), cache_on(device, spec, COUNT, seed)
    client.store(spec, tokens, kv).wait(10.0)
    page_count = -(-COUNT // size) + 3
    order = np.random.default_rng(seed).permutation(page_count)
    slots = np.array([order[token // size] * size + token % size for token in range(COUNT)])
    into = Paged(pages_of(device, LAYOUTS[layout], page_count, size, dtype), slots.copy(), LAYOUTS[layout])
    into.slots[5:9] = -1
    assert client.fetch(spec, tokens, into=into).token_count == COUNT
    here = into.slots >= 0
    others = np.setdiff1d(np.arange(page_count * size), slots[here])
    for page, arrays in zip(into.layers, cache, strict=True):
        for which, array in enumerate(arrays):
            rows = rows_of(page, LAYOUTS[layout], which).cpu()
            assert (unsigned(rows[slots[here]]) == array.transpose(1, 0, 2)[here]).all()
            assert is_poison(rows[others])
    whole = Paged(pages_of(device, LAYOUTS[layout], page_count, size, dtype), torch.from_numpy(slots), LAYOUTS[layout])
    assert client.fetch(spec, tokens, into=whole).token_count == COUNT
    again = tokens_of(COUNT, next(seeds))
    receipt = client.store(spec, again, whole)
    receipt.wait(10.0)
    assert receipt.stored_token_count == COUNT, receipt.reason
    same(client.fetch(spec, again, verify=True), cache)


@pytest.mark.parametrize("heads", [None, (0, 1)])
def test_some_layers_and_heads_of_pages(client: Client, device: str, heads: Any) -> None:
    spec, seed = spec_of(), next(seeds)
    kv, cache = cache_on(device, spec, 96, seed)
    client.store(spec, tokens_of(96, seed), kv).wait(10.0)
    pages = pages_of(device, LAYOUTS["NHD"], 6, 16, "bfloat16", 1 if heads else 2)[:1]
    order = np.random.default_rng(seed).permutation(6)
    slots = (order[:, None] * 16 + np.arange(16)).reshape(-1)
    found = client.fetch(spec, tokens_of(96, seed), into=Paged(pages, slots), layers=[1], heads=heads)
    assert found.token_count == 96
    for which in range(2):
        rows = rows_of(pages[0], LAYOUTS["NHD"], which).cpu()[slots]
        assert (unsigned(rows) == cache[1][which].transpose(1, 0, 2)[:, slice(*(heads or (0, 2)))]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_hidden_states_are_stored_from_a_gpu(client: Client, device: str, dtype: str) -> None:
    spec, seed = small_spec(hidden_dtype=dtype, model_id=f"gpu-e-{dtype}"), next(seeds)
    kv, cache = cache_on(device, spec, COUNT, seed)
    rows = np.random.default_rng(seed).integers(0, 255, (COUNT, 32 * (2 if dtype == "bfloat16" else 4)), np.uint8)
    hidden = on(device, rows.view(np.uint16 if dtype == "bfloat16" else np.uint32), dtype)
    client.store(spec, tokens_of(COUNT, seed), kv, hidden={1: hidden}).wait(10.0)
    found = client.fetch(spec, tokens_of(COUNT, seed), hidden_layers=[1])
    assert found.token_count == COUNT
    same(found, cache)
    assert (unsigned(found.hidden[1]) == unsigned(hidden)).all()


def test_e_in_the_place_of_kv(client: Client, device: str) -> None:
    spec, seed = small_spec(hidden_size=24, hidden_dtype="bfloat16", keeps_e=True, model_id="gpu-keeps-e"), next(seeds)
    rows = [np.random.default_rng(seed + each).integers(0, 1 << 16, (COUNT, 24), np.uint16) for each in range(2)]
    client.store(spec, tokens_of(COUNT, seed), [on(device, each, "bfloat16") for each in rows]).wait(10.0)
    into = [poisoned(device, (COUNT, 24), "bfloat16") for _ in range(2)]
    assert client.fetch(spec, tokens_of(COUNT, seed), into=into).token_count == COUNT
    assert all((unsigned(plane) == each).all() for plane, each in zip(into, rows, strict=True))


def test_layer_by_layer_from_a_gpu(client: Client, device: str) -> None:
    """An engine that stores each layer as soon as it has it."""
    spec, seed = spec_of(), next(seeds)
    kv, cache = cache_on(device, spec, COUNT, seed)
    writer = client.start_store(spec, tokens_of(COUNT, seed))
    for layer, (k, v) in enumerate(kv):
        writer.put_layer(layer, (k, v))
        k.fill_(0)  # it may be reused
        v.fill_(0)
    receipt = writer.commit()
    receipt.wait(10.0)
    assert receipt.stored_token_count == COUNT, receipt.reason
    same(client.fetch(spec, tokens_of(COUNT, seed), verify=True), cache)


def test_pinned_memory_of_the_host(client: Client, device: str) -> None:
    spec, seed = spec_of(), next(seeds)
    kv, cache = cache_on("cpu", spec, COUNT, seed)
    pinned = [tuple(plane.pin_memory() if device == "cuda" else plane for plane in pair) for pair in kv]
    client.store(spec, tokens_of(COUNT, seed), pinned).wait(10.0)
    into = [tuple(torch.full_like(plane, 7, pin_memory=device == "cuda") for plane in pair) for pair in kv]
    assert client.fetch(spec, tokens_of(COUNT, seed), into=into).token_count == COUNT
    same(into, cache)


def test_values_of_an_engines_own(client: Client, device: str) -> None:
    """Embeddings of an encoder, from a GPU."""
    spec, seed = spec_of(), next(seeds)
    rows = np.random.default_rng(seed).integers(0, 1 << 16, (17, 32), np.uint16)
    client.put_encoder(spec, f"image-{seed}", on(device, rows, "bfloat16")).wait(10.0)
    found = client.get_encoder(spec, f"image-{seed}")
    assert found is not None
    assert (unsigned(found) == rows).all()


# ---------------------------------------------------------------- pages


def pages_of(device: str, layout: str, page_count: int, size: int, dtype: str, heads: int = 2) -> list[torch.Tensor]:
    """Poisoned pages of two layers."""
    names = layout.split()
    extent = {"kv": 2, "page": page_count, "slot": size, "head": heads, "dim": 8 if "kv" in names else 16}
    return [poisoned(device, tuple(extent[name] for name in names), dtype) for _ in range(2)]


def rows_of(page: torch.Tensor, layout: str, which: int) -> torch.Tensor:
    """K or V of all slots, [slots, heads, dim], as plain integers: not every release can index float8 on a GPU."""
    page = page.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[page.element_size()])
    names = layout.split()
    if "kv" in names:
        page = page.select(names.index("kv"), which)
        names.remove("kv")
    else:
        page = page[..., 8 * which : 8 * which + 8]
    return page.permute([names.index(name) for name in ("page", "slot", "head", "dim")]).flatten(0, 1)
