"""The HiCache backend under SGLang's own controller, host pools and hashes, over a real sidecar. No GPU: what copies
between device and host pools is not run."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_client.engines.sglang import KVStoreHiCache, page_hashes
from kvstore_client.engines.sglang_settings import OF_DRAFTS, OF_ENGINE, OF_WEIGHTS
from kvstore_ops.sidecar import Sidecar
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.utils import get_storage_hash_str, storage_namespace_seed
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from tests.sglang.engine import PAGE, WAIT_S, attention, engine, hashes, key_of, latent


def test_page_hashes_are_sglangs() -> None:
    tokens = range(70, 70 + 5 * PAGE)
    assert page_hashes(tokens, PAGE) == hashes(tokens)
    seed = storage_namespace_seed("adapter", None)
    assert page_hashes(tokens, PAGE, seed) == hashes(tokens, "adapter") != hashes(tokens)
    later = key_of(tokens[PAGE:])
    assert page_hashes(tokens, PAGE)[1:] == get_storage_hash_str(later, hashes(tokens)[0], page_size=PAGE)
    assert array("q", tokens) == key_of(tokens).token_ids


@pytest.mark.parametrize(
    "pools",
    [
        attention, lambda: attention(layout="page_first_direct"), lambda: attention(layout="layer_first"),
        lambda: attention(torch.float8_e4m3fn), latent,
    ],
    ids=["page_first", "page_first_direct", "layer_first", "float8", "latents"],
)  # fmt: skip
@pytest.mark.parametrize("is_zero_copy", [1, 0])
def test_what_one_engine_backed_up_another_prefetches(sidecar: Sidecar, pools: Any, is_zero_copy: int) -> None:
    tokens = range(1000, 1000 + 7 * PAGE)
    extra = {"interface_v1": is_zero_copy, "weights_digest": f"{is_zero_copy}" * 64}
    settings = {"kv_cache_dtype": "fp8_e4m3"} if pools()[1].dtype is torch.uint8 else {}
    with engine(sidecar.address, pools(), extra=extra, **settings) as one:
        assert not len(one.load(tokens))
        saved = one.save(tokens)
    with engine(sidecar.address, pools(), extra=extra, **settings) as other:
        assert torch.equal(other.load([*tokens, *range(3 * PAGE)]), saved)
        assert not len(other.load(range(5 * PAGE)))


@pytest.mark.parametrize(
    ("number", "mine", "theirs"),
    [
        (0, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}),  # plain bytes in the pool, both
        (1, {"quantization": "fp8"}, {}),
        (2, {"model": "org/m"}, {"model": "org/other"}),
        (3, {"revision": "a" * 40}, {"revision": "b" * 40}),
        (4, {"json_model_override_args": '{"rope_theta": 1e6}'}, {}),
        (5, {"extra": {"weights_digest": "a" * 64}}, {"extra": {"weights_digest": "b" * 64}}),
        (6, {"dtype": "float16", "kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
        (7, {"flashinfer_mxfp4_moe_precision": "fp8"}, {}),
        (8, {"deepep_dispatcher_output_dtype": "fp8"}, {}),
        (9, {"enable_decoder_swa_bounded_replay": True}, {}),
        (10, {"forward_hooks": [{"target_modules": ["*"], "hook_factory": "mine:steered"}]}, {}),
    ],
)
def test_engines_that_compute_or_keep_other_numbers_share_nothing(
    sidecar: Sidecar, number: int, mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    dtypes = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    one_pool, other_pool = (
        attention(dtypes.get(each.get("kv_cache_dtype", ""), torch.bfloat16)) for each in (mine, theirs)
    )
    tokens = range(2000 + 100 * number, 2000 + 100 * number + 2 * PAGE)
    with engine(sidecar.address, one_pool, **mine) as one:
        one.save(tokens)
        assert len(one.load(tokens)) == 2
    with engine(sidecar.address, other_pool, **theirs) as other:
        assert not len(other.load(tokens))


def test_stages_of_as_many_layers_that_begin_elsewhere_share_nothing(sidecar: Sidecar) -> None:
    """Two engines share out their layers to three stages, 8 + 10 + 6 and 6 + 10 + 8: their second ones are alike but
    for where they begin."""
    tokens = range(3000, 3000 + 2 * PAGE)
    with engine(sidecar.address, attention(first_layer=8)) as one:
        one.save(tokens)
    with engine(sidecar.address, attention(first_layer=6)) as other:
        assert not len(other.load(tokens))


def test_after_clear_an_engine_finds_nothing_of_before_and_others_do(sidecar: Sidecar) -> None:
    """SGLang's procedure for an engine whose weights were replaced."""
    tokens, later = range(4000, 4000 + 3 * PAGE), range(5000, 5000 + 2 * PAGE)
    with engine(sidecar.address) as one, engine(sidecar.address) as other:
        saved = one.save(tokens)
        assert one.controller.clear_storage_backend()
        assert not len(one.load(tokens))
        anew = one.save(later)
        assert torch.equal(one.load(later), anew)
        assert torch.equal(other.load(tokens), saved)
        assert not len(other.load(later))


def test_weights_of_another_version_share_nothing(sidecar: Sidecar) -> None:
    tokens = range(6000, 6000 + 2 * PAGE)
    with engine(sidecar.address) as one:
        saved = one.save(tokens)
        get_context().override("test", weight_version="step-1")
        assert not len(one.load(tokens))
        one.write(tokens)  # what was to be backed up when the weights were replaced
        assert not one.controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens
        assert not len(one.load(tokens))
        one.controller.reset()  # a flush
        trained = one.save(tokens)
        assert torch.equal(one.load(tokens), trained)
        get_context().override("test", weight_version="default")
        assert torch.equal(one.load(tokens), saved)


def test_the_settings_that_tell_engines_apart_are_sglangs() -> None:
    """One that it calls otherwise would be None for every engine."""
    settings = ServerArgs(model_path="dummy")
    assert [each for each in (*OF_ENGINE, *OF_WEIGHTS, *OF_DRAFTS) if not hasattr(settings, each)] == []


def pool_pages(host: Any, count: int) -> Any:
    found = host.alloc(count * PAGE)
    host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape))
    return found


def test_pools_of_hybrid_models_go_and_come_back(sidecar: Sidecar) -> None:
    tokens = range(7000, 7000 + 4 * PAGE)
    keys = hashes(tokens)
    with engine(sidecar.address) as one:
        one.save(tokens)
        indices = pool_pages(one.beside, 2)
        kept = [one.beside.get_data_page(int(at)).clone() for at in indices[::PAGE]]
        window = PoolTransfer(
            PoolName.SWA, host_indices=indices, keys=keys[2:], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        assert one.backend.batch_set_v2([window]) == {PoolName.SWA: [True, True]}
        found = one.backend.batch_exists_v2(keys, [window])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages[PoolName.KV]) == (4, 4)
        assert found.extra_pool_hit_pages[PoolName.SWA] == 4
    with engine(sidecar.address) as other:
        places = pool_pages(other.beside, 3)
        window = PoolTransfer(PoolName.SWA, host_indices=places, keys=keys[1:])
        assert other.backend.batch_get_v2([window]) == {PoolName.SWA: [False, True, True]}
        assert all(
            torch.equal(other.beside.get_data_page(int(at)), each)
            for at, each in zip(places[PAGE::PAGE], kept, strict=True)
        )
        assert not other.backend.batch_exists(page_hashes(range(8000, 8000 + PAGE), PAGE))
        short = PoolTransfer(PoolName.SWA, host_indices=places[:PAGE], keys=keys[1:])
        assert other.backend.batch_set_v2([short]) == {PoolName.SWA: [False] * 3}
        unknown = PoolTransfer(PoolName.MAMBA, host_indices=places, keys=keys[1:])
        assert other.backend.batch_get_v2([unknown]) == {PoolName.MAMBA: [False] * 3}


@pytest.mark.parametrize("name", [PoolName.DRAFT, PoolName.DRAFT_SWA])
def test_a_draft_with_heads_of_an_mla_model_is_each_ranks_own(
    sidecar: Sidecar, caplog: pytest.LogCaptureFixture, name: PoolName
) -> None:
    """Every rank has the same latents of the model, and its own heads of the draft."""
    tokens = range(20_000, 20_000 + 3 * PAGE)
    keys, pools = hashes(tokens), [(latent()[1], attention()[1]) for _ in range(2)]
    ranks = [backend_of_rank(sidecar, rank, f"org/{name}") for rank in range(2)]
    for each, (latents, draft) in zip(ranks, pools, strict=True):
        each.register_mem_pool_host(latents)
        each.register_mem_host_pool_v2(draft, name)
    sent, places = pool_pages(pools[0][0], 3), pool_pages(pools[1][0], 3)
    assert ranks[0].batch_set_v1(keys, sent) == ranks[1].batch_get_v1(keys, places) == [True] * 3
    assert torch.equal(pools[1][0].get_data_page(int(places[0])), pools[0][0].get_data_page(int(sent[0])))
    heads = PoolTransfer(name, keys=keys, host_indices=pool_pages(pools[0][1], 3))
    assert ranks[0].batch_set_v2([heads]) == ranks[0].batch_get_v2([heads]) == {name: [True] * 3}
    assert ranks[1].batch_get_v2([heads]) == {name: [False] * 3}
    assert "the draft's pages of this rank" in caplog.text
    for each in ranks:
        each.close()


def backend_of_rank(sidecar: Sidecar, rank: int, model: str) -> KVStoreHiCache:
    """The backend of one of two ranks of a model with latents."""
    others = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "enable_storage_metrics": False}
    config = HiCacheStorageConfig(
        tp_rank=rank, tp_size=2, is_mla_model=True, is_page_first_layout=True, model_name=model,
        extra_config={"socket": sidecar.address}, **others,
    )  # fmt: skip
    return KVStoreHiCache(config)


@pytest.mark.parametrize("seed", range(12))
def test_what_can_be_restored_is_what_sglangs_own_backend_says(sidecar: Sidecar, tmp_path: Path, seed: int) -> None:
    """Against its backend of files, with the same pages there."""
    torch.manual_seed(seed)
    count = 7
    keys = page_hashes(range(9000 + 1000 * seed, 9000 + 1000 * seed + count * PAGE), PAGE)
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config = HiCacheStorageConfig(
        **alone, is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True, model_name="org/m"
    )
    with engine(sidecar.address) as one:
        theirs, ours = HiCacheFile(config, str(tmp_path / "files")), one.backend
        pools = {PoolName.KV: one.host, PoolName.SWA: one.beside}
        for name, pool in pools.items():
            theirs.register_mem_host_pool_v2(pool, name)
        for name, share in ((PoolName.KV, 0.9), (PoolName.SWA, 0.7)):
            there = [key for key in keys if float(torch.rand(())) < share]
            indices = pool_pages(pools[name], len(there))
            for backend in (theirs, ours):
                backend.batch_set_v2([PoolTransfer(name, host_indices=indices, keys=there)])
        for policy, window in ((PoolHitPolicy.ALL_PAGES, 0), *((PoolHitPolicy.TRAILING_PAGES, n) for n in range(4))):
            asked = [PoolTransfer(PoolName.SWA, keys=keys[:window], hit_policy=policy)]
            expected, found = (each.batch_exists_v2(keys, asked) for each in (theirs, ours))
            assert found == expected
            assert all(before < after for before, after in pairwise(found.restorable_prefix_pages))
