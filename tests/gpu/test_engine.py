"""transformers on a GPU: the same tokens with the cache and without, and partial prefills as the CPU computes them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvstore_client import Client, Exactness, Recompute, connect
from kvstore_client.engines.transformers import CachedModel, TransformersRunner, cache_of
from kvstore_client.recompute import Recomputed, recompute
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import Durability, ModelSpec
from tests.gpu.tensors import own_stream, seeds
from tests.recompute.models import LAYERS, model_of, prompt, sibling_of

pytestmark = pytest.mark.gpu

STEP = 32
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.1}
"""Of the largest value: sums in another order, through four layers."""
SIZE = {"max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Sidecar("--capacity", "128 MiB") as sidecar, connect(sidecar.address) as connected:
        yield connected


def on(device: str, model: Any) -> Any:
    return copy.deepcopy(model).to(device)


def answer(cached: CachedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    output = cached.generate(ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return output.sequences.sequences, torch.stack(output.sequences.logits), output.report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_warm_is_cold_and_both_are_transformers_own(
    client: Client, device: str, family: str, dtype: torch.dtype
) -> None:
    model = on(device, model_of(family, next(seeds), dtype, **SIZE))
    ids = prompt(STEP * 4 + 7, next(seeds))[None].to(device)
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    cold_tokens, cold, first = answer(CachedModel(model, client, chunk_tokens=STEP), ids)
    assert not first.bypassed, first.bypassed
    assert first.reused_token_count == 0
    assert first.wait_stored(10.0) is Durability.MEMORY
    warm_tokens, warm, second = answer(CachedModel(model, client, chunk_tokens=STEP), ids)
    assert second.reused_token_count == STEP * 4
    assert torch.equal(cold, warm)
    assert torch.equal(cold_tokens, warm_tokens)
    if dtype is torch.float32:
        assert torch.equal(cold_tokens, plain.sequences)
    close(torch.stack(plain.logits)[0], warm[0], dtype)


def test_on_a_stream_of_its_own(client: Client, device: str) -> None:
    """What is kept is read on another thread, whose stream is another one."""
    model = on(device, model_of("llama", next(seeds), **SIZE))
    for _ in range(3):
        ids = prompt(STEP * 6 + 5, next(seeds))[None].to(device)
        with own_stream(device):
            cold_tokens, cold, first = answer(CachedModel(model, client, chunk_tokens=STEP), ids)
            assert first.wait_stored(10.0) is Durability.MEMORY
            warm_tokens, warm, second = answer(CachedModel(model, client, chunk_tokens=STEP), ids)
            assert second.reused_token_count == STEP * 6
            assert torch.equal(cold, warm)
            assert torch.equal(cold_tokens, warm_tokens)


def test_tokens_on_the_host_for_a_model_on_the_device(client: Client, device: str) -> None:
    """transformers moves no tokens; the runner does."""
    model = on(device, model_of("llama", next(seeds), **SIZE))
    runner, tokens = TransformersRunner(model, chunk_tokens=STEP), prompt(STEP * 2 + 3, next(seeds))
    found = client.partial_prefill(runner, tokens)
    assert found.logits.device.type == device
    assert all(plane.device.type == device for pair in found.kv for plane in pair)
    client.store(runner.spec, tokens, found.kv).wait(10.0)
    again = client.partial_prefill(runner, tokens.tolist())
    assert again.plan.reused_token_count > 0
    close(found.logits, again.logits, torch.float32)
    ids = torch.cat((tokens, tokens[:1]))[None].to(device)
    cached = model.generate(ids, past_key_values=cache_of(again.kv), max_new_tokens=4, do_sample=False)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_e_in_the_place_of_kv_on_a_gpu(client: Client, device: str) -> None:
    model = on(device, model_of("llama-biased-mha", next(seeds), **SIZE))
    spec = ModelSpec.from_transformers(model.config, model, STEP, keeps_e=True)
    ids = prompt(STEP * 3 + 5, next(seeds))[None].to(device)
    cold_tokens, cold, first = answer(CachedModel(model, client, spec=spec), ids)
    assert first.wait_stored(10.0) is Durability.MEMORY
    warm_tokens, warm, second = answer(CachedModel(model, client, spec=spec), ids)
    assert second.reused_token_count == STEP * 3
    assert torch.equal(cold_tokens, warm_tokens)
    close(cold, warm, torch.float32)
    projected = client.fetch_projected(TransformersRunner(model, spec=spec), ids[0].cpu())
    assert projected.token_count == STEP * 3
    assert all(plane.device.type == device for pair in projected for plane in pair)


# ---------------------------------------------------------------- lossy reuse, beside the CPU


def named(setting: Recompute) -> str:
    return f"{setting.first_layer}..{setting.last_layer} {setting.ratio} {setting.selector}"


DOCUMENT_SETTINGS = [
    Recompute.reuse(), Recompute.cacheblend(1, 0.2), Recompute(1, 1, 0.3), Recompute(1, 1, 0.2, "product"),
    Recompute(0, -1, 0.2, "suffix_attention"), Recompute(0, -1, 0.2, "suffix_peak"),
]  # fmt: skip
SIBLING_SETTINGS = [
    Recompute.droidspeak(0, 1), Recompute.droidspeak(1, 2), Recompute(1, 2, 0.3), Recompute(1, 1, 0.25, "product"),
]  # fmt: skip
FAMILIES = pytest.mark.parametrize("family", ["qwen3", "llama-llama3", "mistral-window"])


def computed(runner: TransformersRunner, tokens: torch.Tensor) -> Recomputed:
    return recompute(runner, tokens, [], Recompute.full(LAYERS), hidden_layers=range(LAYERS))


def both(device: str, model: Any) -> tuple[TransformersRunner, TransformersRunner]:
    """Runners of the same weights: on the device, and on the CPU under another name, so that they share no cache."""
    own = ModelSpec.from_transformers(model.config, model, STEP)
    spec = replace(own, weights_digest=f"unverified:of-the-cpu-{next(seeds)}")
    return TransformersRunner(on(device, model), chunk_tokens=STEP), TransformersRunner(model, spec=spec)


def agree(ours: Recomputed, theirs: Recomputed) -> None:
    """The same rows were chosen, and all values are close. Of two rows with nearly the same score, either may be; those
    that see nothing outside their window deviate by rounding alone, so up to half may be others."""
    assert ours.chosen.keys() == theirs.chosen.keys()
    odd = 0
    for layer, rows in ours.chosen.items():
        mine, other = set(rows.tolist()), set(theirs.chosen[layer].tolist())
        assert len(mine) == len(other)
        assert len(mine - other) <= max(1, len(mine) // 2)
        odd += len(mine - other)
    assert ours.exactness is theirs.exactness
    assert ours.share == pytest.approx(theirs.share)
    if odd:
        return
    close(ours.logits, theirs.logits, torch.float32)
    for (k, v), (their_k, their_v) in zip(ours.kv, theirs.kv, strict=True):
        close(k, their_k, torch.float32)
        close(v, their_v, torch.float32)


@FAMILIES
@pytest.mark.parametrize("setting", DOCUMENT_SETTINGS, ids=named)
def test_documents_are_moved_and_mended_as_on_the_cpu(
    client: Client, device: str, family: str, setting: Recompute
) -> None:
    runner, reference = both(device, model_of(family, next(seeds), **SIZE))
    one, two, rest = prompt(70, next(seeds)), prompt(45, next(seeds)), prompt(12, next(seeds))
    tokens = torch.cat((two, rest[:3], one, rest[3:]))
    found = []
    for each in (runner, reference):
        for document in (one, two):
            made, first = computed(each, document), setting.first_layer
            hidden = {first: made.hidden[first]} if first else None
            client.store_segment(each.spec, document, made.kv, hidden=hidden).wait(10.0)
        found.append(client.partial_prefill(each, tokens, segments=[(0, 45), (48, 118)], recompute=setting))
        assert not found[-1].plan.reason, found[-1].plan.reason
        assert found[-1].exactness is Exactness.DERIVED
    agree(*found)


@FAMILIES
@pytest.mark.parametrize("setting", SIBLING_SETTINGS, ids=named)
def test_a_siblings_cache_is_mended_as_on_the_cpu(client: Client, device: str, family: str, setting: Recompute) -> None:
    model = model_of(family, next(seeds), **SIZE)
    sibling, tokens, found = sibling_of(model, next(seeds)), prompt(110, next(seeds)), []
    senders = both(device, sibling)
    for each, sender in zip(both(device, model), senders, strict=True):
        made, first = computed(sender, tokens[:96]), setting.first_layer
        client.store(sender.spec, tokens[:96], made.kv, hidden={first: made.hidden[first]} if first else None).wait(10)
        found.append(client.partial_prefill(each, tokens, senders=[sender.spec], recompute=setting))
        assert not found[-1].plan.reason, found[-1].plan.reason
    agree(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_prefill_is_the_models_forward(device: str, dtype: torch.dtype) -> None:
    """More rows than a step has."""
    model, tokens = on(device, model_of("llama", next(seeds), dtype, **SIZE)), prompt(700, next(seeds))
    found = computed(TransformersRunner(model), tokens)
    with torch.no_grad():
        expected = model(tokens[None].to(device), output_hidden_states=True)
    close(found.logits[0], expected.logits[0, -1], dtype)
    for layer in range(LAYERS):
        close(found.hidden[layer], expected.hidden_states[layer][0], dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    one, other = ours.detach().cpu().float(), theirs.detach().cpu().float()
    assert one.shape == other.shape
    assert bool(torch.isfinite(one).all())
    assert float((one - other).abs().max() / other.abs().max()) <= CLOSE[dtype]


@pytest.mark.parametrize("family", ["llama-llama3", "llama-yarn"])
def test_rotations_are_those_of_the_table_and_of_these_rows(
    device: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are kept for the next layers of the same rows, and of no others."""
    model = on(device, model_of(family, next(seeds)))
    tabled, anew = TransformersRunner(model), TransformersRunner(model)
    monkeypatch.setattr(tabled, "device", torch.device("cpu"))
    positions = torch.arange(256, device=device)[None]
    cos, sin = model.base_model.rotary_emb(torch.zeros(1, device=device), positions)
    tabled._tables = cos[0], sin[0]
    monkeypatch.setattr(anew, "device", torch.device("cuda"))
    x = torch.zeros(45, 32, device=device)
    for positions in (torch.arange(5, 50, device=device), torch.arange(9, 99, 2, device=device)):
        for _ in range(2):
            for ours, theirs in zip(anew._rotations(positions, x), tabled._rotations(positions, x), strict=True):
                assert torch.equal(ours, theirs)
