"""Regions of a device: what is written there is there, for whoever maps it, as long as anybody does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import Exhausted, Unavailable
from kvstore.seams import SystemMemory
from kvstore.seams.devices import DeviceRegion, HostDevice, driver
from kvstore.seams.devices.cuda import CudaDevice, MappedRegion, device_identity, ordinal_of
from tests.seams.cuda import compiled

OFFSET = 8192


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda")) / "libcuda.so.1"


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[driver.Driver]:
    monkeypatch.setattr(driver, "LIBRARY", str(library))
    driver.driver.cache_clear()
    yield driver.driver()
    driver.driver.cache_clear()


def moved(region: DeviceRegion) -> bytes:
    """Write some pieces, and read them back."""
    random = np.random.default_rng(1)
    whole = random.integers(0, 256, 200_000, dtype=np.uint8)
    pieces = [whole[:4096], whole[4096:9000], whole[100_000:], random.integers(0, 256, 1, dtype=np.uint8)]
    region.write(OFFSET, pieces)
    back = np.empty(sum(each.size for each in pieces), np.uint8)
    region.read(OFFSET, back)
    assert back.tobytes() == b"".join(each.tobytes() for each in pieces)
    return back.tobytes()


def at(mapped: MappedRegion, byte_count: int) -> bytes:
    address, _ = mapped.__cuda_array_interface__["data"]
    return ctypes.string_at(address + OFFSET, byte_count)


def test_the_host_in_the_place_of_a_device() -> None:
    region = HostDevice(SystemMemory()).allocate(1 << 20)
    there = moved(region)
    assert os.pread(region.descriptor, len(there), OFFSET) == there
    region.close()
    region.close()


def test_a_region_is_mapped_by_its_descriptor_and_outlives_its_owner(cuda: driver.Driver) -> None:
    device = CudaDevice(ordinal_of("cuda:0"))
    assert device.identity == device_identity(0) == "cuda:" + "a0" * 16
    region = device.allocate(3 << 20)
    assert region.byte_count == 4 << 20
    assert not os.get_inheritable(region.descriptor)
    there = moved(region)
    mapped = MappedRegion(0, region.descriptor, region.byte_count)
    assert mapped.__cuda_array_interface__["shape"] == (4 << 20,)
    assert at(mapped, len(there)) == there
    region.close()
    region.close()
    assert at(mapped, len(there)) == there


def test_a_thread_has_its_own_context_again_afterwards(cuda: driver.Driver) -> None:
    cuda.call("cuCtxSetCurrent", 0x5000)
    region = CudaDevice(0).allocate(1)
    moved(region)
    assert cuda.number("cuCtxGetCurrent", ctypes.c_void_p) == 0x5000
    region.close()
    assert cuda.number("cuCtxGetCurrent", ctypes.c_void_p) == 0x5000
    cuda.call("cuCtxSetCurrent", None)


def test_what_a_driver_refuses_is_a_typed_error_and_leaves_nothing(cuda: driver.Driver) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Exhausted, match="no memory left"):
        CudaDevice(0).allocate(1 << 40)
    with pytest.raises(Unavailable, match="cuDeviceGet"):
        CudaDevice(7)
    with pytest.raises(Unavailable, match="cuMemImport"):
        MappedRegion(0, 1 << 20, 1 << 20)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_region_without_a_stream_leaves_nothing(cuda: driver.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    before, number = set(os.listdir("/proc/self/fd")), cuda.number

    def refused(name: str, *arguments: Any) -> Any:
        if name == "cuStreamCreate":
            raise Exhausted("no memory left for a stream")
        return number(name, *arguments)

    monkeypatch.setattr(cuda, "number", refused)
    with pytest.raises(Exhausted):
        CudaDevice(0).allocate(1)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["libcuda-that-is-not-there.so.1", "libc.so.6"])
def test_without_a_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", name)
    driver.driver.cache_clear()
    with pytest.raises(Unavailable, match="no CUDA driver"):
        CudaDevice(0)
    driver.driver.cache_clear()


def test_a_fork_unmaps_nothing(cuda: driver.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    region = CudaDevice(0).allocate(1)
    calls: list[Any] = []
    monkeypatch.setattr(cuda, "call", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    region.close()
    assert not calls
