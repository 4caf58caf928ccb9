"""The pool on a GPU: filled by use, copied on the device, each bit; and what becomes of it when its sidecar dies.

Where there is no GPU the pool is in the host's memory, which proves the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, KVStoreError, Unavailable
from kvstore.spec import LayerSpec, ModelSpec, Tier
from tests.specs import bits, random_cache, small_spec, tokens_of

pytestmark = pytest.mark.gpu

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if HAS_GPU else "cpu"
SPEC = small_spec(layers=(LayerSpec(kv_heads=4, k_dim=64, v_dim=64),) * 3, model_id="hbm")
COUNT = 90
WAIT_S = 30.0
seeds = count(7000)


class PooledSidecar(Sidecar):
    """A sidecar with a context of CUDA: never a fork of a process that may have one."""

    launch = subprocess.Popen

    def __init__(self) -> None:
        own = {"KVSTORE__TIERS__HBM__CAPACITY_BYTES": "16 MiB", "KVSTORE__TIERS__HBM__DEVICE": DEVICE}
        super().__init__("--capacity", "64 MiB", environment={**os.environ, **own})


@pytest.fixture(scope="module")
def pooled() -> Iterator[Sidecar]:
    with PooledSidecar() as running:
        yield running


@pytest.fixture
def reader(pooled: Sidecar) -> Iterator[Client]:
    with connect(pooled.address, timeout_s=10.0) as connected:
        yield connected


def stored(client: Client, token_count: int = COUNT, spec: ModelSpec = SPEC) -> tuple[Any, list[Any]]:
    seed = next(seeds)
    tokens, cache = tokens_of(token_count, seed), random_cache(spec, token_count, seed)
    receipt = client.store(spec, tokens, cache)
    receipt.wait(10)
    assert receipt.stored_token_count == token_count, receipt.reason
    return tokens, cache


def planes(token_count: int, spec: ModelSpec = SPEC) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Poisoned planes on the device."""

    def plane(heads: int, dim: int) -> torch.Tensor:
        return torch.full((heads, token_count, dim), -1, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)

    return [(plane(each.kv_heads, each.k_dim), plane(each.kv_heads, each.v_dim)) for each in spec.layers]


def pages(token_count: int, size: int, layout: str, spec: ModelSpec = SPEC) -> tuple[Paged, Callable[[int], Any]]:
    """Poisoned pages in random order, and a function that reads a layer's K and V out of them."""
    layer, page_count = spec.layers[0], -(-token_count // size)
    axes = {"kv": 2, "page": page_count, "slot": size, "head": layer.kv_heads, "dim": layer.k_dim}
    names = layout.split()
    shape = [axes[name] for name in names]
    memory = [torch.full(shape, -1, dtype=torch.int16, device=DEVICE).view(torch.bfloat16) for _ in spec.layers]
    order = np.random.default_rng(size).permutation(page_count)
    slots = (order[:, None] * size + np.arange(size)).reshape(-1)[:token_count]

    def read(number: int) -> Any:
        whole = memory[number].permute([names.index(name) for name in ("kv", "head", "page", "slot", "dim")])
        flat = whole.flatten(2, 3)[:, :, torch.from_numpy(slots).to(DEVICE)]
        return flat[0], flat[1]

    return Paged(memory, slots, layout), read


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for number, (pair, kept) in enumerate(zip(found, expected, strict=True)):
        for plane, array, name in zip(pair, kept, "KV", strict=True):
            there = bits(plane.detach().cpu().contiguous())
            assert there.shape == array.shape, (number, name, there.shape, array.shape)
            assert (there == bits(array)).all(), f"layer {number}, {name}"


def brought(client: Client, tokens: Any, token_count: int = COUNT) -> None:
    """Fetch until all of it comes from the pool."""
    until = time.monotonic() + WAIT_S
    while client.fetch(SPEC, tokens, into=planes(token_count)).tier is not Tier.HBM:
        assert time.monotonic() < until, client.stats().tier_problem or "it was never copied to the device"
        time.sleep(0.02)


def test_the_second_fetch_stays_on_the_device(reader: Client) -> None:
    tokens, cache = stored(reader)
    into = planes(COUNT)
    assert reader.fetch(SPEC, tokens, into=into).tier is Tier.DRAM
    same(into, cache)
    brought(reader, tokens)
    for _ in range(3):
        into = planes(COUNT + 5)
        found = reader.fetch(SPEC, tokens, into=into)
        assert (found.tier, found.token_count) == (Tier.HBM, COUNT)
        same([(k[:, :COUNT], v[:, :COUNT]) for k, v in into], cache)
        assert all(bool((plane[:, COUNT:].view(torch.int16) == -1).all()) for pair in into for plane in pair)


@pytest.mark.parametrize("size", [8, 16, 5, 32])
@pytest.mark.parametrize("layout", ["kv page slot head dim", "page kv head slot dim"])
def test_pages(reader: Client, layout: str, size: int) -> None:
    tokens, cache = stored(reader)
    brought(reader, tokens)
    paged, read = pages(COUNT, size, layout)
    assert reader.fetch(SPEC, tokens, into=paged).tier is Tier.HBM
    same([read(number) for number in range(len(SPEC.layers))], cache)


def test_layer_by_layer_by_ticket_and_some_heads(reader: Client) -> None:
    tokens, cache = stored(reader)
    brought(reader, tokens)
    into = planes(COUNT)
    for number, entry in reader.fetch_layers(SPEC, tokens, into=into):
        same([entry], [cache[number]])
    paged, read = pages(COUNT, 16, "kv page slot head dim")
    match = reader.lookup(SPEC, tokens, hold=True)
    transfer = reader.start_fetch(match.ticket, into=paged)
    transfer.wait(10)
    same([read(number) for number in range(len(SPEC.layers))], cache)
    some = [tuple(plane[1:3] for plane in pair) for pair in planes(COUNT)][:1]
    assert reader.fetch(SPEC, tokens, layers=[2], heads=(1, 3), into=some).tier is Tier.HBM
    same(some, [tuple(plane[1:3] for plane in cache[2])])


def test_what_is_verified_and_what_goes_to_the_host_comes_from_memory(reader: Client) -> None:
    tokens, cache = stored(reader)
    brought(reader, tokens)
    checked = planes(COUNT)
    assert reader.fetch(SPEC, tokens, into=checked, verify=True).tier is Tier.DRAM
    same(checked, cache)
    owned = reader.fetch(SPEC, tokens)
    assert owned.tier is (Tier.DRAM if HAS_GPU else Tier.HBM)
    same(owned, cache)


def test_a_reader_behind_a_long_kernel_gets_the_bytes(reader: Client) -> None:
    """The caller's stream is busy, and writes the memory before the fetch does."""
    tokens, cache = stored(reader)
    brought(reader, tokens)
    into = planes(COUNT)
    if HAS_GPU:
        torch.cuda._sleep(50_000_000)
    for pair in into:
        for plane in pair:
            plane.zero_()
    reader.fetch(SPEC, tokens, into=into)
    same([tuple(plane.clone() for plane in pair) for pair in into], cache)


def test_fetches_of_more_than_the_pool_has_room_for(pooled: Sidecar) -> None:
    failures: list[str] = []

    def fetches() -> None:
        try:
            with connect(pooled.address, timeout_s=20.0) as client:
                chains = [stored(client, 160) for _ in range(5)]
                for number in range(40):
                    tokens, cache = chains[number * 3 % 5]
                    into = planes(160)
                    found = client.fetch(SPEC, tokens, into=into)
                    assert found.token_count == 160
                    same(into, cache)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=fetches) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


def test_a_sidecar_that_dies_under_its_readers() -> None:
    """What is mapped stays there, and nothing hangs: the next fetches are misses, and a new sidecar serves."""
    with PooledSidecar() as running:
        with connect(running.address, timeout_s=5.0) as client:
            tokens, cache = stored(client)
            brought(client, tokens)
            os.kill(running.pid, signal.SIGKILL)
            began = time.monotonic()
            into = planes(COUNT)
            try:
                found = client.fetch(SPEC, tokens, into=into)
            except KVStoreError:
                pass
            else:
                same([(k[:, : found.token_count], v[:, : found.token_count]) for k, v in into],
                     [(k[:, : found.token_count], v[:, : found.token_count]) for k, v in cache])  # fmt: skip
            assert time.monotonic() - began < 15
        running.stop(kill=True)
        running.start()
        with connect(running.address, timeout_s=5.0) as client:
            tokens, cache = stored(client)
            brought(client, tokens)
            into = planes(COUNT)
            assert client.fetch(SPEC, tokens, into=into).tier is Tier.HBM
            same(into, cache)


def test_what_another_client_wrote_there_is_not_verified_as_right(reader: Client) -> None:
    if not HAS_GPU:
        pytest.skip("the host's memory is mapped read-only: nothing can be written there")
    tokens, cache = stored(reader)
    brought(reader, tokens)
    (pool,) = (each for each in reader.connect_now()._pools.values() if each is not None)
    pool._memory._tensor.zero_()
    torch.cuda.synchronize()
    into = planes(COUNT)
    assert reader.fetch(SPEC, tokens, into=into, verify=True).tier is Tier.DRAM
    same(into, cache)


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_regions_of_a_device() -> None:
    """Written from the host, mapped by its descriptor, read by torch; and refused beyond the device's memory."""
    from kvstore.seams.devices.cuda import CudaDevice, MappedRegion, device_identity

    device = CudaDevice(0)
    assert device.identity == device_identity(0)
    with pytest.raises((Exhausted, Unavailable)):
        device.allocate(1 << 42)
    region = device.allocate(3 << 20)
    random = np.random.default_rng(1)
    pieces = [random.integers(0, 256, size, dtype=np.uint8) for size in (4096, 100_000, 1)]
    region.write(8192, pieces)
    back = np.empty(sum(each.size for each in pieces), np.uint8)
    region.read(8192, back)
    assert back.tobytes() == b"".join(each.tobytes() for each in pieces)
    mapped = MappedRegion(0, region.descriptor, region.byte_count)
    tensor = torch.as_tensor(mapped, device="cuda:0")
    assert tensor.data_ptr() == mapped.__cuda_array_interface__["data"][0]
    assert tensor[8192 : 8192 + back.size].cpu().numpy().tobytes() == back.tobytes()
    region.close()  # the exporter is gone: the mapping stays
    assert tensor[8192 : 8192 + back.size].cpu().numpy().tobytes() == back.tobytes()
    del tensor, mapped
    torch.cuda.synchronize()
