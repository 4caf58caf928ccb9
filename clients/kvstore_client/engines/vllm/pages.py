"""Views of K and V in vLLM's pages, as tensors [pages, kv_heads, page_tokens, dim] that a fetch can fill.

vLLM shows each layer as [pages, heads, page_tokens, content]. The attention backend decides the layout of the content.
The CUDA backends below keep K and then V along it. The CPU backend keeps K's half of a page and then V's, with K
transposed, or packed for matrix instructions. Its layout is probed: write a page by its own kernel, and look at the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore_client.arrays import Tensor, check_memory
from kvstore_client.engines.vllm.geometry import FP8
from kvstore_client.engines.vllm.groups import LayerGroup

SIDE_BY_SIDE = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER")
LATENT = ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA")
WHOLE_ONLY = ("CPU_MLA", "AMX_MLA")
"""Backends that compute a prompt only from its beginning: they would not read a loaded prefix."""
CPU = "CPU_ATTN"
LAYOUT = "page head slot dim"
Writer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Writes K and V, [tokens, heads, dim], by a call with (k, v, key_cache, value_cache, slots). It makes the pages' dtype
of theirs."""
_DIGITS = 16
"""So many small whole numbers every dtype of a cache has."""


class PagesOfModel:
    """Each layer's (K, V) views, in the order of the spec's layers, and this rank's range of kv ``heads`` (None: all).
    ``kept``: the layers whose heads it keeps, where the next ranks, as many as ``replicas`` says, have the same heads.
    ``groups``: the layers by block table; none: all have one, with blocks of ``block_tokens``.

    Raises: InvalidRequest naming what does not fit.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Sequence[Tensor], block_tokens: int, backend: str, writer: Writer | None = None,
        *, groups: Sequence[LayerGroup] = (), rank: int = 0, ranks: int = 1, replicas: int = 1,
    ) -> None:  # fmt: skip
        if len(tensors) != len(spec.slab_layers):
            raise InvalidRequest(
                f"{len(tensors)} tensors of pages, the model keeps KV of {len(spec.slab_layers)} layers"
            )
        for layer, tensor in zip(spec.slab_layers, tensors, strict=True):
            check_memory(tensor, f"layer {layer}: its pages")
        self.rank = rank
        shares = ranks // replicas
        each, share = spec.layers[0].kv_heads // shares, rank // replicas
        self.heads = (share * each, (share + 1) * each) if shares > 1 else None
        self.kept = range(rank % replicas, len(tensors), replicas)
        self.views: list[tuple[Tensor, Tensor]] = []
        for layer, tensor in zip(spec.slab_layers, tensors, strict=True):
            self.views.append(_views(spec, layer, tensor, backend, writer, shares))
        self.groups = tuple(groups) or (LayerGroup(0, tuple(range(len(tensors))), block_tokens),)
        for group in self.groups:
            for page_tokens in {int(tensors[layer].shape[2]) for layer in group.layers}:
                if not page_tokens or group.block_tokens % page_tokens:
                    raise InvalidRequest(
                        f"pages of {page_tokens} tokens do not divide vLLM's blocks of {group.block_tokens}"
                    )

    def token_bytes(self, group: LayerGroup) -> int:
        """Return the bytes of one token in a group's layers, of this rank's heads."""
        views = (view for layer in group.layers for view in self.views[layer])
        return sum(view.shape[1] * view.shape[-1] * view.element_size() for view in views)

    def computed(self) -> Callable[[], None]:
        """Return a function that waits until all is done that this thread has asked of the pages' GPUs so far."""
        import torch

        cuda: Any = torch.cuda  # its events have no types
        events = [
            cuda.current_stream(device).record_event() for device in {k.device for k, _ in self.views if k.is_cuda}
        ]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def settle(self) -> None:
        """Wait until other threads' copies into a GPU's pages are done: they run on its default stream."""
        import torch

        for device in {k.device for k, _ in self.views if k.is_cuda}:
            torch.cuda.default_stream(device).synchronize()


def _views(
    spec: ModelSpec, layer: int, tensor: Tensor, backend: str, writer: Writer | None, shares: int
) -> tuple[Tensor, Tensor]:
    each = spec.layers[layer]
    content, heads = each.k_dim + each.v_dim, each.kv_heads // shares
    if len(tensor.shape) != 4 or tuple(tensor.shape[1::2]) != (heads, content):
        raise InvalidRequest(
            f"layer {layer}: its pages have the shape {tuple(tensor.shape)}, the model says [pages, {heads}, "
            f"tokens, {content}]: use the attention backend {' or '.join((*SIDE_BY_SIDE, CPU))} with "
            "--kv-cache-dtype auto or fp8"
        )
    pages = _as_kept(spec, layer, tensor)
    if backend == CPU:
        assert writer is not None
        return _cpu_views(tensor, pages, each.k_dim, each.v_dim, writer)
    if backend in WHOLE_ONLY:
        raise InvalidRequest(
            f"attention backend {backend} cannot go on after a prefix (vLLM turns its own prefix cache off for it): "
            "run this model without the connector, or on a GPU"
        )
    if backend in (LATENT if spec.mla else SIDE_BY_SIDE):
        return pages[..., : each.k_dim], pages[..., each.k_dim :]
    raise InvalidRequest(
        f"attention backend {backend}: how its pages are packed is not known here; set --attention-backend to "
        f"{' or '.join(LATENT if spec.mla else SIDE_BY_SIDE)}"
    )


def _as_kept(spec: ModelSpec, layer: int, tensor: Tensor) -> Tensor:
    """Return pages in the dtype of the spec. vLLM shows those of 8 bits as bytes."""
    import torch

    found = str(tensor.dtype).removeprefix("torch.")
    if found == spec.cache_dtype:
        return tensor
    if tensor.dtype is torch.uint8 and spec.cache_dtype in FP8.values():
        return tensor.view(getattr(torch, spec.cache_dtype))
    raise InvalidRequest(
        f"layer {layer}: its pages are {found}, the model's cache is {spec.cache_dtype}: set --kv-cache-dtype auto"
    )


def _cpu_views(
    tensor: Tensor, kept: Tensor, k_dim: int, v_dim: int, writer: Writer
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``tensor``: pages as vLLM's kernel knows them; ``kept``: the same in the spec's dtype."""
    if k_dim != v_dim:
        raise InvalidRequest(f"K of {k_dim} and V of {v_dim} in one page: the CPU backend is known for equal ones only")
    page_tokens = int(tensor.shape[2])
    views = []
    for which in (0, 1):
        half = _half(kept, which)
        pages, heads = half.shape[:2]
        is_transposed = _probed(tensor.dtype, kept.dtype, page_tokens, k_dim, which, writer)
        plain = half.view(pages, heads, k_dim, page_tokens).transpose(2, 3) if is_transposed else half
        views.append(plain)
    return views[0], views[1]


def _half(tensor: Tensor, which: int) -> Tensor:
    """Return K's or V's half of each page, [pages, heads, page_tokens, dim], as the kernel gets it."""
    pages, heads, page_tokens, content = tensor.shape
    whole = tensor.view(pages, heads, 2 * page_tokens, content // 2)
    return whole.chunk(2, dim=2)[which]


def _probed(shown: Any, kept: Any, page_tokens: int, dim: int, which: int, writer: Writer) -> bool:
    """Number the items of a page, and write them through the kernel, digit by digit; return True when they lie
    transposed. ``shown``: the dtype of pages as the kernel knows them; ``kept``: that of the items."""
    import torch

    count, scale = page_tokens * dim, 1
    numbers = torch.arange(count)
    written = torch.zeros(count, dtype=torch.int64)
    while scale < count:
        strips = (numbers // scale % _DIGITS).to(torch.float32).reshape(page_tokens, 1, dim)
        page = torch.zeros(2, 1, page_tokens, 2 * dim, dtype=shown)
        writer(strips, strips.clone(), _half(page, 0), _half(page, 1), torch.arange(page_tokens) + page_tokens)
        written += _half(page, which)[1, 0].reshape(-1).view(kept).to(torch.int64) * scale
        scale *= _DIGITS
    if torch.equal(written, numbers):
        return False
    if torch.equal(written.view(dim, page_tokens).t().reshape(-1), numbers):
        return True
    raise InvalidRequest(
        "vLLM packs these pages for matrix instructions, which kvstore cannot address yet: set --dtype float16 or "
        "float32 (AMX packs bfloat16 alone)"
    )
