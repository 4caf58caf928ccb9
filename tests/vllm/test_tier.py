"""The secondary tier: under a real vLLM engine and its real tiering manager, with a stand-in for the copies between
pages and CPU cache, which vLLM has for GPUs only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_client.engines.vllm.tier import KVStoreTier
from kvstore_ops.sidecar import Sidecar
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.errors import InvalidRequest
from tests.vllm.engine import Engine
from tests.vllm.test_end_to_end import FORKED, LONG, NEEDS_AVX512, leases_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROW = 4096


def offloading(address: str, weights: str) -> dict[str, Any]:
    """vLLM's own connector, a CPU cache of a few blocks, and the tier behind it."""
    tier = {
        "type": "KVStoreTier", "module_path": "kvstore_client.engines.vllm.tier", "address": address,
        "weights_digest": weights,
    }  # fmt: skip
    extra = {
        "spec_name": "OnACpu", "spec_module_path": "tests.vllm.offload_cpu", "cpu_bytes_to_use": 1 << 20,
        "secondary_tiers": [tier],
    }  # fmt: skip
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("cache_dtype", ["auto", pytest.param("fp8", marks=NEEDS_AVX512)])
def test_what_one_engine_offloaded_another_has(models: dict[str, Path], durable: Sidecar, cache_dtype: str) -> None:
    def engine(weights: str) -> Engine:
        own = {"kv_transfer_config": offloading(durable.address, weights), "kv_cache_dtype": cache_dtype}
        return Engine(models["llama"], None, **own)

    with engine("unverified:tiny") as first:
        said, cached = first.ask(LONG)
        assert cached == [0]
        forked, _ = first.ask(FORKED)
        first.ask([7] * 64)  # a step more: vLLM offloads a step later
    with connect(durable.address) as client:
        assert client.stats().counters["store_committed_bytes"] > 0
    with engine("unverified:tiny") as second:
        assert second.ask(LONG) == (said, [288])  # nine whole blocks of 32
        assert second.ask(FORKED) == (forked, [320])
        durable.stop(kill=True)
        assert second.ask([9] * 300)[1] == [0]  # without its sidecar it goes on
        durable.start()
        assert "going on without it" in second.log()
    for trouble in ("BufferError", "Failed to close mmap", "Failed to shut down"):
        assert trouble not in second.log()
    assert "Removed mmap file" in second.log()
    with engine("unverified:other") as third:
        assert third.ask(LONG) == (said, [0])
    assert leases_of(durable) == (0, 0)


# ---------------------------------------------------------------- the tier by itself, on vLLM's classes


def spec(**changes: Any) -> Any:
    """What vLLM tells a tier."""
    parallel = SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    config = {
        "model": SimpleNamespace(name="tiny", dtype="float16"),
        "groups": [SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("a", "b"))],
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1), "worker_kv_bytes_per_block": ROW,
        "kv_cache_layout": "NHD", "replicated_layout": False, "canonical_layout": False, "parallel": parallel,
    }  # fmt: skip
    return SimpleNamespace(config=SimpleNamespace(**{**config, **changes}))


class Primary:
    """A CPU cache of eight rows, and a tier below it."""

    def __init__(self, address: str, offloading_spec: Any = None, **options: Any) -> None:
        self.rows = np.zeros((8, ROW), np.int8)
        self.jobs = 0
        config = {
            "type": "KVStoreTier", "module_path": "kvstore_client.engines.vllm.tier", "address": address,
            "weights_digest": "ab" * 16, **options,
        }  # fmt: skip
        self.tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(self.rows), offloading_spec or spec())
        self.context = ReqContext("a")

    def look(self, key: bytes) -> LookupResult:
        """As a scheduler asks: again at each step."""
        while self.tier.lookup(key, self.context) is LookupResult.RETRY:
            self.tier.on_schedule_end(None)
        return self.tier.lookup(key, self.context)

    def move(self, keys: list[bytes], rows: list[int], *, is_load: bool) -> Any:
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.asarray(rows), is_load, self.context)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def close(self) -> None:
        self.tier.shutdown()


KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(8)]


def test_blocks_go_and_come_back(durable: Sidecar) -> None:
    first, second = Primary(durable.address), Primary(durable.address)
    first.rows[:3] = np.random.default_rng(0).integers(-128, 127, (3, ROW))
    assert first.look(KEYS[0]) is LookupResult.MISS
    stored = first.move(KEYS[:3], [0, 1, 2], is_load=False)
    assert (stored.success, stored.transfer_bytes) == (True, 3 * ROW)
    assert [second.look(key) for key in KEYS[1:3]] == [LookupResult.HIT] * 2
    loaded = second.move([KEYS[2], KEYS[0]], [5, 6], is_load=True)
    assert loaded.success
    assert np.array_equal(second.rows[[5, 6]], first.rows[[2, 0]])
    assert not second.rows[[0, 1, 2, 3, 4, 7]].any()
    for each in (first, second):
        each.close()


def test_a_load_that_fails_is_a_miss_of_what_is_missing(durable: Sidecar) -> None:
    primary = Primary(durable.address, weights_digest="unverified:partly")
    primary.move(KEYS[:1], [0], is_load=False)
    assert primary.look(KEYS[1]) is LookupResult.MISS
    partly = primary.move(KEYS[:2], [3, 4], is_load=True)
    assert (partly.success, partly.successful_keys) == (False, (KEYS[0],))
    durable.stop(kill=True)
    assert primary.look(KEYS[2]) is LookupResult.MISS
    assert not primary.move(KEYS[2:4], [0, 1], is_load=False).success
    assert primary.move(KEYS[:1], [3], is_load=True).successful_keys is None
    assert primary.look(KEYS[0]) is LookupResult.MISS  # not asked for again and again
    durable.start()
    primary.close()
    primary.close()


def test_what_the_bytes_depend_on_keeps_them_apart(durable: Sidecar) -> None:
    primary = Primary(durable.address, weights_digest="unverified:apart")
    primary.move(KEYS[:1], [0], is_load=False)
    plain = spec().config
    changes: list[dict[str, Any]] = [
        {"kv_cache_layout": "HND"},
        {"model": SimpleNamespace(name="tiny", dtype="bfloat16")},
        {"model": SimpleNamespace(name="tiny", dtype="fp8")},
        {"cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1)},
        {"parallel": SimpleNamespace(**{**vars(plain.parallel), "tp_size": 2})},
        {"groups": [SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("b", "a"))]},
    ]
    for change in changes:
        other = Primary(durable.address, spec(**change), weights_digest="unverified:apart")
        assert other.look(KEYS[0]) is LookupResult.MISS
        other.close()
    other = Primary(
        durable.address,
        spec(model=SimpleNamespace(name="elsewhere", dtype="float16")),
        weights_digest="unverified:apart",
    )
    assert other.look(KEYS[0]) is LookupResult.HIT  # a path is not whose weights they are
    assert other.look(make_offload_key(bytes(16), 0)) is LookupResult.MISS  # a hash that collides names nothing
    other.close()
    primary.close()


def test_what_is_refused(durable: Sidecar) -> None:
    for changed, said in (
        ({"weights_digest": None}, "weights_digest is missing"),
        (
            {"offloading_spec": spec(model=SimpleNamespace(name="t", dtype="fp8_e5m2"))},
            "--kv-cache-dtype fp8, or auto",
        ),
        ({"adress": "x"}, "adress is not a setting"),
        ({"timeout_s": 0}, "timeout_s 0"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            Primary(durable.address, **changed)


def test_an_unknown_interface_is_refused(durable: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit_store(self: Any, job_metadata: Any, priority: int) -> None: ...

    assert issubclass(KVStoreTier, SecondaryTierManager)
    monkeypatch.setattr(SecondaryTierManager, "submit_store", submit_store)
    with pytest.raises(InvalidRequest, match=r"SecondaryTierManager .*submit_store takes \(job_metadata, priority\)"):
        Primary(durable.address)
