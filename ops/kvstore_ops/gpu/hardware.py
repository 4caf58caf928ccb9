"""Looks for what the GPU's tests and benchmarks use on this machine, and names what it lacks."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvstore_ops.bench.origin import machine

QUERY = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max", "compute_mode")
QUERY_S_MAX = 20.0
GDS = Path("/proc/driver/nvidia-fs/stats")
UNTESTED = {
    "GPU": "copies between host and GPU, streams, recompute on a GPU, all figures of a GPU",
    "torch with CUDA": "the same: another torch finds no GPU",
    "Triton": "the Triton kernels, which the torch kernels stand in for",
    "transformers": "CachedModel, TransformersRunner and the times to a first token on a GPU",
    "kvikio": "bytes from NVMe to a GPU by kvikio, with GPUDirect Storage or without",
    "GPUDirect Storage": "NVMe to a GPU without the host's memory",
}
"""By what is missing: what that leaves untested."""


def hardware() -> dict[str, Any]:
    """Return what there is, by name: "" or an empty list where there is nothing. Never raises."""
    cuda, count = _torch_cuda()
    return {
        "gpus": _gpus(),
        "cuda": cuda,
        "cuda_devices": count,
        "torch": _version("torch"),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "kvikio": next(filter(None, map(_version, ("kvikio-cu13", "kvikio-cu12", "kvikio"))), ""),
        "gds": GDS.exists(),
        "machine": machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiled_copies": _has_compiled_copies(),
    }


def missing(found: dict[str, Any]) -> dict[str, str]:
    """Return what is missing, and what that leaves untested."""
    lacks = {
        "GPU": not found["cuda_devices"],
        "torch with CUDA": not found["cuda"],
        "Triton": not found["triton"],
        "transformers": not found["transformers"],
        "kvikio": not found["kvikio"],
        "GPUDirect Storage": not found["gds"],
    }
    return {name: UNTESTED[name] for name, is_missing in lacks.items() if is_missing}


def _gpus() -> list[dict[str, str]]:
    """Return what nvidia-smi says of each GPU; the older programs know fewer names, and then it is asked for less."""
    program = shutil.which("nvidia-smi")
    for names in (QUERY, QUERY[:3]):
        if program is None:
            return []
        command = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S_MAX, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode == 0:
            rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
            return [dict(zip(names, row, strict=False)) for row in rows]
    return []


def _torch_cuda() -> tuple[str, int]:
    """Return the CUDA release of torch, and the number of devices that it finds."""
    if find_spec("torch") is None:
        return "", 0
    try:
        import torch

        return str(torch.version.cuda or ""), int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except Exception:  # noqa: BLE001 - a torch whose libraries do not fit this machine is none
        return "", 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _has_compiled_copies() -> bool:
    from kvstore_copies import is_compiled

    return bool(is_compiled()) and os.environ.get("KVSTORE_COPIES") != "plain"
