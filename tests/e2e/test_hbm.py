"""A pool in the host's memory in the place of a GPU's: what was fetched once comes from there: right bytes or none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged, connect
from kvstore_client.cuda import lanes, launches, mirror
from kvstore_client.planes.shared_memory import pool as pools
from kvstore_client.planes.shared_memory.resident import ResidentPrefix
from kvstore_kernels.gpu.strips import TableLaunch
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from kvstore.handoff.messages import DeviceAnswer
from kvstore.seams.devices import driver
from kvstore.seams.devices.cuda import MappedRegion
from kvstore.seams.mapping import SharedMap
from kvstore.spec import ModelSpec, Tier
from kvstore.v1 import cache_pb2 as pb
from tests.kernels.device import triton_here
from tests.seams.cuda import compiled
from tests.server.raw import eventually
from tests.specs import random_cache, same, small_spec, tokens_of

SPEC = small_spec()
COUNT = 48


def environment(capacity: str, device: str = "cpu") -> dict[str, str]:
    return {**os.environ, "KVSTORE__TIERS__HBM__CAPACITY_BYTES": capacity, "KVSTORE__TIERS__HBM__DEVICE": device}


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "16 MiB", environment=environment("4 MiB")) as running:
        yield running


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, timeout_s=5.0) as connected:
        connected.lookup(SPEC, tokens_of(16, 1))
        eventually(lambda: connected.connect_now().presence.is_there)
        yield connected


def stored(client: Client, seed: int, count: int = COUNT, spec: ModelSpec = SPEC) -> tuple[np.ndarray, list]:
    tokens, cache = tokens_of(count, seed), random_cache(spec, count, seed)
    client.store(spec, tokens, cache).wait(10)
    return tokens, cache


def hbm_of(client: Client) -> object:
    return next(each for each in client.stats().tiers if each.name == "hbm")


def brought(client: Client, tokens: np.ndarray) -> None:
    """Fetch until all of it comes from the pool."""
    eventually(lambda: client.fetch(SPEC, tokens).tier is Tier.HBM)


def test_the_second_fetch_is_served_from_the_pool(client: Client) -> None:
    tokens, cache = stored(client, 1)
    first = client.fetch(SPEC, tokens)
    assert first.tier is Tier.DRAM
    assert same(first, cache)
    brought(client, tokens)
    for _ in range(3):  # with a call, and then without one
        found = client.fetch(SPEC, tokens)
        assert found.tier is Tier.HBM
        assert found.token_count == COUNT
        assert same(found, cache)


def test_the_bytes_come_from_the_pool_and_from_nowhere_else(
    sidecar: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proven by a copy in which another byte lies."""
    tokens, cache = stored(client, 2)
    brought(client, tokens)
    found = pools.DevicePool.found

    def other(self: pools.DevicePool, chunk: object, place: pb.DevicePlace) -> object:
        near = found(self, chunk, place)
        near.extents[0] = near.extents[0] ^ 1
        object.__setattr__(near, "home", None)
        return near

    monkeypatch.setattr(pools.DevicePool, "found", other)
    with connect(sidecar.address) as fresh:
        got = fresh.fetch(SPEC, tokens)
        assert got.tier is Tier.HBM
        assert not same(got, cache)
        assert same(fresh.fetch(SPEC, tokens, verify=True), cache)  # what is verified is not taken from the pool


def test_layers_pages_tickets_and_parts_of_a_cache(client: Client) -> None:
    tokens, cache = stored(client, 3)
    brought(client, tokens)
    layers = client.fetch_layers(SPEC, tokens)
    assert layers.tier is Tier.HBM
    assert same([entry for _, entry in layers], cache)
    layer = SPEC.layers[0]
    pages = [torch.full((2, COUNT // 8, 8, layer.kv_heads, layer.k_dim), 7, dtype=torch.bfloat16) for _ in SPEC.layers]
    order = np.random.default_rng(1).permutation(COUNT // 8)
    slots = (order[:, None] * 8 + np.arange(8)).reshape(-1)
    match = client.lookup(SPEC, tokens, hold=True)
    client.start_fetch(match.ticket, into=Paged(pages, slots)).wait(10)
    flat = [page.flatten(1, 2)[:, slots].transpose(1, 2) for page in pages]
    assert same(flat, cache)
    some = client.fetch(SPEC, tokens, layers=[1], heads=(1, 2))
    assert some.tier is Tier.HBM
    assert same(some, [tuple(plane[1:2] for plane in cache[1])])


def test_what_leaves_memory_leaves_the_pool(sidecar: Sidecar, client: Client) -> None:
    tokens, _ = stored(client, 4)
    brought(client, tokens)
    before = hbm_of(client).chunk_count
    assert before
    with connect(sidecar.address) as other:
        for seed in range(40, 60):  # more than memory has room for
            stored(other, seed, 100 * 16)
    assert client.fetch(SPEC, tokens).token_count == 0
    assert hbm_of(client).chunk_count == 0


def test_eviction_under_fetches_never_shows_other_bytes(sidecar: Sidecar) -> None:
    """Several clients fetch more than the pool has room for, while chunks come and go."""
    failures: list[str] = []

    def fetches(seed: int) -> None:
        with connect(sidecar.address, timeout_s=10.0) as client:
            chains = [stored(client, 1000 * (seed + 1) + number, 10 * 16) for number in range(8)]
            for number in range(120):
                tokens, cache = chains[number * 7 % 8]
                found = client.fetch(SPEC, tokens)
                expected = [tuple(plane[:, : found.token_count] for plane in layer) for layer in cache]
                if not same(found, expected):
                    failures.append(f"{seed} {number} {found.tier}")

    threads = [threading.Thread(target=fetches, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


def test_a_copy_that_leaves_the_pool_under_a_fetch_is_asked_for_again(
    sidecar: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lease nothing holds it: its generation says that it went, and a call brings the right bytes."""
    tokens, cache = stored(client, 5)
    brought(client, tokens)
    assert client.fetch(SPEC, tokens).tier is Tier.HBM
    calls: list[object] = []
    opened, settled = type(client.connect_now()).open_prefix, ResidentPrefix.settle

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return opened(*arguments)

    def goes(self: ResidentPrefix, bad: set[int]) -> int:
        """The copy has ended; other chains take the pool before its generation is read."""
        monkeypatch.setattr(ResidentPrefix, "settle", settled)
        with connect(sidecar.address) as other:
            for seed in range(50, 62):  # more than the pool has room for, and less than memory
                brought(other, stored(other, seed, 40 * 16)[0])
        monkeypatch.setattr(type(client.connect_now()), "open_prefix", counted)
        good = settled(self, bad)
        assert good == 0
        return good

    monkeypatch.setattr(ResidentPrefix, "settle", goes)
    found = client.fetch(SPEC, tokens)
    assert len(calls) == 1
    assert found.token_count == COUNT
    assert same(found, cache)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a GPU, for clients that connect from now on."""

    def opened(answer: DeviceAnswer, descriptors: Sequence[int], device: str) -> pools.DevicePool:
        generations = SharedMap(descriptors[0], answer.generations_bytes, writable=False).bytes
        memory = torch.from_numpy(SharedMap(descriptors[1], answer.byte_count, writable=False).bytes)
        return pools.DevicePool(mirror.DeviceBytes(memory, 0, answer.byte_count), generations)

    monkeypatch.setattr("kvstore_client.planes.shared_memory.mapped.opened_pool", opened)
    as_tensors_of_a_gpu(monkeypatch)


def as_tensors_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "gpu_of", lambda plane: plane.device)
    monkeypatch.setattr("kvstore_client.fetch.given._alike", lambda *_: None)


def test_a_pool_that_only_torch_reaches(sidecar: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU, for which the CPU stands in."""

    spec = small_spec()
    tokens, cache = stored(client, 6, 90)
    brought(client, tokens)
    on_a_gpu(monkeypatch)
    layer = spec.layers[0]
    with connect(sidecar.address) as fresh:
        shape = (layer.kv_heads, 100, layer.k_dim)
        into = [tuple(torch.full(shape, 7, dtype=torch.bfloat16) for _ in "KV") for _ in spec.layers]
        assert fresh.fetch(SPEC, tokens, into=into).tier is Tier.HBM
        assert same([tuple(plane[:, :90] for plane in each) for each in into], cache)
        assert all(bool((plane[:, 90:] == 7).all()) for each in into for plane in each)
        one = tuple(torch.full((1, 90, layer.k_dim), 7, dtype=torch.bfloat16) for _ in "KV")
        assert fresh.fetch(SPEC, tokens, layers=[1], heads=(1, 2), into=[one]).tier is Tier.HBM
        assert same([one], [tuple(plane[1:2] for plane in cache[1])])
        for planes in into:
            for plane in planes:
                plane.fill_(7)
        assert [number for number, _ in fresh.fetch_layers(SPEC, tokens, into=into)] == [0, 1]
        assert same([tuple(plane[:, :90] for plane in each) for each in into], cache)
        for size in (8, 16, 5):
            count = -(-90 // size)
            pages = [torch.full((2, count, size, layer.kv_heads, layer.k_dim), 7, dtype=torch.bfloat16) for _ in cache]
            order = np.random.default_rng(size).permutation(count)
            slots = (order[:, None] * size + np.arange(size)).reshape(-1)[:90]
            assert fresh.fetch(SPEC, tokens, into=Paged(pages, slots)).tier is Tier.HBM
            assert same([page.flatten(1, 2)[:, slots].transpose(1, 2) for page in pages], cache)


@pytest.mark.parametrize("size", [8, 16, 5])
@pytest.mark.parametrize("layout", ["kv page slot head dim", "page kv head slot dim"])
@pytest.mark.parametrize("serves", [True, False], ids=["by a kernel", "by torch"])
def test_pages_at_once(
    sidecar: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch, layout: str, size: int, serves: bool
) -> None:
    """All layers at once, some of them, and one after another; tokens without a slot are left out."""
    made: list[str] = []

    plain = TableLaunch.run

    def run(self: TableLaunch, *arguments: Any) -> bool:
        made.append(self.program)
        return serves and plain(self, *arguments)

    tokens, cache = stored(client, 600 + 2 * size + len(layout) + 100 * serves, 90)
    brought(client, tokens)
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(launches, "can_launch", lambda _: True)
    monkeypatch.setattr(TableLaunch, "run", run)
    layer, count = SPEC.layers[0], -(-90 // size)
    axes = {"kv": 2, "page": count, "slot": size, "head": layer.kv_heads, "dim": layer.k_dim}
    names = layout.split()
    order = np.random.default_rng(size).permutation(count)
    slots = (order[:, None] * size + np.arange(size)).reshape(-1)[:90]
    slots[:7] = -1
    written = np.zeros(count * size, bool)
    written[slots[7:]] = True

    def pages_of(layers: Sequence[int]) -> Paged:
        return Paged(
            [torch.full([axes[name] for name in names], 7, dtype=torch.bfloat16) for _ in layers], slots, layout
        )

    def check(paged: Paged, layers: Sequence[int]) -> None:
        axes_first = [names.index(name) for name in ("kv", "head", "page", "slot", "dim")]
        flat = [each.permute(axes_first).flatten(2, 3) for each in paged.layers]
        assert same([each[:, :, slots[7:]] for each in flat], [[p[:, 7:] for p in cache[number]] for number in layers])
        assert all(bool((each[:, :, ~written] == 7).all()) for each in flat)

    with triton_here(), connect(sidecar.address) as fresh:
        for layers in ([0, 1], [1]):
            paged = pages_of(layers)
            found = fresh.fetch(SPEC, tokens, into=paged, layers=layers)
            assert (found.tier, found.token_count) == (Tier.HBM, 90)
            check(paged, layers)
        paged = pages_of([0, 1])
        for _ in fresh.fetch_layers(SPEC, tokens, into=paged):
            pass
        check(paged, [0, 1])
    assert made[:4] == [launches.ARRIVE] * 4, "two fetches of whole chunks and a tail"


class TorchOfStandIn:
    """torch, for memory of a stand-in for the driver: by its address."""

    @staticmethod
    def device(*given: object) -> object:
        return given

    @staticmethod
    def as_tensor(region: MappedRegion, device: object) -> torch.Tensor:
        (address, _), (size,) = (region.__cuda_array_interface__[each] for each in ("data", "shape"))
        found = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
        kept.append((region, found))
        return found


kept: list[object] = []


def test_a_pool_by_a_cuda_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar allocates and fills by the driver's calls, and the client maps by them: here those of a stand-in."""
    own = {**environment("4 MiB", "cuda:0"), "LD_LIBRARY_PATH": str(compiled(tmp_path))}
    running = Sidecar("--capacity", "16 MiB", environment=own)
    running.launch = subprocess.Popen  # a fork of this process would not look for the library there
    monkeypatch.setattr(driver, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    monkeypatch.setattr("kvstore_client.planes.shared_memory.pool.torch_module", lambda: TorchOfStandIn)
    monkeypatch.setattr("kvstore_client.fetch.calls.device_of", lambda into: "cpu" if into is None else "cuda:0")
    as_tensors_of_a_gpu(monkeypatch)
    driver.driver.cache_clear()
    into = [tuple(torch.zeros((2, 90, 8), dtype=torch.bfloat16) for _ in "KV") for _ in SPEC.layers]
    with running:
        with connect(running.address, timeout_s=5.0) as client:
            tokens, cache = stored(client, 8, 90)
            eventually(lambda: client.fetch(SPEC, tokens, into=into).tier is Tier.HBM)
            for _ in range(2):
                for plane in (each for pair in into for each in pair):
                    plane.zero_()
                assert client.fetch(SPEC, tokens, into=into).tier is Tier.HBM
                assert same(into, cache)
            owned = client.fetch(SPEC, tokens)
            assert owned.tier is Tier.DRAM  # on another device than the pool
            assert same(owned, cache)
            (pool,) = (each for each in client.connect_now()._pools.values() if each is not None)
            pool._memory._tensor.zero_()  # as any client of a GPU can
            assert same(client.fetch(SPEC, tokens, into=into, verify=True), cache)
            running.stop(kill=True)
            assert client.fetch(SPEC, tokens, into=into).token_count in (0, 90)
    driver.driver.cache_clear()


def test_a_driver_that_hangs_at_the_start_holds_up_no_stop(tmp_path: Path) -> None:
    (tmp_path / "cuInit").touch()
    own = {"LD_LIBRARY_PATH": str(compiled(tmp_path)), "KVSTORE_STAND_IN_HANGS": str(tmp_path)}
    command = [sys.executable, "-m", "kvstore_ops.cli", "serve", "--capacity", "16 MiB", "--nvme", "0"]
    command += ["--state-directory", str(tmp_path / "state"), "--socket-directory", str(tmp_path / "run")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env={**environment("4 MiB", "cuda:0"), **own}, stdout=log, stderr=log)
    try:
        eventually((tmp_path / "cuInit.hung").exists)
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert "told to stop before the start was over" in (tmp_path / "log").read_text()


def test_without_a_gpu_the_service_runs_and_names_the_setting() -> None:
    with Sidecar("--capacity", "16 MiB", environment=environment("4 MiB", "cuda:0")) as running:
        with connect(running.address) as client:
            tokens, cache = stored(client, 1)
            assert same(client.fetch(SPEC, tokens), cache)
            problem = client.stats().tier_problem
            assert "tiers.hbm.device" in problem
            assert "tiers.hbm.capacity_bytes = 0" in problem


def test_a_pool_larger_than_memory_is_refused() -> None:
    with pytest.raises(Unavailable, match=r"tiers\.hbm\.capacity_bytes"):
        with Sidecar("--capacity", "16 MiB", environment=environment("17 MiB")):
            pass


def test_a_pool_that_cannot_be_mapped_costs_nothing_else(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise Unavailable("the driver says no")

    monkeypatch.setattr("kvstore_client.planes.shared_memory.mapped.opened_pool", refused)
    with connect(sidecar.address) as client:
        tokens, cache = stored(client, 77)
        for _ in range(3):
            found = client.fetch(SPEC, tokens)
            assert found.tier is Tier.DRAM
            assert same(found, cache)
    assert caplog.text.count("cannot be used here") == 1
