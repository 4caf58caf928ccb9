"""E in the place of KV over a real sidecar: half the bytes of an MHA model, and the same K and V, for the same weights
only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Exactness, MissReason, ModelSpec, Paged, Recompute
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import GivenKV, Recomputed, Run, recompute
from kvstore_client.recompute.rows import STEP_ROWS

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from tests.recompute.models import LAYERS, model_of, prompt, sibling_of
from tests.recompute.scenes import decoder_of
from tests.specs import bits, read_back, small_spec, tokens_of

STEP = 16
COUNT = 5 * STEP + 7
FAMILIES = (
    "llama-biased-mha",
    "llama-yarn",
    "mistral-window",
    "mistral",
    "qwen2-windows",
    "qwen3",
    "qwen3-windows-yarn",
)
MHA = {"num_key_value_heads": 4, "max_position_embeddings": 1024}
SPEC = small_spec(hidden_size=24, hidden_dtype="bfloat16", chunk_tokens=100, keeps_e=True)


def runner_of(model: Any, **more: Any) -> TransformersRunner:
    spec = ModelSpec.from_transformers(model.config, model, STEP, keeps_e=True)
    return TransformersRunner(model, spec=replace(spec, **more))


def computed(runner: TransformersRunner, tokens: torch.Tensor) -> Recomputed:
    return recompute(runner, tokens, [], Recompute.full(LAYERS), hidden_layers=range(LAYERS))


def keep(client: Client, runner: TransformersRunner, tokens: torch.Tensor) -> Recomputed:
    """Store E of what a runner computes."""
    made = computed(runner, tokens)
    kept = [made.hidden[layer] for layer in range(LAYERS)]
    assert client.store(runner.spec, tokens, kept).stored_token_count == len(tokens)
    return made


def random_e(count: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << 16, (count, SPEC.hidden_size), dtype=np.uint16) for _ in range(SPEC.layer_count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_projected_kv_is_the_prefills_to_the_bit(client: Client, family: str) -> None:
    runner, tokens = runner_of(model_of(family, **MHA)), prompt(COUNT, 1)
    made = keep(client, runner, tokens)
    found = client.fetch_projected(runner, tokens, step_tokens=STEP_ROWS, verify=True)
    assert (found.token_count, found.reason) == (COUNT, MissReason.NONE)
    model = decoder_of(runner.model)
    for layer, (ours, theirs) in enumerate(zip(found, made.kv, strict=True)):
        _, *exact = model.project(layer, made.hidden[layer].double().numpy())
        for plane, other, formula in zip(ours, theirs, exact, strict=True):
            assert torch.equal(plane, other)
            assert np.abs(plane.numpy() - formula).max() <= 2e-5 * np.abs(formula).max()
    spec = runner.spec
    kv_bytes = sum(k.nbytes + v.nbytes for k, v in made.kv)
    assert found.byte_count * spec.layers[0].kv_heads * 2 * spec.layers[0].k_dim == kv_bytes * spec.hidden_size
    assert found.byte_count <= kv_bytes / 2


def test_nothing_is_projected_under_autocast(client: Client) -> None:
    """K and V were rounded to autocast's dtype, and said to be exact."""
    runner, tokens = runner_of(model_of("llama-biased-mha", 21)), prompt(COUNT, 21)
    keep(client, runner, tokens)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidRequest, match="autocast is on"):
        client.fetch_projected(runner, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_steps_differ_by_rounding_at_most(client: Client, dtype: torch.dtype) -> None:
    runner, tokens = runner_of(model_of("llama-biased-mha", 7, dtype)), prompt(COUNT, 2)
    made = keep(client, runner, tokens)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    for step in (None, 1, 33):
        found = client.fetch_projected(runner, tokens, step_tokens=step)
        for ours, theirs in zip(found, made.kv, strict=True):
            for plane, other in zip(ours, theirs, strict=True):
                assert float((plane - other).abs().max()) <= tolerance * float(other.abs().max())


def test_a_prompt_that_goes_on_gets_its_beginning(client: Client) -> None:
    runner, tokens = runner_of(model_of("qwen3", 8, **MHA)), prompt(COUNT, 3)
    made = keep(client, runner, tokens[: 3 * STEP])
    found = client.fetch_projected(runner, tokens, step_tokens=STEP_ROWS)
    assert (found.token_count, found.reason) == (3 * STEP, MissReason.COLD)
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(found, made.kv, strict=True))
    nothing = client.fetch_projected(runner, prompt(COUNT, 4))
    assert (nothing.token_count, nothing.byte_count, len(nothing)) == (0, 0, LAYERS)
    assert nothing[0][0].shape == (4, 0, 16)


def test_other_weights_find_nothing_and_are_not_taken_for_these(client: Client) -> None:
    model, tokens = model_of("llama-biased-mha", 9), prompt(COUNT, 5)
    runner = runner_of(model)
    keep(client, runner, tokens)
    other = sibling_of(model, 1)
    found = client.fetch_projected(runner_of(other), tokens)
    assert (found.token_count, found.reason) == (0, MissReason.COLD)
    with pytest.raises(InvalidRequest, match="weights_digest"):
        TransformersRunner(other, spec=runner.spec)


def test_e_is_never_taken_for_kv_nor_kv_for_e(client: Client) -> None:
    runner, tokens = runner_of(model_of("llama-biased-mha", 10)), prompt(COUNT, 6)
    plain = replace(runner.spec, keeps_e=False)
    made = keep(client, runner, tokens)
    assert client.lookup(runner.spec, tokens).prefix_token_count == COUNT
    assert client.lookup(plain, tokens).prefix_token_count == 0
    assert client.fetch(plain, tokens).token_count == 0
    with pytest.raises(InvalidRequest, match="hidden_layers"):
        client.fetch(runner.spec, tokens, hidden_layers=[1])
    others = prompt(COUNT, 7)
    client.store(plain, others, made.kv, hidden=made.hidden).wait(10.0)
    assert client.lookup(runner.spec, others).prefix_token_count == 0
    with pytest.raises(InvalidRequest, match="keeps_e"):
        client.fetch_projected(TransformersRunner(runner.model, spec=plain), others)


def test_a_runner_that_cannot_project_is_refused(client: Client) -> None:
    class Bare:
        spec = SPEC

    with pytest.raises(InvalidRequest, match="Bare has no project_kv"):
        client.fetch_projected(Bare(), tokens_of(20))  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("family", ["llama-biased-mha", "qwen3-windows-yarn"])
@pytest.mark.parametrize("stored", [48, 53, COUNT])
def test_an_exact_prefix_is_projected_in_a_partial_prefill(client: Client, family: str, stored: int) -> None:
    """The same computation as over the KV in hand, to the bit."""
    runner, tokens = runner_of(model_of(family, 11, **MHA)), prompt(COUNT, 20 + stored)
    made = keep(client, runner, tokens[:stored])
    found = client.partial_prefill(runner, tokens, logit_count=2)
    reused = min(stored, COUNT - 2)
    kv = [(k[:, :reused], v[:, :reused]) for k, v in made.kv]
    expected = recompute(runner, tokens, [Run(0, reused, GivenKV(kv), is_exact=True)], Recompute.reuse(), logit_count=2)
    assert (found.exactness, found.plan.reused_token_count) == (Exactness.EXACT, reused)
    assert torch.equal(found.logits, expected.logits)
    for ours, theirs in zip(found.kv, expected.kv, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    "setting",
    [Recompute.reuse(), Recompute.cacheblend(1, 0.2), Recompute(1, 1, 0.3), Recompute(0, -1, 0.2, "suffix_attention")],
)
def test_documents_kept_as_e_are_projected_where_they_stand(client: Client, setting: Recompute) -> None:
    """As if their KV had been kept and moved, within the rounding of one rotation instead of two; and derived."""
    runner = runner_of(model_of("qwen3", 12, **MHA))
    plain = TransformersRunner(runner.model, spec=replace(runner.spec, keeps_e=False))
    one, two, rest = prompt(37, 30), prompt(21, 31), prompt(12, 32)
    for document in (one, two):
        made = computed(runner, document)
        e = [made.hidden[layer] for layer in range(LAYERS)]
        client.store_segment(runner.spec, document, e).wait(10.0)
        client.store_segment(plain.spec, document, made.kv, hidden={1: e[1]}).wait(10.0)
    tokens, segments = torch.cat((two, rest[:3], one, rest[3:])), [(0, 21), (24, 61)]
    found, expected = (
        client.partial_prefill(each, tokens, segments=segments, recompute=setting) for each in (runner, plain)
    )
    assert (found.exactness, found.plan.reason) == (Exactness.DERIVED, "")
    assert [run.token_start for run in found.plan.runs] == [0, 24]
    assert {layer: rows.tolist() for layer, rows in found.chosen.items()} == {
        layer: rows.tolist() for layer, rows in expected.chosen.items()
    }
    assert torch.allclose(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(found.kv, expected.kv, strict=True):
        assert torch.allclose(ours[0], theirs[0], rtol=1e-3, atol=1e-3)
        assert torch.allclose(ours[1], theirs[1], rtol=1e-3, atol=1e-3)
    with pytest.raises(InvalidRequest, match="DERIVED"):
        client.store(plain.spec, tokens, found.kv)


def test_a_sender_that_keeps_e_is_refused(client: Client) -> None:
    runner = runner_of(model_of("llama-biased-mha", 13))
    sender = runner_of(sibling_of(runner.model, 2)).spec
    with pytest.raises(InvalidRequest, match="keeps E in the place of KV"):
        client.partial_prefill(runner, prompt(40, 33), senders=[sender])


@pytest.mark.parametrize("count", [1, 64, 99, 100, 201, 364])
def test_bytes_of_e_come_back(client: Client, count: int) -> None:
    tokens, cache = tokens_of(count, count), random_e(count)
    assert client.store(SPEC, tokens, cache).stored_token_count == count
    found = client.fetch(SPEC, tokens, verify=True)
    assert found.byte_count == sum(each.nbytes for each in cache)
    assert all(np.array_equal(bits(ours), theirs) for ours, theirs in zip(found, cache, strict=True))
    into = [np.zeros((count + 3, SPEC.hidden_size), np.uint16) for _ in range(1)]
    for layer, e in client.fetch_layers(SPEC, tokens, layers=[1], into=into):
        assert layer == 1
        assert np.array_equal(bits(e)[:count], cache[1])
    assert not into[0][count:].any()


def test_e_is_written_as_the_engine_goes_and_fetched_by_ticket(client: Client) -> None:
    count = 230
    tokens, cache = tokens_of(count, 1000), random_e(count, 1)
    with client.start_store(SPEC, tokens) as writer:
        for start in (0, 90):
            for layer, e in enumerate(cache):
                writer.put_layer(layer, e[start : 90 if not start else count], token_start=start)
        assert writer.commit().stored_token_count == count
    match = client.lookup(SPEC, tokens, hold=True)
    into = [np.zeros((count, SPEC.hidden_size), np.uint16) for _ in cache]
    transfer = client.start_fetch(match.ticket, into=into)  # type: ignore[arg-type]  # it was held
    transfer.wait(10.0)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(into, cache, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": (0, 1)}, "heads"),
        ({"into": [np.zeros((9, 24), np.uint16)]}, "one E per layer"),
        ({"into": [np.zeros((9, 23), np.uint16)] * 2}, r"into\[0\] \(E\) has shape"),
        ({"into": Paged([np.zeros((2, 9, 16, 2, 8), np.uint16)] * 2, np.arange(9))}, "keeps E"),
    ],
)
def test_what_e_does_not_have_is_refused(client: Client, arguments: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        client.fetch(SPEC, tokens_of(9), **arguments)


def test_kv_is_not_stored_as_e(client: Client) -> None:
    pair = (np.zeros((2, 9, 8), np.uint16),) * 2
    with pytest.raises(InvalidRequest, match=r"kv\[0\] \(E\)"):
        client.store(SPEC, tokens_of(9), [pair] * 2)
    with pytest.raises(InvalidRequest, match="hidden"):
        client.store(SPEC, tokens_of(9), random_e(9), hidden={0: random_e(9)[0]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "saves nothing: E of layer 0 has 32 numbers per token, its K and V 32"),
        ({"hidden_dtype": "float32"}, "hidden_dtype"),
        ({"scales": ((1.0, 1.0),) * 2}, "scales"),
        ({"keeps_e": 1}, "true or false"),
    ],
)
def test_specs_that_cannot_keep_e_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace(SPEC, **changes)


def test_what_keeps_e_has_a_name_of_its_own_and_others_keep_theirs() -> None:
    plain = replace(SPEC, keeps_e=False)
    assert fingerprint(SPEC, SPEC.kind) != fingerprint(plain, plain.kind)
    assert b"keeps_e" not in plain.canonical
    assert read_back(SPEC.canonical) == SPEC
