"""Pages, settings and versions of vLLM that the connector does not know are refused with what to set."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from kvstore_client.engines.vllm.pages import CPU, PagesOfModel
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_client.engines.vllm.versions import WANTED, check_interface, check_version

from kvstore.errors import InvalidRequest
from kvstore.spec import LayerSpec
from tests.engines.vllm.engine import SPEC
from tests.specs import small_spec


def pages(shape: tuple[int, ...], backend: str, dtype: torch.dtype = torch.bfloat16, writer: Any = None) -> Any:
    return PagesOfModel(SPEC, [torch.zeros(shape, dtype=dtype) for _ in range(2)], 4, backend, writer)


def writer_of(order: str) -> Any:
    """A kernel that writes K as it is, transposed, or in pairs of tokens; and V as it is."""

    def write(k: Any, v: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
        if key_cache.dtype is torch.uint8:  # as vLLM shows pages of 8 bits
            k, v = k.to(torch.float8_e4m3fn).view(torch.uint8), v.to(torch.float8_e4m3fn).view(torch.uint8)
        page = int(slots[0]) // k.shape[0]
        strip = k[:, 0]
        if order == "transposed":
            strip = strip.t()
        elif order == "pairs":
            strip = strip.reshape(-1, 2, strip.shape[1]).transpose(1, 2)
        key_cache[page, 0] = strip.reshape(key_cache[page, 0].shape)
        value_cache[page, 0] = v[:, 0]

    return write


@pytest.mark.parametrize(
    ("shape", "backend", "dtype", "said"),
    [
        ((8, 4, 4, 16), "FLASH_ATTN", torch.bfloat16, r"\[pages, 2, tokens, 16\]"),
        ((2, 8, 4, 2, 8), "FLASH_ATTN", torch.bfloat16, "use the attention backend FLASH_ATTN"),
        ((8, 2, 4, 16), "FLASH_ATTN", torch.float16, "--kv-cache-dtype auto"),
        ((8, 2, 4, 16), "FLASH_ATTN", torch.uint8, "pages are uint8, the model's cache is bfloat16"),
        ((8, 2, 4, 16), "NEW_ATTN", torch.bfloat16, "--attention-backend to FLASH_ATTN"),
        ((8, 2, 4, 16), "CPU_MLA", torch.bfloat16, "cannot go on after a prefix"),
        ((8, 2, 3, 16), "FLASH_ATTN", torch.bfloat16, "blocks of 4"),
    ],
)
def test_pages_that_do_not_fit_are_refused_with_what_to_set(
    shape: tuple[int, ...], backend: str, dtype: torch.dtype, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        pages(shape, backend, dtype)


def test_pages_that_are_packed_otherwise_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="--dtype float16"):
        pages((8, 2, 4, 16), CPU, writer=writer_of("pairs"))


@pytest.mark.parametrize("order", ["plain", "transposed"])
@pytest.mark.parametrize(("kept", "shown"), [("bfloat16", torch.bfloat16), ("float8_e4m3fn", torch.uint8)])
def test_the_cpu_backends_pages_are_read_as_its_kernel_writes_them(order: str, kept: str, shown: torch.dtype) -> None:
    tensors = [torch.zeros((8, 1, 4, 16), dtype=shown)]
    spec = small_spec(layers=(LayerSpec(kv_heads=1, k_dim=8, v_dim=8),), cache_dtype=kept)
    dtype = getattr(torch, kept)
    views = PagesOfModel(spec, tensors, 4, CPU, writer_of(order)).views[0]
    assert {view.dtype for view in views} == {dtype}
    k, v = torch.randn(4, 1, 8).to(dtype), torch.randn(4, 1, 8).to(dtype)
    halves = tensors[0].view(dtype).view(8, 1, 8, 8).chunk(2, dim=2)
    writer_of(order)(k, v, *halves, torch.arange(4) + 12)
    assert torch.equal(views[0][3].transpose(0, 1).float(), k.float())
    assert torch.equal(views[1][3].transpose(0, 1).float(), v.float())


def test_pages_of_8_bits_are_the_models_for_every_backend() -> None:
    spec = small_spec(cache_dtype="float8_e4m3fn")
    tensors = [torch.randint(0, 255, (8, 2, 4, 16), dtype=torch.uint8) for _ in range(2)]
    k, v = PagesOfModel(spec, tensors, 4, "FLASHINFER").views[1]
    assert (k.dtype, v.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert torch.equal(torch.cat([k.view(torch.uint8), v.view(torch.uint8)], 3), tensors[1])
    with pytest.raises(InvalidRequest, match="pages are int8, the model's cache is float8_e4m3fn"):
        PagesOfModel(spec, [each.view(torch.int8) for each in tensors], 4, "FLASHINFER")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"chunks": 1}, "chunks is not a setting; the settings are address"),
        ({"load": "sync"}, "load 'sync' must be one of async, layerwise"),
        ({"chunk_tokens": "256"}, "chunk_tokens cannot be '256'"),
        ({"chunk_tokens": True}, "chunk_tokens cannot be True"),
        ({"timeout_s": 0}, "timeout_s 0 must be in"),
        ({"weights_digest": "mine"}, "unverified:<name>"),
        ({"recompute": 0.2}, "recompute cannot be 0.2"),
        ({"recompute": {"share": 0.2}}, "recompute has no share; it takes first_layer, gradual"),
        ({"recompute": {"ratio": 2}}, "recompute: ratio 2 must be in 0..1"),
        ({"recompute": {"first_layer": 2, "last_layer": 3}}, "first_layer 2 needs hidden states"),
        ({"recompute": {}, "digests": "vllm"}, "needs the tokens of documents"),
    ],
)
def test_settings_say_what_is_wrong(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        ConnectorSettings.of(extra)


def test_an_unknown_version_is_said_with_the_known_ones() -> None:
    for version in ("0.32.0", "0.32.3+cpu", "0.33.1"):
        check_version(version, False)
    with pytest.raises(InvalidRequest, match=r"vLLM 0\.41\.0; .* 0\.32 .* 0\.33 .*allow_unknown_version"):
        check_version("0.41.0", False)
    check_version("0.41.0", True)


def test_without_a_vllm_that_has_connectors_the_known_ones_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "kvstore_client.engines.vllm.connector", raising=False)
    with pytest.raises(ImportError, match=r"knows vLLM 0\.32 .* 0\.33 .*; what is installed here lacks it"):
        from kvstore_client.engines.vllm import KVStoreConnector  # noqa: F401


def taking(*names: str) -> Any:
    """A method with these parameters."""

    def method(*_: Any) -> None: ...

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def test_an_unknown_interface_is_said_by_method() -> None:
    methods: dict[str, Any] = {name: taking(*names) for name, names in WANTED.items()}
    known = type("Known", (), methods)
    check_interface(known, known, "0.33.0")
    del methods["wait_for_save"]
    methods["request_finished"] = taking("request", "block_ids", "reason")
    other = type("Other", (), methods)
    with pytest.raises(
        InvalidRequest, match=r"0\.34.*request_finished takes \(request, block_ids, reason\).*wait_for_save is gone"
    ):
        check_interface(other, other, "0.34.0")
