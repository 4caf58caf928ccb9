"""Measures the peak memory of a partial prefill, in a process of its own, beside a full prefill's and beside its bound.

The peak of one call is its merged cache, whose size is known, and the largest sum that torch's allocator has given out
at a time, which is the same in every run. Beside it stands the growth of the process's own memory. That includes the
memory that libraries keep (weights packed for a matrix product, freed memory that is not given back), but not pages
mapped from the sidecar's arena, which are the sidecar's.

    python -m kvstore_ops.bench.memory ttft-blend quick unix:///... 60    # as the benchmarks start it
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.planning import Recompute

TIMEOUT_S = 400.0
LOOK_AHEAD_BYTES = 48 << 20
"""Bytes for the sum of the suffix's attention: two runs of fp32 scores, and a block of keys and values in fp32."""


@dataclass(frozen=True)
class Held:
    """Memory at the peak of one call: ``merged_bytes`` of cache, and ``allocated_bytes`` of torch's allocator.
    ``allowed_bytes`` is the bound of their sum. ``resident_bytes``: the growth of the process's own memory."""

    merged_bytes: int
    allocated_bytes: int
    allowed_bytes: int
    resident_bytes: int

    @property
    def is_within(self) -> bool:
        return self.merged_bytes + self.allocated_bytes <= self.allowed_bytes

    def __str__(self) -> str:
        held = (self.merged_bytes + self.allocated_bytes) / 1e6
        found = f"{held:.0f} MB, {self.merged_bytes / 1e6:.0f} of it the merged cache"
        return f"{found}; allowed {self.allowed_bytes / 1e6:.0f}; the process grew by {self.resident_bytes / 1e6:.0f}"


def merged_bytes(spec: Any, token_count: int) -> int:
    """Return the bytes of the cache of ``token_count`` tokens."""
    per_token = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in spec.layers)
    return int(per_token * spec.item_size * token_count)


def allowed(model: Any, spec: Any, token_count: int, context: int, setting: Recompute) -> int:
    """Return the allowed bytes: the merged cache, and the larger need of a layer that lands or one that is computed.

    Landing: the residual stream of all rows of the first layer that computes them, and E, or K and V of one layer.
    Computing: the residual stream and the queries of all rows of one layer, and of the rows that leave the check layer;
    inside a layer, for each row of a step, 3 rows of the MLP and 5 of the residual stream's width; and a block's mask.
    In both: the rotation of each token's keys.
    """
    from kvstore_client.recompute.rows import step_rows
    from kvstore_kernels.attention import BLOCK_ROWS

    hidden, queries = spec.hidden_size, model.config.num_attention_heads * spec.layers[0].k_dim
    computes = setting.ratio > 0 or setting.last_layer >= setting.first_layer
    rows = token_count - context + (context if computes else 0)
    leaving = context * setting.ratio if setting.chooses else 0
    step = min(step_rows(model.device), token_count) * (3 * model.config.intermediate_size + 5 * hidden)
    landed = hidden * context if setting.needs_hidden else merged_bytes(spec, context) // spec.layer_count
    most = max(rows * hidden + landed, (rows + leaving) * (hidden + queries) + step)
    mask = BLOCK_ROWS * token_count * (1 + spec.item_size)
    turns = context * spec.rope.rotary_dim * 2 * 4
    look_ahead = LOOK_AHEAD_BYTES if setting.looks_ahead else 0
    inside: int = int(most) * spec.item_size + mask + turns + look_ahead
    return merged_bytes(spec, token_count) + inside


def allocated_bytes_max(action: Callable[[], object]) -> int:
    """Return the peak of the bytes that torch's CPU allocator lent to ``action`` on this thread."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        action()
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        held += int(each.nbytes())
        most = max(most, held)
    assert events, "torch's allocator reports to its profiler"
    return most


def resident_bytes_max(action: Callable[[], object], before: int) -> int:
    """Return the peak of the process's own bytes during ``action``, less ``before``. Call ``action`` once before this,
    so that its mappings of the sidecar's memory exist."""
    settle()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    action()
    status = _status()
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"] - before


def settle() -> int:
    """Give free memory back to the system, and return the bytes of the process's own memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status()["RssAnon"]


def _status() -> dict[str, int]:
    """Return the sizes in /proc/self/status, in bytes, by name."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {
        name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }


def held_apart(name: str, scale: str, address: str) -> tuple[dict[str, Held], int]:
    """Measure each setting of a benchmark, and a full prefill, in a process of their own that reuses the stored caches.
    Return (memory by setting, the full prefill's bytes). Tiny runs in this process: its test needs no figures."""
    if scale == "tiny":
        return _as_held(_measure(name, scale, address))
    command = [sys.executable, "-m", __name__, name, scale, address]
    environment = {**os.environ, "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
    return _as_held(json.loads(done.stdout.splitlines()[-1]))


def _as_held(found: dict[str, Any]) -> tuple[dict[str, Held], int]:
    return {each: Held(**values) for each, values in found["settings"].items()}, int(found["full"])


def _measure(name: str, scale: str, address: str) -> dict[str, Any]:
    import torch
    from kvstore_client import connect

    from kvstore_ops.bench.model_1b import build

    benchmark = importlib.import_module(f"kvstore_ops.bench.{name.replace('-', '_')}")
    model = build(scale)
    with connect(address, timeout_s=60.0) as client:
        asked = benchmark.asked(scale, model, client)
        before, settings = settle(), {}
        for each, setting in asked.settings.items():
            bound = allowed(model, asked.spec, asked.prompt.shape[1], asked.context, setting)
            asked.ask(setting)
            resident = resident_bytes_max(partial(asked.ask, setting), before)
            counted = allocated_bytes_max(partial(asked.ask, setting))
            merged = merged_bytes(asked.spec, asked.prompt.shape[1])
            settings[each] = asdict(Held(merged, counted, bound, resident))

        def whole() -> object:
            with torch.inference_mode():
                return model(asked.prompt, logits_to_keep=1)

        return {"settings": settings, "full": resident_bytes_max(whole, before)}


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:4])))
