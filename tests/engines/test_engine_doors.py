"""What engines give in the place of their tensors: refused by name, or as the engine by itself has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Recompute, connect
from kvstore_client.engines.transformers import CachedModel, TransformersRunner, cache_of
from kvstore_client.engines.vllm.pages import PagesOfModel
from kvstore_client.recompute import recompute
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.spec import Durability, ModelSpec
from tests.engines.hicache import HostPool
from tests.engines.test_sglang import backend, keys_of
from tests.recompute.models import LAYERS, model_of, prompt
from tests.specs import small_spec

SHAPE = (6, 2, 4, 16)  # [pages, heads, tokens, K and V]
GOOD = torch.zeros(SHAPE, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(SHAPE, dtype=torch.float16), "float16.*bfloat16"),
        (torch.zeros(SHAPE, dtype=torch.float32), "float32.*bfloat16"),
        (torch.zeros(SHAPE, dtype=torch.uint8), "uint8.*bfloat16"),
        (GOOD.to("meta"), "meta"), (GOOD.to_sparse(), "sparse"), (GOOD[:, :1], "shape"), (GOOD[0], "shape"),
        (GOOD[..., :8], "shape"), (None, "NoneType"),
    ],
)  # fmt: skip
def test_vllms_pages_are_the_models_or_refused(tensor: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        PagesOfModel(small_spec(), [GOOD, tensor], 4, "FLASH_ATTN")
    with pytest.raises(InvalidRequest, match=r"1 tensors of pages.* 2 layers"):
        PagesOfModel(small_spec(), [GOOD], 4, "FLASH_ATTN")


PLANE = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((PLANE,), "pair"), ((PLANE, None), "NoneType"), ((PLANE, PLANE[:, :4]), "one length"),
        ((PLANE, PLANE[0]), "5, 8"), ((PLANE, PLANE.half()), "float16.*float32"), ((PLANE, PLANE.to("meta")), "meta"),
        ((PLANE, PLANE.numpy()), "tensors"), (None, "NoneType"),
    ],
)  # fmt: skip
def test_a_cache_for_transformers_has_one_dtype_and_length(pair: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"kv\[1\].*{words}"):
        cache_of([(PLANE, PLANE), pair])


# ---------------------------------------------------------------- transformers

MODEL = model_of("qwen3")
IDS = prompt(40, 1)[None]
SERVED = {"int32": IDS.int(), "a view": torch.stack([IDS, IDS], -1)[..., 0]}
LEFT = {
    "a batch": torch.cat([IDS, IDS]), "nothing": None, "a list": IDS.tolist(), "int16": IDS.short(), "bool": IDS > 5,
    "uint8": IDS.to(torch.uint8), "uint32": IDS.to(torch.uint32), "float32": IDS.float(), "float16": IDS.half(),
    "bfloat16": IDS.bfloat16(), "complex64": IDS.to(torch.complex64), "on meta": IDS.to("meta"), "one row": IDS[0],
    "a number": torch.tensor(5), "three axes": IDS[None], "no tokens": IDS[:, :0], "below 0": IDS - 50,
    "beyond the vocabulary": IDS + 50,
}  # fmt: skip


def outcome(generate: Any, *args: Any, **options: Any) -> Any:
    """The tokens, or what kind of error there was."""
    try:
        found = generate(*args, max_new_tokens=2, do_sample=False, **options)
    except Exception as error:
        return type(error)
    return getattr(found, "sequences", found).tolist()


def test_prompts_of_any_form_are_transformers_own_or_served_with_its_result(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        model = CachedModel(MODEL, client, chunk_tokens=16)
        for name, ids in (SERVED | LEFT).items():
            assert outcome(model.generate, ids) == outcome(MODEL.generate, ids), name
        begun = outcome(MODEL.generate, None, bos_token_id=5)
        assert outcome(model.generate, None, bos_token_id=5) == begun
        for name, ids in SERVED.items():
            report = model.generate(ids, max_new_tokens=1).report
            assert (report.bypassed, report.token_count) == ("", 40), name
        assert model.generate(None, max_new_tokens=1, bos_token_id=5).report.bypassed
        model.close()


def test_a_prompt_may_have_transformers_own_name_or_be_embeddings_alone(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        model = CachedModel(MODEL, client, chunk_tokens=16)
        assert outcome(model.generate, inputs=IDS) == outcome(MODEL.generate, inputs=IDS)
        assert model.generate(inputs=IDS, max_new_tokens=1).report.bypassed == ""
        for options in ({"inputs_embeds": MODEL.get_input_embeddings()(IDS).detach()}, {"bos_token_id": 5}):
            expected = outcome(MODEL.generate, **options)
            assert isinstance(expected, list)
            assert outcome(model.generate, **options) == expected
        model.close()


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": -1000}, {"max_new_tokens": [5]}, {"max_new_tokens": "5"}, {"max_new_tokens": 2.0},
        {"max_new_tokens": np.int64(2)}, {"max_length": "ab", "max_new_tokens": None},
        {"max_length": -4000, "max_new_tokens": None}, {"pad_token_id": "ab"}, {"pad_token_id": [1, 2]},
        {"pad_token_id": torch.tensor([1, 2])}, {"pad_token_id": torch.tensor(95)}, {"pad_token_id": 95.0},
    ],
    ids=str,
)  # fmt: skip
def test_limits_and_padding_of_any_type_are_transformers_own_or_refused_in_its_words(
    sidecar: Sidecar, options: dict[str, Any]
) -> None:
    def said(generate: Any) -> Any:
        try:
            found = generate(IDS, **{"max_new_tokens": 2, "do_sample": False, **options})
        except Exception as error:
            return type(error), str(error)
        return getattr(found, "sequences", found).tolist()

    with connect(sidecar.address) as client:
        assert said(CachedModel(MODEL, client, chunk_tokens=16).generate) == said(MODEL.generate)


def spec_of(chunk_tokens: int) -> ModelSpec:
    return ModelSpec.from_transformers(MODEL.config, MODEL, chunk_tokens)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step_tokens": 24}, "step_tokens 24 .*multiple of chunk_tokens 16"),
        ({"step_tokens": -16}, "step_tokens -16 .*multiple of chunk_tokens 16"),
        ({"step_tokens": 0}, "step_tokens 0 .*multiple of chunk_tokens 16"),
        ({"step_tokens": 32.0}, r"step_tokens 32\.0 .*multiple"),
        ({"step_tokens": "32"}, "step_tokens '32' .*multiple"),
        ({"durability": "LOCAL"}, "durability 'LOCAL'.*LOCAL"), ({"durability": Durability.NONE}, "durability.*LOCAL"),
        ({"spec": spec_of(16), "chunk_tokens": 64}, r"chunk_tokens 64 .*spec\.chunk_tokens 16"),
        ({"spec": "qwen3"}, "spec is a str.*from_transformers"), ({"client": None}, "client is a NoneType.*connect"),
        ({"client": "unix:///run/kvstore.sock"}, "client is a str.*connect"),
        ({"model": MODEL.model}, "Qwen3Model.* cannot generate.*AutoModelForCausalLM"),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_in_front_of_a_sidecar_is_made_of_what_fits_or_refused(
    sidecar: Sidecar, given: dict[str, Any], words: str
) -> None:
    """At once, not in a warning for each prompt that is then not kept."""
    with connect(sidecar.address) as client:
        with pytest.raises(InvalidRequest, match=words):
            CachedModel(**{"model": MODEL, "client": client, "chunk_tokens": 16, **given})
        assert CachedModel(MODEL, client, spec=spec_of(16), chunk_tokens=16).step_tokens == 16
        assert CachedModel(MODEL, client, spec=spec_of(16)).step_tokens == 16
        assert CachedModel(MODEL, client).step_tokens == 256


@pytest.mark.parametrize(
    "tokens",
    [
        None, "ab", [], [[1, 2]], [1.5, 2], [True], [-1], [96], 5, IDS[0].float(), IDS[0].bfloat16(), IDS[0] > 5,
        IDS[0].to("meta"), IDS[0].to_sparse(), IDS[0].to(torch.complex64), IDS[0].float().requires_grad_(), IDS,
        np.array(["a"]), np.array([1.0]), np.zeros(3, "datetime64[s]"),
    ],
)  # fmt: skip
def test_what_is_recomputed_are_tokens_or_refused(tokens: Any, sidecar: Sidecar) -> None:
    """By the call that computes, and by the one that looks first."""
    runner = TransformersRunner(MODEL, chunk_tokens=16)
    with pytest.raises(InvalidRequest, match="token"):
        recompute(runner, tokens, [], Recompute.full(LAYERS))
    with connect(sidecar.address) as client, pytest.raises(InvalidRequest, match=r"token|logit_count"):
        client.partial_prefill(runner, tokens)


def test_a_model_in_a_wrapper_is_refused_by_name() -> None:
    """As PEFT wraps one: its ``base_model`` is no decoder, and all else is the model's own."""

    class Wrapped(torch.nn.Module):
        base_model, config, lm_head = MODEL, MODEL.config, MODEL.lm_head

    wrapped: Any = Wrapped()
    with pytest.raises(InvalidRequest, match=r"Wrapped wraps.*get_base_model\(\)"):
        TransformersRunner(wrapped)


def test_tokens_of_any_whole_dtype_are_recomputed_alike() -> None:
    runner = TransformersRunner(MODEL, chunk_tokens=16)
    expected = recompute(runner, IDS[0], [], Recompute.full(LAYERS)).logits
    for tokens in (IDS[0].tolist(), IDS[0].int(), IDS[0].to(torch.uint8), IDS[0].numpy().astype(">i8")):
        assert torch.equal(recompute(runner, tokens, [], Recompute.full(LAYERS)).logits, expected)


# ---------------------------------------------------------------- SGLang

PAGE = torch.arange(256, dtype=torch.uint8)
PAGES = {
    "uint8": PAGE, "bool": PAGE > 5, "bfloat16": PAGE.view(torch.bfloat16), "float32": PAGE.view(torch.float32),
    "float64": PAGE.view(torch.float64), "float8": PAGE.view(torch.float8_e4m3fn), "two axes": PAGE.view(4, 64),
    "every other": PAGE[::2], "transposed": PAGE.view(4, 64).t(), "an array": PAGE.numpy(),
    "a view": PAGE.view(2, 128)[:, :64], "with a gradient": PAGE.float().requires_grad_(),
    "read-only": np.frombuffer(bytes(range(256)), np.uint8), "on meta": PAGE.to("meta"), "sparse": PAGE.to_sparse(),
    "conjugate": torch.view_as_complex(PAGE.view(128, 2).float()).conj(), "negative": torch._neg_view(PAGE.float()),
    "nothing": None, "a list": [1, 2], "a word": "ab", "a number": 5, "objects": np.array([None]),
}  # fmt: skip
REFUSED = {"on meta", "sparse", "conjugate", "negative", "nothing", "a list", "a word", "a number", "objects"}


def as_bytes(page: Any) -> bytes:
    if isinstance(page, torch.Tensor):
        return bytes(page.detach().contiguous().flatten().view(torch.uint8).numpy())
    return bytes(np.ascontiguousarray(page).tobytes())


def test_sglangs_pages_are_kept_to_the_bit_or_refused(sidecar: Sidecar) -> None:
    with backend(sidecar, HostPool()) as storage:
        keys = keys_of(len(PAGES), 1000)
        for key, (name, page) in zip(keys, PAGES.items(), strict=True):
            assert storage.set(key, page) is (name not in REFUSED), name
            found = storage.get(key)
            assert (found is None) is (name in REFUSED), name
            assert found is None or bytes(found.numpy()) == as_bytes(page), name
        assert not storage.batch_set(keys[:2], 5)
        assert not storage.batch_set(keys[:2], [PAGE])


def test_a_page_comes_into_memory_of_its_size_or_not_at_all(sidecar: Sidecar) -> None:
    unfit = REFUSED | {"every other", "transposed", "a view", "with a gradient", "read-only"}
    with backend(sidecar, HostPool()) as storage:
        key = keys_of(1, 2000)[0]
        assert storage.set(key, PAGE.flip(0))
        for name, target in PAGES.items():
            if name == "nothing":
                continue
            into = target.clone() if isinstance(target, torch.Tensor) and name not in unfit else target
            into = target.copy() if name == "an array" else into
            found = storage.get(key, into)
            assert (found is None) is (name in unfit), name
            assert found is None or as_bytes(found) == as_bytes(PAGE.flip(0)), name
        assert storage.get(key, torch.zeros(255, dtype=torch.uint8)) is None
        assert storage.get(key, torch.zeros(257, dtype=torch.uint8)) is None


def test_indices_outside_of_the_host_pool_are_refused(sidecar: Sidecar) -> None:
    """Memory there is somebody else's."""
    pool = HostPool()
    pool.fill(3)
    good = pool.indices(2)
    wrong = [
        None, [1.5] * 4, good.float(), good.bool(), good[None], good[:3], good.to("meta"), pool.indices(12), -good,
        torch.tensor([47, 0, 1, 2]), good.flip(0), torch.tensor([46, 47, 48, 49]), "abcd",
    ]  # fmt: skip
    key = keys_of(1, 3000)
    with backend(sidecar, pool) as storage:
        for indices in wrong:
            assert storage.batch_set_v1(key, indices) == [False], indices
            assert storage.batch_exists(key) == 0
        assert storage.batch_set_v1(key, good) == [True]
        before = pool.kv_buffer.clone()
        for indices in wrong:
            assert storage.batch_get_v1(key, indices) == [False], indices
        assert torch.equal(pool.kv_buffer, before)
        assert storage.batch_get_v1(key, pool.indices(5)) == [True]
        assert torch.equal(pool.page(20), pool.page(8))
