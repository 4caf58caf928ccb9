"""The key names what a forward pass reads beside tensors and the model's configuration, or the model has none."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstore_client import Client, ModelSpec, connect
from kvstore_client.engines.transformers import CachedModel
from kvstore_ops.sidecar import Sidecar
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from kvstore.errors import InvalidRequest
from tests.recompute.models import model_of, prompt

PRECISIONS = """
import torch
from kvstore_client import ModelSpec
from kvstore.spec.products import precision_of_products
from tests.recompute.models import model_of

def name():
    return ModelSpec.from_transformers(model.config, model).weights_digest

model = model_of("llama", 3)
names = [name()]
torch.set_float32_matmul_precision("medium")
names.append(name())
torch.set_float32_matmul_precision("highest")
assert name() == names[0]
torch.backends.cuda.matmul.allow_tf32 = True
alone, beside = (precision_of_products(on_gpu=on_gpu) for on_gpu in (True, False))
torch.backends.cuda.matmul.allow_tf32 = False
torch.set_float32_matmul_precision("high")
assert precision_of_products(on_gpu=True) == alone == "high", "for a GPU they are the same"
torch.set_float32_matmul_precision("highest")
products = [(torch.backends.cuda.matmul, "allow_fp16_accumulation", True, False)]
try:
    products += [
        (torch.backends.mkldnn.matmul, "fp32_precision", "bf16", "none"),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32", "none"),
    ]
    assert beside != alone
except AttributeError:  # before PyTorch 2.9 one setting is for all devices
    pass
products = [each for each in products if hasattr(each[0], each[1])]
for backend, setting, value, usual in products:
    setattr(backend, setting, value)
    names.append(name())
    setattr(backend, setting, usual)
    assert name() == names[0], setting
assert len(set(names)) == len(names), names
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Sidecar("--capacity", "64 MiB") as sidecar, connect(sidecar.address) as connected:
        yield connected


def softer(module: Any, q: torch.Tensor, *rest: Any, **named: Any) -> Any:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q / 2, *rest, **named)


@pytest.fixture
def registered() -> Iterator[str]:
    AttentionInterface.register("of_the_user", softer)
    yield "of_the_user"
    del AttentionInterface._global_mapping["of_the_user"]


def given_kernels(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.set_attn_implementation("of_the_user")


def given_a_rotation(_model: Any, patch: pytest.MonkeyPatch) -> None:
    turn = modeling_llama.apply_rotary_pos_emb
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, 2 * k, cos, sin))


def given_eager(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.set_attn_implementation("eager")
    patch.setattr(modeling_llama, "eager_attention_forward", softer)


def given_another_product(_model: Any, patch: pytest.MonkeyPatch) -> None:
    """As users of quantised attention do."""
    plain = torch.nn.functional.scaled_dot_product_attention
    patch.setattr(torch.nn.functional, plain.__name__, lambda q, *rest, **named: plain(q / 2, *rest, **named))


def given_a_wrapped_product(_model: Any, patch: pytest.MonkeyPatch) -> None:
    """By functools.wraps, which gives it the name of what it stands for."""
    plain = torch.nn.functional.scaled_dot_product_attention
    wrapped = functools.wraps(plain)(lambda q, *rest, **named: plain(q / 2, *rest, **named))
    wrapped.__module__ = "torch.nn.functional"
    patch.setattr(torch.nn.functional, plain.__name__, wrapped)


def given_a_wrapped_rotation(_model: Any, patch: pytest.MonkeyPatch) -> None:
    turn = modeling_llama.apply_rotary_pos_emb
    wrapped = functools.wraps(turn)(lambda q, k, cos, sin: turn(q, 2 * k, cos, sin))
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", wrapped)


def given_a_rotation_under_two_wrappers(_model: Any, patch: pytest.MonkeyPatch) -> None:
    """The outer one is PyTorch's own."""
    turn = modeling_llama.apply_rotary_pos_emb
    wrapped = functools.wraps(turn)(lambda q, k, cos, sin: turn(q, 2 * k, cos, sin))
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", torch.no_grad()(wrapped))


def given_a_part_of_a_rotation(_model: Any, patch: pytest.MonkeyPatch) -> None:
    turn = modeling_llama.apply_rotary_pos_emb
    whole = functools.partial(lambda much, q, k, cos, sin: turn(q, much * k, cos, sin), 2)
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", whole)


def given_a_wrapped_pass(_model: Any, patch: pytest.MonkeyPatch) -> None:
    """All layers' normalisations, replaced in their class."""
    norm = modeling_llama.LlamaRMSNorm
    plain = norm.forward
    patch.setattr(norm, "forward", functools.wraps(plain)(lambda self, states: 2 * plain(self, states)))


def given_a_configuration(model: Any, _patch: pytest.MonkeyPatch) -> None:
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"


def cast_in_part(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.model.embed_tokens.to(torch.bfloat16)


CHANGES = (
    given_kernels, given_a_rotation, given_a_wrapped_rotation, given_a_rotation_under_two_wrappers,
    given_a_part_of_a_rotation, given_a_wrapped_pass, given_eager, given_another_product, given_a_wrapped_product,
    given_a_configuration, cast_in_part,
)  # fmt: skip


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_what_only_the_process_knows_has_no_key(
    client: Client, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:  # fmt: skip
    """Before the first digest, and behind it: then calls are transformers' own, and say why."""
    tokens, model = prompt(80, 1)[None], model_of("llama", 3)
    cached = CachedModel(model, client, chunk_tokens=16)
    cached.generate(tokens, max_new_tokens=2, do_sample=False).report.wait_stored(10.0)
    change(model, monkeypatch)
    with pytest.raises(InvalidRequest):
        ModelSpec.from_transformers(model.config, model)
    output = cached.generate(tokens, max_new_tokens=4, do_sample=False)
    assert output.report.bypassed
    assert torch.equal(output.sequences, model.generate(tokens, max_new_tokens=4, do_sample=False))
    cached.close()


def test_a_configuration_of_a_layers_own_counts_when_it_changes() -> None:
    """A copy that says the same is taken, and looked at in each call."""
    model = model_of("llama", 3)
    name = ModelSpec.from_transformers(model.config, model)
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    assert ModelSpec.from_transformers(model.config, model) == name
    attention.config._attn_implementation = "eager"
    with pytest.raises(InvalidRequest, match=r"layers\.1\.self_attn reads another configuration"):
        ModelSpec.from_transformers(model.config, model)


def test_how_precise_products_are_is_in_the_key_however_it_was_said() -> None:
    """In a process of its own: PyTorch lets nobody read the older setting once a newer one was given."""
    subprocess.run([sys.executable, "-c", PRECISIONS], check=True, timeout=120)


def test_a_rotation_that_comes_to_depend_on_the_length_is_left_at_once(client: Client) -> None:
    tokens, model = prompt(80, 1)[None], model_of("llama", 3)
    cached = CachedModel(model, client, chunk_tokens=16)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model.config.max_position_embeddings = 64
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    output = cached.generate(tokens, max_new_tokens=4, do_sample=False)
    assert "depends on the prompt's length" in output.report.bypassed
    cached.close()
