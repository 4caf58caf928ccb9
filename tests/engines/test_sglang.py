"""The HiCache backend against a stand-in of SGLang's side, on a real sidecar; tests/sglang has SGLang's own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_client.engines.sglang import page_hashes
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.engines import sglang_pages
from tests.engines.hicache import HostPool, LatentPool, StorageConfig, Transfer, load, prefetch

VECTORS = [
    "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea",
    "4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a",
    "9c9217b40433137e8a734787cbb1fa92045602840c3ab29539366f8ffe21ec2f",
]
"""Printed by ``python -m tests.engines.sglang_pages``: tokens 0..47, pages of 16."""


@contextmanager
def backend(sidecar: Sidecar, pool: Any, **changes: Any) -> Iterator[Any]:
    extra = {
        "backend_name": "kvstore", "module_path": "kvstore_client.engines.sglang", "class_name": "KVStoreHiCache",
        "interface_v1": 1, "socket": sidecar.address, **changes.pop("extra", {}),
    }  # fmt: skip
    made = load(StorageConfig(extra_config=extra, **changes), pool)
    try:
        yield made
    finally:
        made.close()


def keys_of(count: int, seed: int) -> list[str]:
    return sglang_pages.page_hashes(range(seed, seed + 4 * count), 4)


def test_page_hashes_are_sglangs() -> None:
    assert page_hashes(range(48), 16) == VECTORS == sglang_pages.page_hashes(range(48), 16)
    assert page_hashes(range(40), 16) == VECTORS[:2]
    assert page_hashes(range(16, 48), 16, VECTORS[0]) == VECTORS[1:]
    assert page_hashes([], 16) == []


@pytest.mark.parametrize(
    "pool", [HostPool, lambda: HostPool("layer_first"), lambda: HostPool(dtype=torch.float32), LatentPool]
)
def test_pages_go_and_come_back_into_another_pool(sidecar: Sidecar, pool: Any) -> None:
    source, target = pool(), pool()
    is_mla = isinstance(source, LatentPool)
    if is_mla:
        source.kv_buffer.copy_(torch.randn(source.kv_buffer.shape))
    else:
        source.fill(1)
    keys = keys_of(6, 100)
    with backend(sidecar, source, is_mla_model=is_mla) as one, backend(sidecar, target, is_mla_model=is_mla) as other:
        assert one.batch_exists(keys) == 0
        assert one.batch_get_v1(keys, target.indices(*range(6)), None) == [False] * 6
        assert one.batch_set_v1(keys[:5], source.indices(7, 1, 4, 0, 11), None) == [True] * 5
        assert other.batch_exists(keys) == 5
        assert other.exists(keys[4])
        assert not other.exists(keys[5])
        places = [3, 9, 2, 10, 5, 6]
        assert prefetch(other, keys, target.indices(*places), 4) == 20
        for place, origin in zip(places, (7, 1, 4, 0, 11), strict=False):
            assert torch.equal(target.page(place * 4), source.page(origin * 4))
        untouched = [page for page in range(12) if page not in places]
        assert all(not target.page(page * 4).any() for page in untouched)


def test_a_hole_ends_what_counts_and_later_pages_still_come(sidecar: Sidecar) -> None:
    pool = HostPool()
    pool.fill(2)
    keys = keys_of(5, 1000)
    with backend(sidecar, pool) as one:
        assert one.batch_set_v1([keys[0], keys[1], keys[3]], pool.indices(0, 1, 3), None) == [True] * 3
        assert one.batch_exists(keys) == 2
        target = HostPool()
        one.register_mem_pool_host(target)
        assert one.batch_get_v1(keys, target.indices(0, 1, 2, 3, 4), None) == [True, True, False, True, False]
        assert torch.equal(target.page(12), pool.page(12))


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "org/other"}, {"tp_rank": 1, "tp_size": 2}, {"pp_rank": 1, "pp_size": 2},
        {"extra": {"weights_digest": "ab" * 32}}, {"extra": {"kv_cache_dtype": "fp8_e5m2"}},
        {"dcp_rank": 1, "dcp_size": 2},
    ],
)  # fmt: skip
def test_another_model_rank_or_weights_never_share(sidecar: Sidecar, other: dict[str, Any]) -> None:
    pool = HostPool()
    keys = keys_of(2, 2000)
    with backend(sidecar, pool) as one, backend(sidecar, HostPool(), **other) as another:
        assert all(one.batch_set_v1(keys, pool.indices(0, 1), None))
        assert another.batch_exists(keys) == 0


def test_two_digests_of_weights_never_share(sidecar: Sidecar) -> None:
    """Of one model's name, as behind a change of its files."""
    pool, keys = HostPool(), keys_of(2, 2500)
    one, two = ({"extra": {"weights_digest": digits * 32}} for digits in ("ab", "cd"))
    with backend(sidecar, pool, **one) as before, backend(sidecar, HostPool(), **two) as after:
        assert all(before.batch_set_v1(keys, pool.indices(0, 1), None))
        assert after.batch_exists(keys) == 0
    with backend(sidecar, HostPool(), **one) as again:
        assert again.batch_exists(keys) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: HostPool(dtype=torch.float16), lambda: HostPool("layer_first"), lambda: HostPool(page_size=2),
        lambda: HostPool(start_layer=8),
    ],
)  # fmt: skip
def test_another_dtype_layout_page_size_or_stage_never_shares(sidecar: Sidecar, other: Any) -> None:
    pool = HostPool()
    keys = keys_of(2, 3000)
    with backend(sidecar, pool) as one, backend(sidecar, other()) as another:
        assert all(one.batch_set_v1(keys, pool.indices(0, 1), None))
        assert another.batch_exists(keys) == 0


def test_engines_that_compute_in_another_dtype_never_share(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the pool has one of its own, as float8 is."""
    settings, keys, pool = SimpleNamespace(dtype="float16"), keys_of(1, 3400), HostPool()
    monkeypatch.setattr("kvstore_client.engines.sglang._settings", lambda: settings)
    with backend(sidecar, pool) as one:
        assert one.batch_set_v1(keys, pool.indices(0), None) == [True]
    with backend(sidecar, pool) as again:
        assert again.batch_exists(keys) == 1
    settings.dtype = "bfloat16"
    with backend(sidecar, pool) as other:
        assert other.batch_exists(keys) == 0


ELSEWHERE = (
    "model_loader_extra_config", "modelopt_checkpoint_restore_path", "kt_weight_path",
    "remote_instance_weight_loader_seed_instance_ip", "remote_instance_weight_loader_seed_instance_service_port",
    "modelexpress_config", "weight_cache_mode", "weight_cache_socket",
)  # fmt: skip
"""Settings of SGLang by which weights come from elsewhere than the model's path."""
COMPUTED = (
    "enable_quant_communications", "decrypted_config_file", "kt_method", "kt_num_gpu_experts",
    "kt_max_deferred_experts_per_token", "model_impl", "model_config_parser", "forward_hooks", "rl_on_policy_target",
    "enable_deterministic_inference", "enable_tf32_matmul", "prefill_kv_cache_dequant_dtype",
    "deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type", "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay", "enable_deepseek_v4_fp4_indexer", "enable_precise_embedding_interpolation",
    "enable_mamba_cache_stochastic_rounding",
)  # fmt: skip
DRAFTED = (
    "speculative_draft_window_size", "speculative_draft_sink_size", "decrypted_draft_config_file",
    "speculative_draft_load_format", "speculative_enable_w4a4_mxfp4_megamoe",
)  # fmt: skip


@pytest.mark.parametrize("vouched", [{}, {"weights_digest": "ab" * 32}])
def test_engines_whose_settings_make_other_numbers_of_one_model_never_share(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, vouched: dict[str, str]
) -> None:
    """``weights_digest`` vouches for the weights, wherever they come from, and for nothing that is done with them."""
    settings, keys, pool = SimpleNamespace(), keys_of(1, 3450), HostPool()
    monkeypatch.setattr("kvstore_client.engines.sglang._settings", lambda: settings)

    def is_there(made: Any, name: str) -> bool:
        made.register_mem_host_pool_v2(pool, name)
        return made.batch_get_v2([Transfer(name, keys, pool.indices(1))]) == {name: [True]}

    with backend(sidecar, pool, extra=vouched) as one:
        for name in ("kv", "draft"):
            one.register_mem_host_pool_v2(pool, name)
            assert one.batch_set_v2([Transfer(name, keys, pool.indices(0))]) == {name: [True]}
    shared = {}
    for setting in (*ELSEWHERE, *COMPUTED, *DRAFTED):
        vars(settings)[setting] = "other"
        with backend(sidecar, pool, extra=vouched) as other:
            shared[setting] = [name for name in ("kv", "draft") if is_there(other, name)]
        del vars(settings)[setting]
    assert [shared[setting] for setting in ELSEWHERE] == len(ELSEWHERE) * [["kv", "draft"] if vouched else []]
    assert not any(shared[setting] for setting in COMPUTED)
    assert [shared[setting] for setting in DRAFTED] == len(DRAFTED) * [["kv"]]


def test_a_pool_of_plain_bytes_needs_their_dtype(sidecar: Sidecar) -> None:
    """SGLang keeps both kinds of float8 as plain bytes, and the pool does not say which."""
    pool = HostPool(dtype=torch.uint8)
    with pytest.raises(InvalidRequest, match="kv_cache_dtype"), backend(sidecar, pool):
        pass
    with backend(sidecar, pool, extra={"kv_cache_dtype": "fp8_e4m3"}) as one:
        assert all(one.batch_set_v1(keys_of(1, 3500), pool.indices(0), None))


def test_each_pool_has_pages_of_its_own(sidecar: Sidecar) -> None:
    pool, beside, target = HostPool(), HostPool(), HostPool()
    pool.fill(4)
    beside.fill(5)
    keys = keys_of(3, 3700)
    with backend(sidecar, pool) as one:
        one.register_mem_host_pool_v2(beside, "swa")
        assert all(one.batch_set_v1(keys, pool.indices(0, 1, 2), None))
        saved = Transfer("swa", keys[1:], beside.indices(4, 5))
        assert one.batch_set_v2([saved]) == {"swa": [True, True]}
    with backend(sidecar, HostPool()) as other:
        other.register_mem_host_pool_v2(target, "swa")
        loaded = Transfer("swa", keys, target.indices(7, 8, 9))
        assert other.batch_get_v2([loaded, Transfer("mamba", keys, None)]) == {
            "swa": [False, True, True], "mamba": [False] * 3,
        }  # fmt: skip
        assert torch.equal(target.page(32), beside.page(16))
        assert torch.equal(target.page(36), beside.page(20))


def test_what_a_thread_has_to_keep_when_the_weights_are_replaced_is_not_kept(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's thread that keeps pages goes on until the cache is flushed; the weights have another name before."""
    pool, keys, page = HostPool(), keys_of(3, 3800), torch.zeros(16)
    pool.fill(6)
    with backend(sidecar, pool) as one, ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as next_thread:
        assert thread.submit(one.batch_set_v1, keys[:1], pool.indices(0), None).result() == [True]
        monkeypatch.setattr("kvstore_client.engines.sglang._weight_version", lambda: "step-1")
        assert thread.submit(one.batch_set_v1, keys[:2], pool.indices(0, 1), None).result() == [False] * 2
        assert thread.submit(one.batch_set_v2, [Transfer("kv", keys[:1], pool.indices(0))]).result() == {"kv": [False]}
        assert not thread.submit(one.set, keys[0], page).result()
        assert one.batch_exists(keys) == 0
        assert next_thread.submit(one.batch_set_v1, keys, pool.indices(0, 1, 2), None).result() == [True] * 3
        assert thread.submit(one.batch_exists, keys).result() == 3


def test_weights_that_are_replaced_for_ever_leave_room_for_the_models_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of older weights stay until memory is short, and a namespace with pages keeps its place."""
    environment = {**os.environ, "KVSTORE__LIMITS__MODEL_COUNT_MAX": "2"}
    pool, keys = HostPool(), keys_of(2, 4200)
    with Sidecar("--capacity", "32 MiB", environment=environment) as own:
        for number in range(4):
            monkeypatch.setattr("kvstore_client.engines.sglang._weight_version", lambda number=number: f"step-{number}")
            with backend(own, pool) as one:
                for _ in range(2):
                    assert one.batch_exists(keys) == 0
                    assert one.batch_set_v1(keys, pool.indices(0, 1), None) == [True] * 2
                    assert one.batch_exists(keys) == 2
                    one.clear()
        with backend(own, pool, model_name="org/other") as other:
            assert other.batch_set_v1(keys, pool.indices(0, 1), None) == [True] * 2


def test_states_of_an_mla_model_are_each_ranks_own(sidecar: Sidecar) -> None:
    keys, ranks = keys_of(1, 3900), {"is_mla_model": True, "tp_size": 2}
    pool = HostPool()
    with (
        backend(sidecar, LatentPool(), tp_rank=0, **ranks) as one,
        backend(sidecar, LatentPool(), tp_rank=1, **ranks) as two,
    ):
        for each in (one, two):
            each.register_mem_host_pool_v2(pool, "mamba")
        assert one.batch_set_v2([Transfer("mamba", keys, pool.indices(0))]) == {"mamba": [True]}
        assert two.batch_get_v2([Transfer("mamba", keys, pool.indices(0))]) == {"mamba": [False]}


def test_ranks_of_an_mla_model_share(sidecar: Sidecar) -> None:
    pool = LatentPool()
    keys = keys_of(2, 4000)
    ranks = {"is_mla_model": True, "tp_size": 2}
    with backend(sidecar, pool, tp_rank=0, **ranks) as one, backend(sidecar, LatentPool(), tp_rank=1, **ranks) as two:
        assert all(one.batch_set_v1(keys, pool.indices(0, 1), None))
        assert two.batch_exists(keys) == 2


def test_the_older_calls_with_tensors(sidecar: Sidecar) -> None:
    with backend(sidecar, HostPool()) as one:
        page = torch.randn(50).to(torch.bfloat16)
        assert one.set("a", page)
        assert one.batch_set(["b", "c"], [page + 1, page + 2])
        place = torch.zeros(50, dtype=torch.bfloat16)
        assert one.get("a", place) is place
        assert torch.equal(place, page)
        assert torch.equal(one.get("a").view(torch.bfloat16), page)
        places = [torch.zeros(50, dtype=torch.bfloat16) for _ in range(3)]
        found = one.batch_get(["b", "x", "c"], places)
        assert found[1] is None
        assert torch.equal(found[0], page + 1)
        assert torch.equal(found[2], page + 2)
        assert one.get("a", torch.zeros(49, dtype=torch.bfloat16)) is None  # a page of another size is none
        assert one.batch_set(["d"], []) is False
        large = torch.randn(1_500_000)  # of two chunks
        assert one.batch_set(["large", "large"], [large, large])
        assert one.set("large", large)
        assert torch.equal(one.get("large", torch.zeros(1_500_000)), large)
        assert one.batch_exists(["a", "large", "b", "x", "c"]) == 3
        one.clear()  # whoever replaced the weights calls it
        assert not one.exists("a")
        assert one.set("a", page)
        assert one.exists("a")


def test_wrong_indices_and_an_unnamed_model_are_said(sidecar: Sidecar, caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool()
    with backend(sidecar, pool) as one:
        assert one.batch_get_v1(["k"], pool.indices(0, 1), None) == [False]
        assert "8 host indices for 1 pages" in caplog.text
        assert one.batch_set_v1([], pool.indices(), None) == []
    with pytest.raises(InvalidRequest, match="model"), backend(sidecar, pool, model_name=None):
        pass


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"weight_digest": "ab" * 32}, "weight_digest is not a field"),
        ({"weights_digest": 12345678}, "weights_digest cannot be 12345678"),
        ({"weights_digest": "the new ones"}, "hex digits"),
        ({"socket": 9500}, "socket cannot be 9500"),
        ({"kv_cache_dtype": ["fp8_e5m2"]}, "kv_cache_dtype cannot be"),
    ],
)
def test_a_wrong_field_is_refused_by_name(sidecar: Sidecar, extra: dict[str, Any], said: str) -> None:
    """Without the digest that its user thinks it has, a model would share pages with others of its name."""
    with pytest.raises(InvalidRequest, match=said), backend(sidecar, HostPool(), extra=extra):
        pass


def test_fields_that_sglang_reads_itself_are_its_own(sidecar: Sidecar) -> None:
    extra = {"prefetch_threshold": 64, "prefetch_timeout_base": 1, "weights_digest": "", "kv_cache_dtype": None}
    with backend(sidecar, HostPool(), extra=extra) as one:
        assert not one.exists("k")


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([-4, -3, -2, -1], "outside of the pool"),
        ([48, 49, 50, 51], "outside of the pool"),
        ([46, 47, 48, 49], "outside of the pool"),
        ([0, 1, 2, 4], "4 tokens in a row"),
        ([0, 0, 0, 0], "4 tokens in a row"),
        ([0.0, 1.0, 2.0, 3.0], "whole numbers"),
        ([[0, 1], [2, 3]], "whole numbers"),
        ([True, False, True, True], "whole numbers"),
    ],
)
def test_indices_that_are_no_page_of_the_pool_touch_no_memory(
    sidecar: Sidecar, caplog: pytest.LogCaptureFixture, indices: Any, said: str
) -> None:
    """The pool answers with addresses, whatever it is asked: what lies there would be stored, or written over."""

    class Asked(HostPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            pytest.fail("the pool was asked where they lie")

    with backend(sidecar, Asked()) as one:
        assert one.batch_set_v1(["k"], torch.tensor(indices), None) == [False]
        assert one.batch_get_v1(["k"], torch.tensor(indices), None) == [False]
        assert said in caplog.text


def test_without_its_sidecar_pages_are_missing_and_come_back_with_it(own_sidecar: Sidecar) -> None:
    pool = HostPool()
    keys = keys_of(2, 5000)
    with backend(own_sidecar, pool) as one:
        own_sidecar.stop(kill=True)
        assert one.batch_set_v1(keys, pool.indices(0, 1), None) == [False, False]
        assert one.batch_get_v1(keys, pool.indices(0, 1), None) == [False, False]
        assert one.batch_exists(keys) == 0
        own_sidecar.start()
        from tests.server.raw import eventually

        eventually(lambda: one.batch_set_v1(keys, pool.indices(0, 1), None) == [True, True])
        assert one.batch_exists(keys) == 2


def test_a_long_prompt_of_small_pages_is_looked_up_at_once(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks per page, and a page may be one token: what takes the square of their number takes seconds."""
    names = SimpleNamespace(KV="kv")
    module: Any = SimpleNamespace(PoolName=names, PoolTransferResult=lambda *told: told)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", module)
    with backend(sidecar, HostPool()) as one:
        monkeypatch.setattr(one, "batch_exists", len)
        monkeypatch.setattr(one._calls, "has", lambda _namespace, keys: [True] * (len(keys) - 1) + [False])
        window = SimpleNamespace(name="swa", keys=["one"], hit_policy="trailing_pages")
        began_s = time.monotonic()
        found = one.batch_exists_v2(["key"] * 16_000, [window])
        assert time.monotonic() - began_s < 1.0
        assert found == (15_999, {"kv": 16_000, "swa": 15_999}, list(range(1, 16_000)))
