"""A sidecar that dies, a fork after CUDA began, and tensors that do not fit: an answer or a clear error, soon."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from kvstore_client import MissReason, Paged, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.spec import Durability
from tests.conftest import ROOT
from tests.gpu.tensors import cache_on, long_kernel, poisoned, same, seeds
from tests.specs import small_spec, tokens_of

pytestmark = pytest.mark.gpu

SPEC = small_spec(model_id="gpu-faults")
COUNT = 90


def test_a_sidecar_that_is_gone_is_a_miss_and_an_error(own_sidecar: Sidecar, device: str) -> None:
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    with connect(own_sidecar.address, timeout_s=5.0) as client:
        client.store(SPEC, tokens_of(COUNT, seed), kv).wait(10.0)
        match = client.lookup(SPEC, tokens_of(COUNT, seed), hold=True)
        own_sidecar.stop(kill=True)
        into = [
            (poisoned(device, (2, COUNT, 8), "bfloat16"), poisoned(device, (2, COUNT, 8), "bfloat16")) for _ in "01"
        ]
        transfer = client.start_fetch(match.ticket, into=into)
        try:
            transfer.wait(20.0)
            same(into, cache)  # its memory is still mapped here
        except KVStoreError:
            assert transfer.is_done
        found = client.fetch(SPEC, tokens_of(COUNT, seed), into=into)
        if found.token_count:
            same(into, cache)
        else:
            assert found.reason is MissReason.UNAVAILABLE
        receipt = client.store(SPEC, tokens_of(COUNT, next(seeds)), kv)
        assert receipt.wait(10.0) is Durability.NONE


def test_a_sidecar_that_dies_in_the_middle(own_sidecar: Sidecar, device: str) -> None:
    """Whatever has come by then: nothing is called good that is not."""
    spec, seed = small_spec(model_id="gpu-large", chunk_tokens=64), next(seeds)
    kv, cache = cache_on(device, spec, 4096, seed)
    with connect(own_sidecar.address, timeout_s=5.0) as client:
        client.store(spec, tokens_of(4096, seed), kv).wait(10.0)
        into = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
        long_kernel(device)
        transfer = client.start_fetch_prefix(spec, tokens_of(4096, seed), into=into)
        assert own_sidecar.process is not None
        own_sidecar.process.kill()
        try:
            transfer.wait(20.0)
        except KVStoreError:
            return
        if transfer.token_count == 4096:
            same(into, cache)


FORK = """
import faulthandler, os, sys
import numpy as np, torch
from kvstore.errors import KVStoreError
from kvstore_client import connect
from tests.gpu.tensors import DEVICE, cache_on, same
from tests.specs import small_spec, tokens_of
spec = small_spec(model_id="gpu-fork")
client = connect(sys.argv[1])
kv, cache = cache_on(DEVICE, spec, 90, 1)
client.store(spec, tokens_of(90), kv).wait(10.0)
into = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
assert client.fetch(spec, tokens_of(90), into=into).token_count == 90
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(20.0, exit=True)
    same(client.fetch(spec, tokens_of(90)), cache)
    host = [(torch.zeros(k.shape, dtype=k.dtype), torch.zeros(v.shape, dtype=v.dtype)) for k, v in kv]
    assert client.fetch(spec, tokens_of(90), into=host).token_count == 90
    same(host, cache)
    try:
        client.fetch(spec, tokens_of(90), into=into)
        assert DEVICE == "cpu", "CUDA does not work in a fork"
    except (KVStoreError, RuntimeError) as error:
        assert "CUDA" in str(error), error
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
same(into, cache)
assert client.fetch(spec, tokens_of(90), into=into).token_count == 90
same(into, cache)
client.close()
print("well")
"""


def test_a_fork_after_cuda_began(device: str) -> None:
    """The child has a client that works with memory of the host, and torch's clear error for a GPU's."""
    with Sidecar("--capacity", "32 MiB") as sidecar:
        command = [sys.executable, "-c", FORK, sidecar.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "well"


def test_what_does_not_fit_is_named_and_nothing_is_written(own_sidecar: Sidecar, device: str) -> None:
    seed = next(seeds)
    kv, _ = cache_on(device, SPEC, COUNT, seed)
    with connect(own_sidecar.address) as client:
        client.store(SPEC, tokens_of(COUNT, seed), kv).wait(10.0)
        wrong = [(poisoned(device, (2, COUNT, 8), "float16"), poisoned(device, (2, COUNT, 8), "float16")) for _ in "01"]
        with pytest.raises(InvalidRequest, match="float16"):
            client.fetch(SPEC, tokens_of(COUNT, seed), into=wrong)
        short = [(poisoned(device, (2, 9, 8), "bfloat16"), poisoned(device, (2, 9, 8), "bfloat16")) for _ in "01"]
        with pytest.raises(InvalidRequest):
            client.fetch(SPEC, tokens_of(COUNT, seed), into=short)
        same_memory = poisoned(device, (2, COUNT, 8), "bfloat16")
        with pytest.raises(InvalidRequest):
            client.fetch(SPEC, tokens_of(COUNT, seed), into=[(same_memory, same_memory)] * 2)
        pages = [poisoned(device, (2, 4, 16, 2, 8), "bfloat16") for _ in range(2)]
        with pytest.raises(InvalidRequest, match="slot"):
            client.fetch(SPEC, tokens_of(COUNT, seed), into=Paged(pages, np.arange(COUNT)))
