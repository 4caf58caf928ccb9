"""Weights that change in place, past PyTorch's own bookkeeping, too: merged adapters, weights that are synced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvstore_client import Client, ModelSpec, Recompute, connect
from kvstore_client.engines.transformers import CachedModel, TransformersRunner
from kvstore_client.recompute import recompute
from kvstore_ops.sidecar import Sidecar
from torch import nn
from transformers import LogitsProcessor

from kvstore.errors import InvalidRequest
from kvstore.spec import Durability
from kvstore.spec.from_transformers import weights_digest
from kvstore.spec.live import identity_of
from kvstore.spec.weights import PIECE_BYTES, WeightsWatch, digested
from tests.recompute.models import LAYERS, model_of
from tests.recompute.models import prompt as tokens_of

STEP = 16
IDS = tokens_of(STEP * 3 + 5, 21)[None]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Sidecar("--capacity", "64 MiB") as sidecar, connect(sidecar.address) as connected:
        yield connected


def linear(model: Any) -> Any:
    return model.model.layers[1].self_attn.k_proj


def merge(model: Any) -> None:
    """As PEFT merges an adapter."""
    weight = linear(model).weight
    weight.data += torch.randn(len(weight), 2) @ torch.randn(2, weight.shape[1])


def sync(model: Any) -> None:
    """As weights come from a trainer."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.01)


def alias(model: Any) -> None:
    """Through memory that somebody shares."""
    linear(model).weight.detach().numpy()[:] *= 2


def swap(model: Any) -> None:
    linear(model).weight.data = linear(model).weight.data * 2


def turn(model: Any) -> None:
    """The same bytes at the same place, read in another order."""
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.t()


def replace(model: Any) -> None:
    linear(model).weight = nn.Parameter(linear(model).weight * 2)


def exchange(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj = nn.Linear(32, 16, bias=False)


def step(model: Any) -> None:
    """As an optimiser does: this one PyTorch counts."""
    with torch.no_grad():
        linear(model).weight[0, 0] += 1


def cast(model: Any) -> None:
    model.to(torch.bfloat16)


def retune(model: Any) -> None:
    model.config.rms_norm_eps = 0.5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


CHANGES = (merge, sync, alias, swap, turn, replace, exchange, step, cast, retune)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_change_in_place_is_seen_at_the_next_use(change: Callable[[Any], None]) -> None:
    model = model_of("llama", 6)
    before = ModelSpec.from_transformers(model.config, model)
    runner = TransformersRunner(model, spec=before)
    assert ModelSpec.from_transformers(model.config, model) == before
    change(model)
    after = ModelSpec.from_transformers(model.config, model)
    assert after.weights_digest != before.weights_digest
    assert after == before.refreshed(model) or change is cast
    with pytest.raises(InvalidRequest, match="make a runner of the model as it is"):
        recompute(runner, IDS[0], [], Recompute.full(LAYERS))


def test_no_old_cache_is_served_and_the_new_one_is_kept(client: Client) -> None:
    model = model_of("llama", 7)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    cached.generate(IDS, max_new_tokens=1).report.wait_stored(60.0)
    assert cached.generate(IDS, max_new_tokens=1).report.reused_token_count == STEP * 3
    old = cached.spec
    sync(model)
    found = cached.generate(IDS, max_new_tokens=8, do_sample=False)
    assert (found.report.reused_token_count, found.report.bypassed) == (0, "")
    assert torch.equal(found.sequences, model.generate(IDS, max_new_tokens=8, do_sample=False))
    assert found.report.wait_stored(60.0) is not Durability.NONE
    assert cached.spec != old
    assert cached.generate(IDS, max_new_tokens=1).report.reused_token_count == STEP * 3


def test_what_was_computed_while_the_weights_changed_is_not_kept(client: Client) -> None:
    class Syncing(LogitsProcessor):
        def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            merge(model)
            return scores

    model, same = model_of("llama", 8), model_of("llama", 8)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    report = cached.generate(IDS, max_new_tokens=1, logits_processor=[Syncing()]).report
    assert report.wait_stored(60.0) is Durability.NONE
    assert "changed" in report.receipt.reason
    assert CachedModel(same, client, chunk_tokens=STEP).generate(IDS, max_new_tokens=1).report.reused_token_count == 0


def test_a_hook_or_an_adapter_that_comes_later_is_left_alone(client: Client) -> None:
    model = model_of("llama", 9)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    cached.generate(IDS, max_new_tokens=1).report.wait_stored(60.0)
    hook = model.model.layers[0].register_forward_pre_hook(lambda _module, args: (2 * args[0],))
    found = cached.generate(IDS, max_new_tokens=4, do_sample=False)
    assert "forward hook" in found.report.bypassed
    assert torch.equal(found.sequences, model.generate(IDS, max_new_tokens=4, do_sample=False))
    hook.remove()
    assert cached.generate(IDS, max_new_tokens=1).report.reused_token_count == STEP * 3


def test_a_name_that_somebody_vouches_for_is_believed_but_not_for_another_dtype(client: Client) -> None:
    model = model_of("llama", 10)
    model.config.dtype = "float32"
    spec = ModelSpec.from_transformers(model.config, "unverified:mine", STEP)
    cached = CachedModel(model, client, spec=spec)
    cached.generate(IDS, max_new_tokens=1).report.wait_stored(60.0)
    merge(model)
    assert cached.generate(IDS, max_new_tokens=1).report.reused_token_count == STEP * 3
    with pytest.raises(InvalidRequest, match="vouches"):
        spec.refreshed(model)
    model.to(torch.bfloat16)
    assert "bfloat16" in cached.generate(IDS, max_new_tokens=1).report.bypassed


class Adapted(nn.Linear):
    """A layer with adapters as PEFT makes one: its properties say which of them act."""

    active_adapters = property(lambda self: [self.active])
    disable_adapters = property(lambda self: self.is_off)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (1.0 if self.is_off else 1.5 if self.active == "first" else 0.5)


@pytest.mark.parametrize("switched", [{"is_off": True}, {"active": "second"}])
def test_a_vouched_name_is_not_that_of_another_adapter(client: Client, switched: dict[str, Any]) -> None:
    model = model_of("llama", 14)
    model.config.dtype = "float32"
    layer = model.model.layers[1].self_attn.v_proj
    layer.__class__, layer.is_off, layer.active = Adapted, False, "first"
    spec = ModelSpec.from_transformers(model.config, f"unverified:{switched}", STEP)
    cached = CachedModel(model, client, spec=spec)
    cached.generate(IDS, max_new_tokens=1).report.wait_stored(60.0)
    assert cached.generate(IDS, max_new_tokens=1).report.reused_token_count == STEP * 3
    before, layer.__dict__ = dict(layer.__dict__), {**layer.__dict__, **switched}
    found = cached.generate(IDS, max_new_tokens=4, do_sample=False)
    assert "another name" in found.report.bypassed
    assert torch.equal(found.sequences, model.generate(IDS, max_new_tokens=4, do_sample=False))
    with pytest.raises(InvalidRequest, match="another name"):
        cached.remember([IDS[0]])
    layer.__dict__ = before
    assert cached.generate(IDS, max_new_tokens=1).report.reused_token_count == STEP * 3


def test_one_number_changed_past_all_bookkeeping_is_seen_when_its_piece_has_its_turn_or_on_request() -> None:
    """What a sample cannot promise: this is what ``refreshed`` is for."""
    model = model_of("llama", 11, vocab_size=20_000)
    before = ModelSpec.from_transformers(model.config, model)
    table = model.model.embed_tokens.weight
    at = table.numel() - 3
    table.detach().numpy().reshape(-1)[at] += 1
    assert before.refreshed(model).weights_digest != before.weights_digest
    watched = model.model.embed_tokens.weight
    watch = WeightsWatch([watched])
    watch.learn({watched.data_ptr(): digested({"x": watched}).pieces["x"]})
    assert watch.holds([watched])
    table.detach().numpy().reshape(-1)[at] -= 1
    pieces = -(-watched.numel() * 4 // PIECE_BYTES)
    held = [watch.holds([watched]) for _ in range(pieces)]
    assert held.count(False) == 1


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_sample_sees_a_share_of_one_matrix(share: float) -> None:
    missed = 0
    for seed in range(20):
        tensor = torch.randn(500, 300, generator=torch.Generator().manual_seed(seed))
        watch = WeightsWatch([tensor])
        mask = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed + 100)) < share
        tensor.data[mask] += 1
        missed += watch.holds([tensor])
    assert missed <= (0 if share == 1.0 else 4), "32 places: 0.9 ** 32 is one in thirty"


def test_a_watch_keeps_no_weights_alive() -> None:
    import gc
    import weakref

    model = model_of("llama", 12)
    identity_of(model)
    weight, whole = weakref.ref(linear(model).weight), weakref.ref(model)
    replace(model)
    gc.collect()
    assert weight() is None
    del model
    gc.collect()
    assert whole() is None


def test_weights_without_bytes_are_named() -> None:
    model = model_of("llama", 13)
    linear(model).to("meta")
    with pytest.raises(InvalidRequest, match=r"k_proj.*meta"):
        ModelSpec.from_transformers(model.config, model)
    with pytest.raises(InvalidRequest, match="no plain tensor"):
        weights_digest({"x": 7})


def test_numbers_that_are_none_and_odd_layouts_are_digested() -> None:
    """NaN is not equal to itself, and the same bits are the same."""
    odd = {"nan": torch.full((5, 7), float("nan")), "t": torch.arange(12.0).view(3, 4).t(), "none": torch.empty(0)}
    watch = WeightsWatch(list(odd.values()))
    assert watch.holds(list(odd.values()))
    assert digested(odd).digest == digested({**odd, "t": odd["t"].contiguous()}).digest
    odd["t"].numpy()[:] += 1
    assert not watch.holds(list(odd.values()))


def test_the_same_bytes_under_another_name_shape_or_dtype_are_other_weights() -> None:
    flat = torch.arange(24, dtype=torch.int16)
    states = [
        {"a": flat},
        {"b": flat},
        {"a": flat.view(4, 6)},
        {"a": flat.view(6, 4)},
        {"a": flat.view(torch.bfloat16)},
    ]
    states += [{"a": flat[:12], "b": flat[12:]}, {"a": flat.view(6, 4).contiguous(), "b": flat[:0]}]
    found = [digested(state).digest for state in states]
    assert len(set(found)) == len(found)
    assert digested({"a": flat.view(4, 6).t().contiguous().t()}).digest == found[2]
