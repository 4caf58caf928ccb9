"""The precision of products, which PyTorch keeps as settings of the process.

A process says it by ``torch.set_float32_matmul_precision``, or since PyTorch 2.9 for each backend
(``torch.backends.mkldnn.matmul.fp32_precision``). After the latter the former can no longer be read: it raises."""

from __future__ import annotations

from typing import Any

import torch

PLAIN = ("none", "ieee")
LEGACY = {("tf32", "tf32"): "high", ("bf16", "tf32"): "medium"}
"""One setting for all backends makes this of (mkldnn, cuda); keys of older releases have its name."""
USUAL = {
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True,
    "allow_fp16_accumulation": False,
}
"""PyTorch lets half precision lose so much inside a product on a GPU unless it is told otherwise."""


def precision_of_products(*, on_gpu: bool) -> str:
    """Return a name of these settings, for a model on a GPU or on the CPU; empty where all are PyTorch's defaults.
    Cost: some microseconds."""
    cuda = torch.backends.cuda.matmul
    parts = [_float32(cuda, on_gpu=on_gpu)]
    parts += [name for name, usual in USUAL.items() if getattr(cuda, name, usual) != usual]
    return "/".join(filter(None, parts))


def _float32(cuda: Any, *, on_gpu: bool) -> str:
    mkldnn: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(mkldnn, "fp32_precision"):
        found = str(torch.get_float32_matmul_precision())
        return "" if found == "highest" else found
    both = tuple("" if each in PLAIN else str(each) for each in (mkldnn.fp32_precision, cuda.fp32_precision))
    if on_gpu and both == ("", "tf32"):
        return "high"  # what ``allow_tf32`` says: for a GPU the same as "high", and one name in older releases
    found = "+".join(both) if any(both) else ""
    return LEGACY.get(both, found)  # type: ignore[arg-type]  # a tuple of two: mypy takes it for one of any length
