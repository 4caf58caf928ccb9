"""A prompt is kept as it was computed, whatever its caller does meanwhile with its tensors and the answer's cache."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from threading import Event
from typing import Any

import pytest
import torch
from kvstore_client import Client
from kvstore_client.derived import is_derived, mark_derived
from kvstore_client.engines.transformers import PENDING_MAX, CachedModel, cache_of
from kvstore_client.forks import _renewals
from kvstore_client.store.receipt import Outcome, Receipt, Settle, Settling
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.generation import StoppingCriteriaList

from kvstore.seams.jobs import begun
from kvstore.spec import Durability, ModelSpec
from tests.engines.test_transformers import STEP, client, model_of, prompt

__all__ = ["client"]


@contextmanager
def keeping_later(cached: CachedModel) -> Iterator[None]:
    """Have stores in the background wait for the end of the block."""
    may_go_on = Event()
    begun(cached._background, may_go_on.wait)
    try:
        yield
    finally:
        may_go_on.set()


def is_kept_right(cached: CachedModel, ids: torch.Tensor, kept: int) -> bool:
    found = cached.generate(ids, max_new_tokens=4, do_sample=False)
    expected = cached.model.generate(ids, max_new_tokens=4, do_sample=False)
    return found.report.reused_token_count == kept and torch.equal(found.sequences, expected)


def test_a_prompt_is_kept_under_its_own_name_whatever_its_tensor_holds_by_then(client: Client) -> None:
    cached = CachedModel(model_of(torch.float32), client, chunk_tokens=STEP)
    ids, other = prompt(STEP * 3 + 1, 94), prompt(STEP * 3 + 1, 95)
    with keeping_later(cached):
        report = cached.generate(ids, max_new_tokens=1).report
        ids.copy_(other)
    assert report.wait_stored(10.0) is Durability.MEMORY
    assert is_kept_right(cached, other, 0)


CHANGES: dict[str, tuple[int, Callable[[Any], None]]] = {
    "cut": (1, lambda cache: cache.crop(10 - cache.get_seq_length())),
    "begun anew": (1, lambda cache: cache.reset()),
    "repeated": (2, lambda cache: cache.batch_repeat_interleave(2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_goes_on_otherwise_leaves_the_prompt_that_is_kept_alone(client: Client, change: str) -> None:
    """It computes what transformers' own cache does."""
    model, ids = model_of(torch.float32), prompt(STEP * 3 + 1, sum(map(ord, change)))
    rows, changed = CHANGES[change]
    onwards, answers = prompt(60, 97).repeat(rows, 1), []
    cached = CachedModel(model, client, chunk_tokens=STEP)
    with keeping_later(cached), torch.no_grad():
        found = cached.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        plain = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        for cache in (found.sequences.past_key_values, plain.past_key_values):
            changed(cache)
            answers.append(model(onwards, past_key_values=cache).logits)
    assert torch.allclose(answers[0], answers[1], atol=1e-4)
    assert found.report.wait_stored(10.0) is Durability.MEMORY
    assert is_kept_right(cached, ids, STEP * 3)


def ended_early(cached: CachedModel, ids: torch.Tensor, *, within_inference: bool = False) -> tuple[Any, Any]:
    """The caches of an answer that ended long before its limit, so that there is memory for more; and transformers'."""

    def ends(tokens: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.tensor([tokens.shape[1] >= ids.shape[1] + 2])

    options = {"max_new_tokens": 60, "do_sample": False, "stopping_criteria": StoppingCriteriaList([ends])}
    options |= {"return_dict_in_generate": True}
    with torch.inference_mode(within_inference):
        found, plain = (each.generate(ids, **options) for each in (cached, cached.model))
    found.report.wait_stored(10.0)
    return found.sequences.past_key_values, plain.past_key_values


@pytest.mark.parametrize("within_inference", [False, True])
@pytest.mark.parametrize("trained", ["", "q_proj", "k_proj"])
def test_a_models_own_pass_goes_on_from_an_answers_cache_and_is_trained_through_it(
    client: Client, trained: str, within_inference: bool
) -> None:
    """As it does from transformers' own cache: outside of ``torch.no_grad``, pass after pass."""
    model, ids = model_of(torch.float32, num_key_value_heads=4), prompt(STEP * 3 + 1, 98)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not trained or trained in name)
    passes = [prompt(count, 99 + count) for count in (1, 4, 1)]
    found = []
    for cache in ended_early(cached, ids, within_inference=within_inference):
        seen = [model(each, past_key_values=cache).logits for each in passes]
        torch.stack([each.sum() for each in seen]).sum().backward()
        with torch.no_grad():
            seen.append(model(passes[0], past_key_values=cache).logits)
        assert cache.get_seq_length() == ids.shape[1] + 1 + 7
        found.append([*(each.detach() for each in seen), model.model.layers[0].self_attn.q_proj.weight.grad])
        model.zero_grad()
    for one, other in zip(*found, strict=True):
        assert (one is other is None) or torch.allclose(one, other, rtol=1e-3, atol=1e-3)
    assert is_kept_right(cached, ids, STEP * 3)


def test_what_is_computed_over_a_derived_cache_is_derived_also_where_it_is_trained_on() -> None:
    k, v = torch.ones(2, 8, 4), torch.ones(2, 8, 4)
    mark_derived([k, v])
    cache = cache_of([(k, v)])
    for _ in range(2):
        keys, values = cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
        assert is_derived([keys])
        assert is_derived([values])


@pytest.mark.parametrize(
    "copied",
    [
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        deepcopy,
    ],
    ids=["beams", "repeated", "selected", "whole"],
)
@pytest.mark.parametrize("derived", [True, False])
def test_what_transformers_copies_of_a_derived_cache_is_derived(copied: Callable[[Any], Any], derived: bool) -> None:
    """A beam search ends with such a copy, and who goes on from one cache twice begins with one."""
    k, v = torch.ones(2, 8, 4), torch.ones(2, 8, 4)
    if derived:
        mark_derived([k, v])
    cache = cache_of([(k, v)])
    cache = copied(cache) or cache
    layer = cache.layers[0]
    assert layer.keys.data_ptr() != k.data_ptr()
    assert is_derived([layer.keys]) == is_derived([layer.values]) == derived
    keys, values = cache.update(*(torch.zeros(layer.keys.shape[0], 2, 3, 4) for _ in "kv"), 0)
    assert is_derived([keys]) == is_derived([values]) == derived


def test_a_cache_over_the_callers_tensors_leaves_them_as_they_are_when_it_is_cut() -> None:
    kv = [(torch.ones(2, 8, 4), torch.ones(2, 8, 4))]
    cache = cache_of(kv)
    cache.crop(-4)
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert cache.get_seq_length() == 7
    assert all(bool((plane == 1).all()) for plane in kv[0])


def test_a_reset_leaves_the_memory_alone_that_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers may zero what a layer has."""
    monkeypatch.setattr(DynamicLayer, "reset", CacheLayerMixin.reset)
    kv = [(torch.ones(2, 8, 4), torch.ones(2, 8, 4))]
    cache = cache_of(kv)
    cache.reset()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert cache.get_seq_length() == 3
    assert all(bool((plane == 1).all()) for plane in kv[0])


def test_a_prompt_does_not_wait_for_the_device_of_the_one_before(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the caller that asks for the level waits for it."""
    answered: Future[None] = Future()
    both, stored = Event(), list[int]()

    def store(_spec: Any, tokens: Any, _kv: Any, **_: Any) -> Receipt:
        stored.append(len(tokens))
        if len(stored) == 2:
            both.set()
        committed: Future[tuple[Durability, int, str]] = Future()
        committed.set_result((Durability.MEMORY, len(tokens), ""))
        settling = Settling(answered, lambda: Outcome({Durability.SHARED: "", Durability.OBJECT: ""}, True))
        return Receipt(committed, Settle(Durability.LOCAL, lambda *_: settling))

    monkeypatch.setattr(client, "store", store)
    cached = CachedModel(model_of(torch.float32), client, chunk_tokens=STEP)
    reports = [cached.generate(prompt(STEP + 1, seed), max_new_tokens=1).report for seed in (101, 102)]
    assert both.wait(5.0)
    answered.set_result(None)
    assert [report.wait_stored(5.0) for report in reports] == [Durability.LOCAL] * 2
    assert stored == [STEP, STEP]


def test_no_more_caches_wait_to_be_kept_than_memory_may_have(client: Client) -> None:
    cached = CachedModel(model_of(torch.float32), client, chunk_tokens=STEP)
    with keeping_later(cached):
        reports = [
            cached.generate(prompt(STEP + 1, 110 + number), max_new_tokens=1).report
            for number in range(PENDING_MAX + 1)
        ]
        last = reports[-1].receipt
        assert last.is_done
        assert "still to be kept" in last.reason
    assert [report.wait_stored(10.0) for report in reports] == [Durability.MEMORY] * PENDING_MAX + [Durability.NONE]


def test_a_forked_child_keeps_its_prompts_itself(client: Client) -> None:
    """It has no thread of its parent's."""
    cached = CachedModel(model_of(torch.float32), client, chunk_tokens=STEP)
    with keeping_later(cached):
        _renewals[cached](cached)  # as at a fork
        report = cached.generate(prompt(STEP + 1, 103), max_new_tokens=1).report
        assert report.wait_stored(10.0) is Durability.MEMORY


@pytest.mark.parametrize("planning", ["off", "observe"])
@pytest.mark.parametrize("keeps_e", [False, True])
def test_the_memory_of_an_answers_cache_is_free_with_the_answer(client: Client, planning: str, keeps_e: bool) -> None:
    """Nothing else would free it: on a GPU some prompts fill what is left, and Python's collector sees none of that."""
    client.planner.mode = planning
    model, ids = model_of(torch.float32, num_key_value_heads=4), prompt(STEP * 3 + 5, 97)
    spec = ModelSpec.from_transformers(model.config, model, STEP, keeps_e=keeps_e)
    cached = CachedModel(model, client, spec=spec)
    cached.generate(ids, max_new_tokens=2).report.wait_stored(10.0)
    gc.collect()
    gc.disable()
    try:
        found = cached.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
        assert found.report.reused_token_count == STEP * 3
        memory = [weakref.ref(layer.keys._base) for layer in found.sequences.past_key_values.layers]
        del found
        assert not any(each() is not None for each in memory)
    finally:
        gc.enable()
