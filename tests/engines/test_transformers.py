"""CachedModel: the same tokens and the same bits, sooner; and generation whatever happens to the sidecar."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_client import Client, Recompute, connect
from kvstore_client.engines.transformers import CachedModel, TransformersRunner
from kvstore_client.engines.transformers_hidden import PromptE
from kvstore_client.planes.shared_memory import landing
from kvstore_client.recompute import recompute
from kvstore_ops.sidecar import Sidecar
from transformers import DynamicCache, GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers.generation import StoppingCriteriaList

from kvstore.errors import DataLoss, DeadlineExceeded, InvalidRequest, KVStoreError
from kvstore.spec import Durability, MissReason, ModelSpec, Tier
from tests.e2e.shared_tiers import Shared, SharingSidecar
from tests.fakes import Switch
from tests.recompute.models import LAYERS
from tests.recompute.models import model_of as family_of
from tests.server.raw import eventually

STEP = 32


def model_of(dtype: torch.dtype, seed: int = 0, num_key_value_heads: int = 2) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=num_key_value_heads, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address) as connected:
        yield connected


def prompt(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def logits(cached: CachedModel, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    output = cached.generate(ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.sequences.logits), output.report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [STEP * 4 + 7, STEP * 4, STEP * 4 + 1, STEP + 1])
def test_warm_is_cold_to_the_bit(client: Client, dtype: torch.dtype, count: int) -> None:
    model, ids = model_of(dtype), prompt(count, count)
    cold, first = logits(CachedModel(model, client, chunk_tokens=STEP), ids)
    assert first.reused_token_count == 0
    assert first.wait_stored(10.0) is Durability.MEMORY
    warm, second = logits(CachedModel(model, client, chunk_tokens=STEP), ids)
    assert second.reused_token_count == (count - 1) // STEP * STEP
    assert second.tier is Tier.DRAM
    assert second.fetched_bytes > 0
    assert torch.equal(cold, warm)


def test_the_tokens_are_plain_transformers_tokens(client: Client) -> None:
    model, ids = model_of(torch.float32), prompt(STEP * 3 + 5, 77)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    for _ in range(2):
        output = CachedModel(model, client, chunk_tokens=STEP).generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(output.sequences, plain)
        output.report.wait_stored(10.0)
    torch.manual_seed(3)
    sampled = model.generate(ids, max_new_tokens=12, do_sample=True, top_k=20)
    torch.manual_seed(3)
    output = CachedModel(model, client, chunk_tokens=STEP).generate(ids, max_new_tokens=12, do_sample=True, top_k=20)
    assert torch.equal(output.sequences, sampled)


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-windows", "qwen3-windows-yarn"])
def test_windows_biases_and_norms_are_remembered_alike(client: Client, family: str) -> None:
    model, ids = family_of(family), prompt(STEP * 3 + 5, 83) % 96
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    cold, first = logits(CachedModel(model, client, chunk_tokens=STEP), ids)
    first.wait_stored(10.0)
    warm, second = logits(CachedModel(model, client, chunk_tokens=STEP), ids)
    assert second.reused_token_count == STEP * 3
    assert torch.equal(cold, warm)
    output = CachedModel(model, client, chunk_tokens=STEP).generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(output.sequences, plain)


def test_a_longer_prompt_reuses_what_it_shares(client: Client) -> None:
    model, ids = model_of(torch.float32), prompt(STEP * 5 + 3, 78)
    CachedModel(model, client, chunk_tokens=STEP).generate(
        ids[:, : STEP * 3 + 2], max_new_tokens=1
    ).report.wait_stored()
    longer = CachedModel(model, client, chunk_tokens=STEP).generate(ids, max_new_tokens=2, do_sample=False)
    assert longer.report.reused_token_count == STEP * 3
    assert torch.equal(longer.sequences, model.generate(ids, max_new_tokens=2, do_sample=False))


def test_changed_weights_share_nothing(client: Client) -> None:
    model, ids = model_of(torch.float32), prompt(STEP * 3, 79)
    CachedModel(model, client, chunk_tokens=STEP).generate(ids, max_new_tokens=1).report.wait_stored()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    report = CachedModel(model, client, chunk_tokens=STEP).generate(ids, max_new_tokens=1).report
    assert (report.reused_token_count, report.reason) == (0, MissReason.COLD)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"attention_mask": torch.tensor([[0] + [1] * 39])}, "attention_mask"),
        ({"use_cache": False}, "use_cache"),
    ],
)
def test_what_it_cannot_do_it_leaves_to_transformers(client: Client, options: dict[str, Any], why: str) -> None:
    model, ids = model_of(torch.float32), prompt(40, 80)
    output = CachedModel(model, client, chunk_tokens=STEP).generate(ids, max_new_tokens=3, do_sample=False, **options)
    assert why in output.report.bypassed
    assert torch.equal(output.sequences, model.generate(ids, max_new_tokens=3, do_sample=False, **options))
    two = ids.repeat(2, 1)
    assert "batch" in CachedModel(model, client, chunk_tokens=STEP).generate(two, max_new_tokens=1).report.bypassed


def test_generation_goes_on_without_the_sidecar(own_sidecar: Sidecar) -> None:
    model, ids = model_of(torch.float32), prompt(STEP * 3 + 1, 81)
    plain = model.generate(ids, max_new_tokens=3, do_sample=False)
    client = connect(own_sidecar.address)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    own_sidecar.stop(kill=True)
    output = cached.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(output.sequences, plain)
    assert output.report.reason is MissReason.UNAVAILABLE
    assert output.report.wait_stored(10.0) is Durability.NONE
    client.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(DataLoss, MissReason.CORRUPT), (DeadlineExceeded, MissReason.UNAVAILABLE)],
)
def test_a_chunk_lost_under_the_copy_is_recomputed(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: type[KVStoreError], reason: MissReason
) -> None:
    """The report says that it is a miss, and why."""
    monkeypatch.setattr(landing, "JOB_BYTES", 1)  # each layer is copied by itself, as large ones are
    model, ids = model_of(torch.float32), prompt(STEP * 3 + 1, 82)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    first = cached.generate(ids, max_new_tokens=3, do_sample=False)
    first.report.wait_stored(10.0)
    calls = []

    def lose() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error("lost, says the test")

    client.faults.arm("fetch.copy.middle", lose)
    output = cached.generate(ids, max_new_tokens=3, do_sample=False)
    client.faults.arm("fetch.copy.middle", lambda: None)
    assert torch.equal(output.sequences, first.sequences)
    assert (output.report.reused_token_count, output.report.reason) == (0, reason)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(InvalidRequest, match="gpt2"):
        ModelSpec.from_transformers(GPT2Config(), "ab" * 32)


def keeping_e(model: Any, client: Client) -> CachedModel:
    spec = ModelSpec.from_transformers(model.config, model, STEP, keeps_e=True)
    return CachedModel(model, client, spec=spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-biased-mha", "mistral-window", "qwen2-windows", "qwen3-windows-yarn"])
def test_e_in_the_place_of_kv_gives_the_same_bits(client: Client, family: str, dtype: torch.dtype) -> None:
    model = family_of(family, 5, dtype, num_key_value_heads=4)
    ids = prompt(STEP * 4, 84) % 96
    kv, plain = logits(CachedModel(model, client, chunk_tokens=STEP), ids)
    cold, first = logits(keeping_e(model, client), ids)
    assert (first.reused_token_count, first.wait_stored(10.0)) == (0, Durability.MEMORY)
    assert first.receipt.stored_token_count == STEP * 4
    warm, second = logits(keeping_e(model, client), ids)
    assert second.reused_token_count == STEP * 3
    assert torch.equal(cold, warm)
    assert torch.equal(cold, kv)
    plain.wait_stored(10.0)
    _, plain = logits(CachedModel(model, client, chunk_tokens=STEP), ids)
    assert second.fetched_bytes <= plain.fetched_bytes / 2


def test_a_longer_prompt_keeps_the_e_that_it_fetched_with_what_it_computed(client: Client) -> None:
    model, ids = family_of("llama-biased-mha", 6), prompt(STEP * 4 + 3, 85) % 96
    keeping_e(model, client).generate(ids[:, : STEP * 2], max_new_tokens=1).report.wait_stored()
    longer, report = logits(keeping_e(model, client), ids)
    assert report.reused_token_count == STEP * 2
    report.wait_stored()
    with torch.inference_mode():
        made = recompute(
            TransformersRunner(model), ids[0], [], Recompute.full(LAYERS), hidden_layers=range(LAYERS)
        )  # fmt: skip
    found = client.fetch(keeping_e(model, client).spec, ids[0])
    assert found.token_count == STEP * 4
    for layer, e in enumerate(found):
        assert torch.allclose(e, made.hidden[layer][: STEP * 4], rtol=1e-4, atol=1e-4)
    warm, report = logits(keeping_e(model, client), ids)
    assert report.reused_token_count == STEP * 4
    assert torch.equal(warm, longer)


def test_two_threads_with_one_model_keep_each_its_own_e(client: Client) -> None:
    model = family_of("llama-biased-mha", 7)
    cached, prompts = keeping_e(model, client), [prompt(STEP * 3, 86 + each) % 96 for each in range(4)]
    with ThreadPoolExecutor(2) as threads:
        for output in list(threads.map(lambda ids: cached.generate(ids, max_new_tokens=2), prompts)):
            output.report.wait_stored()
    for ids in prompts:
        found = client.fetch(cached.spec, ids[0])
        with torch.no_grad():
            expected = model(ids, output_hidden_states=True).hidden_states
        assert found.token_count == STEP * 3
        for e, other in zip(found, expected[:LAYERS], strict=True):
            assert torch.allclose(e, other[0], rtol=1e-4, atol=1e-4)


def test_a_thread_that_ends_leaves_the_forward_passes_of_others_alone() -> None:
    """Its hooks go while another thread's pass is about to call them: then torch leaves out what they were promised."""
    model = family_of("llama-biased-mha", 8)
    spec = replace(ModelSpec.from_transformers(model.config, model, STEP), keeps_e=True)
    capture = PromptE(TransformersRunner(model, spec=spec), STEP)
    ids, first = prompt(STEP, 90) % 96, model.base_model.layers[0]
    with torch.no_grad():
        expected = model(ids).logits
        with ExitStack() as ends:
            ends.enter_context(capture.captured(DynamicCache()))
            first.register_forward_pre_hook(lambda *_: ends.close(), prepend=True)
            assert torch.equal(model(ids).logits, expected)


def test_an_interrupt_while_hooks_are_made_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep the planes of that prompt as long as the model lives, and look at every later pass."""
    model = family_of("llama-biased-mha", 6)
    runner = TransformersRunner(model, spec=ModelSpec.from_transformers(model.config, model, STEP, keeps_e=True))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[2], "register_forward_pre_hook", interrupted)
    with pytest.raises(KeyboardInterrupt), PromptE(runner, STEP).captured(DynamicCache()):
        raise AssertionError("not all hooks are there")
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_a_limit_that_no_answer_reaches_takes_no_memory(client: Client) -> None:
    model, ids = model_of(torch.float32), prompt(STEP + 3, 91)

    def ends(tokens: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.tensor([tokens.shape[1] >= STEP + 8])

    options = {"max_new_tokens": 10**12, "do_sample": False, "stopping_criteria": StoppingCriteriaList([ends])}
    found = CachedModel(model, client, chunk_tokens=STEP).generate(ids, **options)
    assert found.report.bypassed == ""
    assert torch.equal(found.sequences, model.generate(ids, **options))


@pytest.mark.parametrize("planning", ["off", "observe"])
def test_an_answer_that_fails_leaves_nothing_held_while_its_error_is_kept(client: Client, planning: str) -> None:
    """A future, a log or an interactive session may keep the error, and with it all that the call had."""
    client.planner.mode = planning
    model, ids = model_of(torch.float32), prompt(STEP * 4 + 7, 93)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    expected, report = logits(cached, ids)
    report.wait_stored(10.0)

    def fails(_tokens: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        cached.generate(ids, max_new_tokens=2, logits_processor=[fails])
    assert kept.value.__traceback__ is not None
    eventually(lambda: client.stats().sessions.lease_count == 0)
    again, report = logits(cached, ids)
    assert report.reused_token_count == STEP * 4
    assert torch.equal(again, expected)


def test_another_node_reuses_what_this_one_computed(tmp_path: Path) -> None:
    """To the bit; and where a shared tier turns out wrong on the way, it is computed."""
    shared, ids = Shared(tmp_path), prompt(STEP * 4 + 7, 92)
    with SharingSidecar(shared) as one, SharingSidecar(shared) as two:
        with connect(one.socket_address) as client:
            cold, first = logits(CachedModel(model_of(torch.float32), client, chunk_tokens=STEP), ids)
            assert first.wait_stored(10.0) is Durability.LOCAL
            eventually(lambda: client.stats().backlog_chunk_count == 0)
        with connect(two.socket_address) as client:
            cached = CachedModel(model_of(torch.float32), client, chunk_tokens=STEP)
            shared.switches("redis").turn_on(Switch.CORRUPT)
            computed, failed = logits(cached, ids)
            assert (failed.reused_token_count, torch.equal(cold, computed)) == (0, True)
            failed.wait_stored(10.0)
            shared.turn_off()
        two.stop()
        shutil.rmtree(two.directory / "nvme")
        two.start()
        with connect(two.socket_address) as client:
            warm, second = logits(CachedModel(model_of(torch.float32), client, chunk_tokens=STEP), ids)
            assert (second.reused_token_count, second.tier) == (STEP * 4, Tier.REDIS)
            assert torch.equal(cold, warm)
