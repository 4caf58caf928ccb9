"""Models whose layers have block tables of their own, in a real vLLM: bytes in its pages, and answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore_ops.sidecar import Sidecar

from tests.vllm.engine import CONNECTOR, Engine
from tests.vllm.test_drafts import wait_kept
from tests.vllm.test_end_to_end import CHUNK, FORKED, LONG, NEEDS_AVX512, PROMPTS, leases_of, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
REMEMBERING = {"kv_connector": "RememberingConnector", "kv_connector_module_path": "tests.vllm.breaking"}
OWN: dict[str, Any] = {"extra": CHUNK, "connector": REMEMBERING, "enable_prefix_caching": False}
ONE_TABLE = {"disable_hybrid_kv_cache_manager": True}
NOWHERE = "unix:///nonexistent/kvstore.sock"


def check_held(held: dict[int, tuple[int, Any]], whole: dict[int, tuple[int, Any]], *loaded: range) -> None:
    """Compare pages with those of an engine that computed all of the prompt: the same bits where they were loaded."""
    for layer, (first, ours) in held.items():
        start, theirs = whole[layer]
        begin = max(first, start)
        ours, theirs = ours[:, :, begin - first :], theirs[:, :, begin - start :]
        assert np.abs(ours - theirs).max() < 1e-2
        for tokens in loaded:
            same = slice(max(0, tokens.start - begin), max(0, tokens.stop - begin))
            assert np.array_equal(ours[:, :, same], theirs[:, :, same]), f"layer {layer}"


def computed(model: Path, *prompts: list[int], **more: Any) -> tuple[list[list[int]], list[dict[int, tuple[int, Any]]]]:
    """What an engine says, and what its pages hold, that computes all of each prompt."""
    with Engine(model, NOWHERE, **{**OWN, **more}) as engine:
        asked = [(engine.ask(each)[0][0], engine.held[0]) for each in prompts]
    return [said for said, _ in asked], [held for _, held in asked]


@pytest.mark.parametrize(("name", "step_tokens"), [("gemma", 1024), ("oss", 100)])
def test_what_each_kind_of_table_keeps_the_other_loads(models: dict[str, Path], name: str, step_tokens: int) -> None:
    """One table keeps all pages, so that all bytes of all layers can be compared. Prompts are longer than the window,
    and a step of 100 tokens cuts chunks and blocks."""
    own = {**OWN, "max_num_batched_tokens": step_tokens, "max_num_seqs": 8}
    said, (whole, _) = computed(models[name], LONG, FORKED, **own, **ONE_TABLE)
    assert all(first == 0 for first, _ in whole.values())
    again, (held, _) = computed(models[name], LONG, FORKED, **own)
    assert again == said
    assert [layer for layer, (first, _) in sorted(held.items()) if first > 200] == [0, 2], "pages outside the window"
    for kept_by, loaded_by in (({}, ONE_TABLE), (ONE_TABLE, {})):
        with Sidecar("--capacity", "64 MiB") as sidecar:
            with Engine(models[name], sidecar.address, **own, **kept_by) as engine:
                assert engine.ask(LONG) == (said[:1], [0])
                wait_kept(sidecar, 5)  # four chunks of 64 and a tail of 32
            with Engine(models[name], sidecar.address, **own, **loaded_by) as engine:
                assert engine.ask(LONG) == (said[:1], [288])
                check_held(engine.held[0], whole, range(288))
                assert engine.ask(FORKED) == (said[1:], [192])
                wait_kept(sidecar, 7)
                assert engine.ask(FORKED) == (said[1:], [320])
            assert leases_of(sidecar) == (0, 0)


def test_a_model_whose_layers_all_have_a_window(models: dict[str, Path]) -> None:
    """It has one table, in which blocks are given up."""
    said, (held, _) = computed(models["mistral"], LONG, FORKED)
    assert {first for first, _ in held.values()} == {224}
    with Sidecar("--capacity", "64 MiB") as sidecar:
        for hits in ([0], [288]):
            with Engine(models["mistral"], sidecar.address, **OWN) as engine:
                assert engine.ask(LONG) == (said[:1], hits)
                wait_kept(sidecar, 5 if hits == [0] else 0)
                check_held(engine.held[0], held, range(*hits))
                assert engine.ask(FORKED)[0] == said[1:]
        assert leases_of(sidecar) == (0, 0)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_load_behind_a_hit_of_vllms_own(models: dict[str, Path], name: str) -> None:
    """Its prefix cache has null blocks before a window. Behind them a prompt is loaded, and another one is kept."""
    turned = [*LONG[:170], *prompt(130, 90)]
    said, (whole, other) = computed(models[name], LONG, turned)
    with Sidecar("--capacity", "64 MiB") as sidecar:
        with Engine(models[name], sidecar.address, **OWN) as engine:
            engine.ask(LONG)
            wait_kept(sidecar, 5)
        with Engine(models[name], sidecar.address, **{**OWN, "enable_prefix_caching": True}) as engine:
            assert engine.ask(LONG[:170])[1] == [128]
            assert engine.loaded == 128
            wait_kept(sidecar, 6)
            assert engine.ask(LONG) == (said[:1], [288])
            assert engine.loaded == 128 + 128, "160 tokens were vLLM's own"
            check_held(engine.held[0], whole, range(128), range(160, 288))
            assert engine.ask(turned) == (said[1:], [160])
            assert engine.loaded == 256
            wait_kept(sidecar, 9)
        with Engine(models[name], sidecar.address, **OWN) as engine:
            assert engine.ask(turned) == (said[1:], [288])
            check_held(engine.held[0], other, range(128))
        assert leases_of(sidecar) == (0, 0)


@pytest.mark.parametrize(("name", "is_one_process"), [("gemma", False), ("mistral", True), ("oss", True)])
def test_a_load_that_fails_is_computed(models: dict[str, Path], name: str, is_one_process: bool) -> None:
    """Its ticket is taken away between the lookup and the fetch."""
    said, _ = computed(models[name], *PROMPTS)
    broken = {"kv_connector": "BreakingConnector", "kv_connector_module_path": "tests.vllm.breaking"}
    with Sidecar("--capacity", "64 MiB") as sidecar:
        with Engine(models[name], sidecar.address, **OWN) as engine:
            engine.ask(LONG)
            wait_kept(sidecar, 5)
        for caching in (False, True):
            own = {"extra": CHUNK, "connector": broken, "enable_prefix_caching": caching}
            with Engine(models[name], sidecar.address, is_one_process=is_one_process, **own) as engine:
                for _ in range(2):
                    assert engine.ask(*PROMPTS)[0] == said
                assert "the prompt is computed" in engine.log()
        with Engine(models[name], sidecar.address, **OWN) as engine:
            assert engine.ask(*PROMPTS) == (said, [288, 0, 320])  # nothing wrong was kept
        assert leases_of(sidecar) == (0, 0)


@pytest.mark.parametrize("name", ["gemma", "oss"])
def test_blocks_that_leave_a_window_are_given_to_others_meanwhile(models: dict[str, Path], name: str) -> None:
    """A pool so small that requests are preempted, and that each block is soon another's: what is kept is right."""
    prompts = [LONG[:96] + prompt(200, seed) for seed in range(10, 14)]
    said, whole = computed(models[name], *prompts)
    with Engine(models[name], None, enable_prefix_caching=False) as engine:
        longer = [engine.ask(each, max_tokens=200)[0][0] for each in prompts]
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64, "max_model_len": 512, "max_num_seqs": 8}
    with Sidecar("--capacity", "64 MiB") as sidecar:
        with Engine(models[name], sidecar.address, extra=CHUNK, **small) as engine:
            for order in (1, -1, 1):
                assert engine.ask(*prompts[::order], max_tokens=200)[0] == longer[::order]
            assert engine.preemptions > 0
        with Engine(models[name], sidecar.address, **OWN) as engine:
            for each, answer, held in zip(prompts, said, whole, strict=True):
                assert engine.ask(each) == ([answer], [288])
                check_held(engine.held[0], held)
        assert leases_of(sidecar) == (0, 0)


def test_two_ranks_and_one_share(models: dict[str, Path]) -> None:
    said, (whole, _) = computed(models["gemma"], LONG, FORKED)
    own = {"extra": CHUNK, "enable_prefix_caching": False}
    two = {"tensor_parallel_size": 2, "is_one_process": False}
    with Sidecar("--capacity", "64 MiB") as sidecar:
        with Engine(models["gemma"], sidecar.address, **own) as engine:
            assert engine.ask(LONG) == (said[:1], [0])
            wait_kept(sidecar, 5)
        with Engine(models["gemma"], sidecar.address, **own, **two) as engine:
            assert engine.ask(LONG) == (said[:1], [288])
            assert engine.ask(FORKED) == (said[1:], [192])
            wait_kept(sidecar, 7)
            assert engine.ask(FORKED) == (said[1:], [320])
        with Engine(models["gemma"], sidecar.address, **OWN) as engine:
            assert engine.ask(LONG) == (said[:1], [288])
            check_held(engine.held[0], whole, range(288))
            assert engine.ask(FORKED) == (said[1:], [320])
        assert leases_of(sidecar) == (0, 0)


@NEEDS_AVX512
def test_a_cache_of_8_bits(models: dict[str, Path]) -> None:
    own = {"extra": CHUNK, "enable_prefix_caching": False, "kv_cache_dtype": "fp8"}
    with Engine(models["gemma"], NOWHERE, **own) as engine:
        said, _ = engine.ask(LONG, FORKED)
    with Sidecar("--capacity", "64 MiB") as sidecar:
        with Engine(models["gemma"], sidecar.address, **own) as engine:
            assert engine.ask(LONG) == (said[:1], [0])
            wait_kept(sidecar, 5)
        with Engine(models["gemma"], sidecar.address, **own) as engine:
            assert engine.ask(LONG, FORKED) == (said, [288, 192])
        assert leases_of(sidecar) == (0, 0)


def test_answers_are_kept_too_and_blocks_named_by_vllms_hashes(models: dict[str, Path]) -> None:
    """An answer is computed token by token: its chunks are there when they are whole. It goes on as the next prompt."""
    extra = {**CHUNK, "save_output": True, "digests": "vllm"}
    own = {"extra": extra, "enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor"}
    with Sidecar("--capacity", "64 MiB") as sidecar:
        with Engine(models["gemma"], sidecar.address, **own) as engine:
            (answer,), _ = engine.ask(LONG, max_tokens=160)
            wait_kept(sidecar, 8)  # of 459 tokens: seven chunks, and the tail of the prompt alone
        turn = [*LONG, *answer, *prompt(20, 91)]
        said, (whole,) = computed(models["gemma"], turn)
        with Engine(models["gemma"], sidecar.address, **{**own, "connector": REMEMBERING}) as engine:
            assert engine.ask(turn) == (said, [448])
            check_held(engine.held[0], whole)
        assert leases_of(sidecar) == (0, 0)


def test_more_requests_fit_than_with_one_table(models: dict[str, Path]) -> None:
    """As vLLM itself says when it starts."""
    found = []
    own = {**OWN, "max_model_len": 2048, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    for more in ({}, ONE_TABLE):
        with Engine(models["gemma"], NOWHERE, **own, **more) as engine:
            (said,) = re.findall(r"KV cache size: ([\d,]+) tokens", engine.log())
            found.append(int(said.replace(",", "")))
    assert found[0] > 1.5 * found[1]


@pytest.mark.parametrize("is_one_process", [True, False])
def test_in_a_multiconnector(models: dict[str, Path], is_one_process: bool) -> None:
    """It passes on what its connectors tell, also of what they moved."""
    said, _ = computed(models["gemma"], LONG)
    many = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
    with Sidecar("--capacity", "64 MiB") as sidecar:
        one = {**CONNECTOR, "kv_connector_extra_config": {"address": sidecar.address, **CHUNK}}
        own: dict[str, Any] = {"extra": {"connectors": [one]}, "connector": many, "enable_prefix_caching": False}
        for hits in (0, 288):
            with Engine(models["gemma"], sidecar.address, is_one_process=is_one_process, **own) as engine:
                assert engine.ask(LONG) == (said, [hits])
                wait_kept(sidecar, 0 if hits else 5)
                engine.ask(LONG[:20])
                assert engine.counted["vllm:kvstore_load_tokens"] == hits
        assert leases_of(sidecar) == (0, 0)
