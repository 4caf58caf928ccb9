"""A real vLLM: what one process computed another one loads, and says the same tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import connect
from kvstore_client.engines.vllm.hashes import block_hashes
from kvstore_ops.bench.throttled import ThrottledSidecar
from kvstore_ops.sidecar import Sidecar

from tests.vllm.engine import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
CHUNK = {"chunk_tokens": 64}
NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    }
}  # fmt: skip


NEEDS_AVX512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has caches of 8 bits on CPUs with AVX-512 only"
)


def prompt(count: int, seed: int = 0) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(5, 500, count)]


LONG = prompt(300)
SHORT = prompt(31, 1)
FORKED = LONG[:200] + prompt(150, 2)
PROMPTS = (LONG, SHORT, FORKED)


def wait_durable(sidecar: Sidecar, chunk_count: int) -> None:
    """Until that many chunks are on the device, synced."""
    until = time.monotonic() + 30.0
    with connect(sidecar.address) as client:
        while client.stats().counters["nvme_written_chunks"] < chunk_count:
            assert time.monotonic() < until, dict(client.stats().counters)
            time.sleep(0.05)


def leases_of(sidecar: Sidecar) -> tuple[int, int]:
    """(leases and reservations, tickets) that are held, which must be none once no engine is at work. A ticket of an
    engine that was killed expires."""
    with connect(sidecar.address) as client:
        until = time.monotonic() + 45.0
        while True:
            sessions = client.stats().sessions
            held = (sessions.lease_count + sessions.reservation_count, sessions.ticket_count)
            if held == (0, 0) or time.monotonic() > until:
                return held
            time.sleep(0.05)


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What vLLM says without kvstore and without its own prefix cache."""
    said = {}
    for name in ("llama", "qwen3", "gemma"):
        with Engine(models[name], None, enable_prefix_caching=False) as engine:
            said[name], cached = engine.ask(*PROMPTS)
            assert not any(cached)
    return said


@pytest.mark.parametrize(
    ("name", "load", "is_one_process"),
    [("llama", "async", False), ("qwen3", "layerwise", True), ("gemma", "async", True)],
)
def test_saved_in_one_process_hit_in_another(
    models: dict[str, Path], plain: dict[str, Any], durable: Sidecar, name: str, load: str, is_one_process: bool
) -> None:
    extra = {**CHUNK, "load": load}
    with connect(durable.address) as client:
        before = client.stats().counters["nvme_written_chunks"]
    own = {"extra": extra, "enable_prefix_caching": False}
    with Engine(models[name], durable.address, **own) as first:
        outputs, cached = first.ask(LONG)
        assert outputs == plain[name][:1]
        assert cached == [0]
        wait_durable(durable, before + 5)  # four chunks of 64 and a tail of 32
    durable.stop(kill=True)
    durable.start()
    with Engine(models[name], durable.address, is_one_process=is_one_process, **own) as second:
        outputs, cached = second.ask(*PROMPTS)
        assert cached == [288, 0, 192]  # whole blocks of 32; the fork shares three chunks
        assert outputs == plain[name]
        wait_durable(durable, 2)  # since its start
        outputs, cached = second.ask(*PROMPTS)
        assert cached == [288, 0, 320]  # what the fork added was kept, too; 31 tokens are less than a block
        assert outputs == plain[name]
        assert second.ask(LONG, salt="tenant")[1] == [0]  # a salt keeps its prompts apart
        wait_durable(durable, 7)
        assert second.ask(LONG, salt="tenant") == (plain[name][:1], [288])
        counted = second.counted
    assert counted["vllm:kvstore_load_tokens"] == second.loaded == 288 + 192 + 288 + 320 + 288
    assert (counted["vllm:kvstore_loads"], counted["vllm:kvstore_failed_loads"]) == (5, 0)
    assert counted["vllm:kvstore_saves"] >= 2
    assert counted["vllm:kvstore_load_bytes"] > 0
    assert leases_of(durable) == (0, 0)


@NEEDS_AVX512
@pytest.mark.parametrize(
    ("name", "load", "cache_dtype", "other"),
    [("qwen3", "async", "fp8", ("qwen3", "auto")), ("scaled", "layerwise", "auto", ("llama", "fp8"))],
)
def test_a_cache_of_8_bits_is_kept_with_its_scales(
    models: dict[str, Path], durable: Sidecar, name: str, load: str, cache_dtype: str, other: tuple[str, str]
) -> None:
    """``scaled``: its checkpoint gives the cache 8 bits, and scales. ``other``: the same weights, whose cache has
    another dtype, or other scales."""
    own: dict[str, Any] = {"kv_cache_dtype": cache_dtype, "enable_prefix_caching": False}
    mine = prompt(350, 50)
    prompts = mine, SHORT, mine[:200] + prompt(150, 51)
    with connect(durable.address) as client:
        before = client.stats().counters["nvme_written_chunks"]
    with Engine(models[name], None, **own) as engine:
        said, _ = engine.ask(*prompts)
    shared = {"extra": {**CHUNK, "load": load}, **own}
    with Engine(models[other[0]], durable.address, **{**shared, "kv_cache_dtype": other[1]}) as engine:
        assert engine.ask(mine)[0] != said[:1], "what the cache holds is not the same"
        wait_durable(durable, before + 5)  # chunks of 64
    with Engine(models[name], durable.address, **shared) as engine:
        assert engine.ask(mine) == (said[:1], [0])
        wait_durable(durable, before + 10)
    durable.stop(kill=True)
    durable.start()
    with Engine(models[name], durable.address, **shared) as engine:
        assert engine.ask(*prompts) == (said, [320, 0, 192])
    assert leases_of(durable) == (0, 0)


def test_chunks_by_vllms_own_hashes(models: dict[str, Path], plain: dict[str, Any], durable: Sidecar) -> None:
    """Who has vLLM's hashes of a prompt's blocks knows its chunks by them; engines share as they do otherwise."""
    own = {"extra": {**CHUNK, "digests": "vllm"}, "prefix_caching_hash_algo": "sha256_cbor"}
    own["enable_prefix_caching"] = False
    hashes = block_hashes(LONG, 32)
    with connect(durable.address) as client, client.watch() as events:
        with Engine(models["llama"], durable.address, **own) as engine:
            assert engine.ask(LONG) == (plain["llama"][:1], [0])  # what others call otherwise is not found
            stored = [next(events) for _ in range(5)]
        assert [each.digest for each in stored] == [*hashes[1::2], hashes[8]]  # four chunks of 64 and a tail of 32
        assert {each.model_id.partition("#")[2] for each in stored} == {"vllm-sha256_cbor-9bd96a48"}
        with Engine(models["llama"], durable.address, **own) as engine:
            assert engine.ask(*PROMPTS) == (plain["llama"], [288, 0, 192])
            assert engine.ask(LONG, salt="tenant") == (plain["llama"][:1], [0])
            assert engine.ask(LONG, salt="tenant")[1] == [288]
    assert leases_of(durable) == (0, 0)


def test_two_models_never_share(models: dict[str, Path], plain: dict[str, Any], durable: Sidecar) -> None:
    with Engine(models["llama"], durable.address, extra=CHUNK, enable_prefix_caching=False) as engine:
        engine.ask(LONG)
        assert engine.ask(LONG)[1] == [288]
    with Engine(models["other"], durable.address, extra=CHUNK, enable_prefix_caching=False) as engine:
        outputs, cached = engine.ask(LONG)
        assert cached == [0]
        assert outputs != plain["llama"][:1]
        assert engine.ask(LONG) == (outputs, [288])
        engine.kill(*PROMPTS, *(prompt(300, seed) for seed in range(40, 60)))
    assert leases_of(durable) == (0, 0)  # and nothing of an engine that was killed stays


def test_the_sidecar_dies_and_comes_back_under_a_running_engine(models: dict[str, Path], plain: dict[str, Any]) -> None:
    said = plain["llama"][:1]
    with Sidecar("--capacity", "64 MiB", nvme="128 MiB") as sidecar:
        with Engine(models["llama"], sidecar.address, extra=CHUNK, enable_prefix_caching=False) as engine:
            assert engine.ask(LONG) == (said, [0])
            wait_durable(sidecar, 5)
            assert engine.ask(LONG) == (said, [288])
            sidecar.stop(kill=True)
            assert engine.ask(LONG) == (said, [0])
            assert "going on without it" in engine.log()
            sidecar.start()
            time.sleep(1.0)  # a client asks again half a second after it was refused
            assert engine.ask(LONG) == (said, [288])


def test_an_engine_starts_without_its_sidecar(models: dict[str, Path], plain: dict[str, Any], tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/kvstore.sock"
    with Engine(models["llama"], address, extra=CHUNK, enable_prefix_caching=False) as engine:
        assert engine.ask(*PROMPTS) == (plain["llama"], [0, 0, 0])


@pytest.mark.parametrize(("load", "more"), [("async", {}), ("layerwise", {}), ("layerwise", NGRAM)])
def test_a_load_that_fails_is_computed(
    models: dict[str, Path], plain: dict[str, Any], durable: Sidecar, load: str, more: dict[str, Any]
) -> None:
    """Its ticket is taken away between the lookup and the fetch. With drafts vLLM asks for failures before it says that
    the step has ended."""
    extra = {**CHUNK, "load": load}
    with Engine(models["llama"], durable.address, extra=extra, enable_prefix_caching=False) as engine:
        engine.ask(LONG)
    broken = {"kv_connector": "BreakingConnector", "kv_connector_module_path": "tests.vllm.breaking"}
    own = {"enable_prefix_caching": False, **more}
    with Engine(models["llama"], durable.address, extra=extra, connector=broken, **own) as engine:
        for _ in range(2):
            outputs, _cached = engine.ask(*PROMPTS)
            assert outputs == plain["llama"]
        assert "the prompt is computed" in engine.log()
    with Engine(models["llama"], durable.address, extra=extra, enable_prefix_caching=False) as engine:
        assert engine.ask(*PROMPTS)[0] == plain["llama"]  # nothing wrong was kept
    assert leases_of(durable) == (0, 0)


def test_chunked_prefill_preemption_and_vllms_own_prefix_cache(models: dict[str, Path], durable: Sidecar) -> None:
    prompts = [LONG[:96] + prompt(200, seed) for seed in range(10, 14)]
    with Engine(models["qwen3"], None, enable_prefix_caching=False) as engine:
        said = [engine.ask(each, max_tokens=60)[0][0] for each in prompts]
    small = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 128, "max_model_len": 512}
    for round_number in range(2):
        with Engine(models["qwen3"], durable.address, extra=CHUNK, **small) as engine:
            outputs, cached = engine.ask(*prompts, max_tokens=60)
            assert outputs == said
            if round_number:
                assert min(cached) >= 256
            outputs, _ = engine.ask(*reversed(prompts), max_tokens=60)
            assert outputs == said[::-1]
            assert engine.preemptions > 0
    assert leases_of(durable) == (0, 0)


def test_an_attention_that_ignores_what_is_loaded_is_refused(models: dict[str, Path], durable: Sidecar) -> None:
    """vLLM's latent attention on CPUs computes whole prompts only."""
    with pytest.raises(RuntimeError, match=r"CPU_MLA cannot go on after a prefix|AMX_MLA cannot go on after a prefix"):
        Engine(models["latent"], durable.address).__enter__()


def test_adapters_never_share(models: dict[str, Path], adapters: dict[str, Path], durable: Sidecar) -> None:
    options = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}
    prompt_of_its_own = prompt(300, 30)
    with Engine(models["llama"], durable.address, extra=CHUNK, **options) as engine:
        said = []
        for lora in (None, str(adapters["one"]), str(adapters["two"])):
            outputs, cached = engine.ask(prompt_of_its_own, lora=lora)
            assert cached == [0]
            assert engine.ask(prompt_of_its_own, lora=lora) == (outputs, [288])
            said.append(outputs)
        assert said[0] != said[1] != said[2] != said[0]


def test_two_ranks_read_what_one_kept_and_back(models: dict[str, Path], plain: dict[str, Any]) -> None:
    options = {"extra": CHUNK, "enable_prefix_caching": False}
    with Sidecar("--capacity", "64 MiB", nvme="128 MiB") as sidecar:
        with Engine(models["llama"], sidecar.address, **options) as engine:
            assert engine.ask(LONG) == (plain["llama"][:1], [0])
        two = {"tensor_parallel_size": 2, "is_one_process": False}
        with Engine(models["llama"], sidecar.address, **options, **two) as engine:
            assert engine.ask(LONG) == (plain["llama"][:1], [288])
            assert engine.ask(FORKED) == (plain["llama"][2:], [192])
            wait_durable(sidecar, 7)
            assert engine.ask(FORKED) == (plain["llama"][2:], [320])
        with Engine(models["llama"], sidecar.address, **options) as engine:
            assert engine.ask(FORKED) == (plain["llama"][2:], [320])
        assert leases_of(sidecar) == (0, 0)


def test_ranks_that_have_the_same_heads_keep_them_once(models: dict[str, Path], plain: dict[str, Any]) -> None:
    options = {"extra": CHUNK, "enable_prefix_caching": False}
    with Sidecar("--capacity", "64 MiB", nvme="128 MiB") as sidecar:
        four = {"tensor_parallel_size": 4, "is_one_process": False}
        with Engine(models["llama"], sidecar.address, **options, **four) as engine:
            assert engine.ask(LONG) == (plain["llama"][:1], [0])
            wait_durable(sidecar, 5)
        with Engine(models["llama"], sidecar.address, **options) as engine:
            assert engine.ask(FORKED) == (plain["llama"][2:], [192])
            wait_durable(sidecar, 7)
        with Engine(models["llama"], sidecar.address, **options, **four) as engine:
            assert engine.ask(LONG) == (plain["llama"][:1], [288])
            assert engine.ask(FORKED) == (plain["llama"][2:], [320])
        assert leases_of(sidecar) == (0, 0)


def test_an_engine_that_plans_says_the_same(models: dict[str, Path], plain: dict[str, Any]) -> None:
    """Before it was measured it loads all that is stored, however slow the device is. Then it has measured steps and
    loads, and computes what only the device has. What it says is the same either way."""
    own = {"enable_prefix_caching": False}
    with ThrottledSidecar("--capacity", "64 MiB", nvme="128 MiB") as slow:
        with Engine(models["llama"], slow.address, extra=CHUNK, **own) as first:
            first.ask(*PROMPTS)
        slow.stop()
        slow.set_rate(1e6)
        slow.start()  # with all chunks on its device, and none in memory
        with Engine(models["llama"], slow.address, extra={**CHUNK, "planning": "on"}, **own) as second:
            outputs, cached = second.ask(LONG)
            assert (outputs, cached) == (plain["llama"][:1], [288])
            for seed in range(4):  # what computing takes
                second.ask(prompt(100 + 100 * seed, 100 + seed), max_tokens=1)
            outputs, cached = second.ask(*PROMPTS)
            assert outputs == plain["llama"]
            stored = (288, 0, 192)
            assert [count in range(0, most + 1, 32) for count, most in zip(cached, stored, strict=True)] == [
                True
            ] * 3, cached
        assert leases_of(slow) == (0, 0)
