"""Where the programs of `kvstore_kernels.gpu` run in tests: on a GPU where there is one; elsewhere in Triton's
interpreter, on CPU tensors.

Triton decides for the interpreter when it is imported. Others of this process may have imported it before, without the
interpreter, and shall keep that one: so the interpreter has modules of its own, which stand in for Triton only inside
``triton_here``. It converts floats by cutting bits off; here torch converts them, rounded as GPUs do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses products, as conftest has it poison
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PROGRAMS = "kvstore_kernels.gpu.programs"
_DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}  # fmt: skip
_BITS = {8: torch.int8, 16: torch.int16, 32: torch.int32}
_own: dict[str, ModuleType] = {}


@contextmanager
def triton_here() -> Iterator[None]:
    """Let launches run, on the GPU or interpreted."""
    older = None if HAS_GPU else "3.7"  # before, the interpreter has no loop whose bounds are computed
    pytest.importorskip("triton", minversion=older, reason="the kernels of GPUs are written in Triton")
    if HAS_GPU:
        yield
        return
    before, setting = _modules(), os.environ.get("TRITON_INTERPRET")
    _put(_own)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.runtime.interpreter as interpreter

        if interpreter._convert_float is not _converted:
            interpreter._convert_float = _converted
            interpreter._patch_lang = _patched_once(interpreter._patch_lang)
        yield
    finally:
        _own.update(_modules())
        _put(before)
        if setting is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = setting


def _converted(values: np.ndarray, source: Any, target: Any, rounding: object) -> np.ndarray:
    """Return floats of Triton's dtype ``source`` as ``target``; bits in, bits out, as unsigned integers."""
    bits = np.ascontiguousarray(values).view(f"i{source.primitive_bitwidth // 8}")
    wide = torch.from_numpy(bits).view(_DTYPES[source.name])
    return wide.to(_DTYPES[target.name]).view(_BITS[target.primitive_bitwidth]).numpy().view(
        f"u{target.primitive_bitwidth // 8}"
    )  # fmt: skip


def _patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what puts the interpreter's operations into Triton's language for the first function of each module, and
    leaves them there: these modules are the interpreter's alone. ``patch`` does so for each launch, and for each call
    of one function by another, and looks through all of the language each time."""
    seen: dict[int, Any] = {}

    def patched(function: Any) -> SimpleNamespace:
        own = function.__globals__
        if id(own) not in seen:
            seen[id(own)] = own
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    return patched


def _modules() -> dict[str, ModuleType]:
    """Return the modules of Triton and of our programs; those compiled to machine code serve both."""
    return {
        name: module
        for name, module in sys.modules.items()
        if (name + ".").startswith(("triton.", PROGRAMS + ".")) and not name.startswith("triton._C")
    }


def _put(modules: dict[str, ModuleType]) -> None:
    for name in _modules():
        del sys.modules[name]
    sys.modules.update(modules)
