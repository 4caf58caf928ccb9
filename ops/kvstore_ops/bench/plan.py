"""plan: the loading controller on a real service and a real model; the service's device is throttled to six rates.

At each rate these run in interleaved pairs: a plain prefill without a sidecar, twice; a load of everything stored;
CacheBlend's controller, which loads everything and computes a share of it again; our planner. At each request the
prompt's chunks are on the device alone. CacheBlend's prompt is another prompt of the same size, stored as a document,
because our prompt would be reused as an exact prefix.

The model is the pretrained one where it is installed (``make model``), else one of random weights; tiny runs have the
latter. The cost of a plan stands beside (``plan_cost``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb
from typing import Any

from kvstore.planning import Recompute
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.model_1b import prompts
from kvstore_ops.bench.plan_cost import COST_S_MAX, RUNS, plan_cost_s
from kvstore_ops.bench.result import Goal, Result, judged_by, note, quartiles, show
from kvstore_ops.fleet.papers import cacheblend_ratio
from kvstore_ops.pretrained import MODEL_ID, Absent, pretrained

RATES = {
    "full": (10e6, 30e6, 100e6, 300e6, 1e9, 0.0),
    "quick": (10e6, 30e6, 100e6, 300e6, 1e9, 0.0),
    "tiny": (10e6, 0.0),
}
"""Rates of the device in bytes per second; 0: not throttled."""
PAIRS = {"full": 30, "quick": 3, "tiny": 1}
LEARNING = {"full": 4, "quick": 2, "tiny": 1}
"""Number of requests before the pairs, from which rates are learned."""
CONTEXT = {"full": 1024, "quick": 384, "tiny": 64}
LAYERS = {"full": 8, "quick": 8, "tiny": 2}
SUFFIX = 32
CHUNK_TOKENS = {"full": 64, "quick": 64, "tiny": 16}
BEST_MAX, PREFILL_MAX, ERROR_MAX = 1.05, 1.03, 0.15
CONFIDENCE = 0.95
WAYS = ("plain", "again", "load", "papers", "ours")
DOWN_S, STORE_S = 20.0, 60.0


@dataclass
class Rows:
    """Seconds of each way at one rate, pair by pair. ``chosen``: the ways that our planner chose. ``foretold``: the
    seconds that it predicted: the time until the plan was made, which is known then, and the plan's prediction."""

    rate: float
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    foretold: list[float] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def ratios(self, way: str, over: str) -> list[float]:
        """Return the seconds of one way over those of another, pair by pair."""
        return [mine / theirs for mine, theirs in zip(self.seconds[way], self.seconds[over], strict=True)]

    @property
    def best(self) -> str:
        """The fastest way other than our planner, by the median."""
        return min(("plain", "load", "papers"), key=lambda way: statistics.median(self.seconds[way]))

    @property
    def errors(self) -> list[float]:
        """The relative errors of the predictions: |foretold - measured| / measured."""
        return [abs(told - took) / took for told, took in zip(self.foretold, self.seconds["ours"], strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values for JSON. ``over_prefill_high``: the one-sided bound of the paired median."""
        medians = {f"{way}_s": round(statistics.median(self.seconds[way]), 5) for way in WAYS}
        return {
            "bytes_per_s": self.rate, **medians, "best": self.best, "chosen": sorted(set(self.chosen)),
            "over_best": statistics.median(self.ratios("ours", self.best)),
            "over_prefill": statistics.median(self.ratios("ours", "plain")),
            "over_prefill_high": median_high(self.ratios("ours", "plain")),
            "prefill_over_itself_high": median_high(self.ratios("again", "plain")),
            "error": statistics.median(self.errors),
        }  # fmt: skip


def median_high(values: Sequence[float]) -> float:
    """Return the upper end of a one-sided interval that has the median with ``CONFIDENCE``. It is found by ranks, which
    assume no distribution of the times. With too few values for that (below 5) it is the largest."""
    ordered, count, missed = sorted(values), len(values), 0.0
    for rank in range(count):  # the chance that the median lies above the rank-th value from above
        missed += comb(count, rank) / 2**count
        if missed > 1 - CONFIDENCE:
            return ordered[-max(rank, 1)]
    return ordered[-1]


def model_of(scale: str) -> tuple[Any, str]:
    """Return (model, why it is not the pretrained one; empty when it is)."""
    place = pretrained()
    if scale == "tiny" or isinstance(place, Absent):
        return build(scale), "tiny" if scale == "tiny" else str(place)
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16, local_files_only=True).eval(), ""


def build(scale: str) -> Any:
    """Build a Llama of random weights with a KV head for every query head. Its cache is large beside its compute, so
    that loading is slower than computing at some of the rates and faster at others."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    tiny = scale == "tiny"
    config = LlamaConfig(
        vocab_size=512 if tiny else 32_000, hidden_size=128 if tiny else 512, intermediate_size=256 if tiny else 2048,
        num_hidden_layers=LAYERS[scale], num_attention_heads=2 if tiny else 8, num_key_value_heads=2 if tiny else 8,
        head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        dtype=torch.bfloat16,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


class Bench:
    """One sidecar, one client, two prompts of one size: ``exact`` is stored as a prefix, ``document`` as a segment."""

    def __init__(self, scale: str, sidecar: Any, client: Any) -> None:
        from kvstore_client.engines.transformers_runner import TransformersRunner
        from kvstore_client.recompute import recompute

        from kvstore.spec import ModelSpec

        self._scale, self._sidecar, self._client = scale, sidecar, client
        self.model, self.why = model_of(scale)
        chunk = CHUNK_TOKENS[scale]
        spec = ModelSpec.from_transformers(self.model.config, "unverified:plan", chunk)
        self.runner = TransformersRunner(self.model, spec=spec)
        self.context = CONTEXT[scale]
        self._prompts = prompts(self.model, 2, self.context + SUFFIX)
        self.exact, self.document = (each[0].numpy() for each in self._prompts)
        setting = Recompute.full(spec.layer_count)
        made = recompute(self.runner, self.exact[: self.context], [], setting)
        client.store(spec, self.exact[: self.context], made.kv).wait(STORE_S)
        alone = recompute(self.runner, self.document[: self.context], [], setting)
        client.store_segment(spec, self.document[: self.context], alone.kv).wait(STORE_S)
        self.byte_count = sum(each.nbytes for pair in made.kv for each in pair)

    def down(self) -> None:
        """Move all chunks from memory to the device. This repeats until the last fetch has released its chunks."""
        from kvstore.v1alpha import admin_pb2
        from kvstore_ops.operators.calls import Operator

        asked = Operator(self._client)
        in_memory = admin_pb2.Selection(model=self.runner.spec.model_id, tier="memory")
        wanted = admin_pb2.ChangeRequest(selection=in_memory, move=admin_pb2.Move(tier="nvme"))
        until = time.monotonic() + DOWN_S
        while any(total.chunk_count for total in asked.totals(in_memory)):
            assert time.monotonic() < until, "a chunk stays in memory"
            for _ in asked.change(wanted):
                pass

    def plain(self) -> float:
        """Return the seconds of a prefill by the same engine without a sidecar."""
        from kvstore_client.recompute import recompute

        setting = Recompute.full(self.runner.spec.layer_count)
        return shared.timed(lambda: recompute(self.runner, self.exact, [], setting))

    def load(self) -> float:
        """Return the seconds of a prefill that loads everything stored."""
        self.down()
        self._client.planner.mode = "off"
        return shared.timed(lambda: self._client.partial_prefill(self.runner, self.exact))

    def papers(self, layer_prefill_s: float, layer_load_s: float) -> float:
        """Return the seconds of a prefill by CacheBlend's controller, which is given the two times of a layer."""
        ratio = cacheblend_ratio(layer_prefill_s, layer_load_s)
        self.down()
        self._client.planner.mode = "off"
        document = [range(self.context)]
        setting = Recompute.cacheblend(1, ratio)
        return shared.timed(
            lambda: self._client.partial_prefill(self.runner, self.document, segments=document, recompute=setting)
        )

    def ours(self) -> tuple[float, Any]:
        """Return (seconds by our planner, its partial prefill)."""
        self.down()
        self._client.planner.mode = "on"
        found: list[Any] = []
        seconds = shared.timed(lambda: found.append(self._client.partial_prefill(self.runner, self.exact)))
        return seconds, found[0]

    def measure(self, rate: float) -> Rows:
        """Measure all ways at one rate, in bytes per second."""
        self._sidecar.set_rate(rate)
        rows, layers = Rows(rate), self.runner.spec.layer_count
        loads: list[float] = []
        for _ in range(LEARNING[self._scale]):
            self.plain()
            loads.append(self.load())
            self.ours()
        for number in range(PAIRS[self._scale]):
            plain_s = statistics.median(rows.seconds["plain"] or [self.plain()])
            load_s = self.byte_count / rate if rate else min(loads)
            timed: dict[str, Callable[[], float]] = {
                "plain": self.plain, "again": self.plain, "load": self.load,
                "papers": partial(self.papers, plain_s / layers, load_s / layers), "ours": partial(self._told, rows),
            }  # fmt: skip
            turn = number % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                rows.seconds[way].append(timed[way]())
        return rows

    def _told(self, rows: Rows) -> float:
        seconds, found = self.ours()
        loading = found.plan.loading
        if loading is None:  # the load was given up: the prediction counts as 0 seconds
            rows.foretold.append(0.0)
            rows.chosen.append("given-up")
        else:
            rows.foretold.append(found.timeline.prepare_s + loading.chosen.ttft_s)
            rows.chosen.append(str(loading.chosen.way))
        return seconds


def run(scale: str) -> Result:
    """Measure all rates. The figure is that of the rate at which our planner is worst beside the best other way."""
    from kvstore_client import connect

    from kvstore_ops.bench.throttled import ThrottledSidecar

    capacity = "32 MiB" if scale == "tiny" else "256 MiB"
    found: list[Rows] = []
    with ThrottledSidecar("--capacity", capacity, nvme="1 GiB") as sidecar:
        sidecar.wait_prefaulted()
        with connect(sidecar.address, timeout_s=DOWN_S) as client:
            bench = Bench(scale, sidecar, client)
            for rate in RATES[scale]:
                found.append(bench.measure(rate))
                note(f"plan: {called(rate)} done")
    return judged(scale, bench, found)


def called(rate: float) -> str:
    """Return a rate in words."""
    return f"{rate / 1e6:.0f} MB/s" if rate else "full rate"


def judged(scale: str, bench: Bench, found: Sequence[Rows]) -> Result:
    """Print the table, and return the result: whether every target is met."""
    rows = [each.as_dict() for each in found]
    worst = max(rows, key=lambda row: row["over_best"])
    highest = max(row["over_prefill_high"] for row in rows)
    error = statistics.median(error for each in found for error in each.errors)
    lines = [
        (
            called(row["bytes_per_s"]),
            ", ".join(f"{way} {row[f'{way}_s'] * 1e3:.0f}" for way in ("plain", "load", "papers", "ours")) + " ms; "
            f"ours ({' '.join(row['chosen'])}) over {row['best']} {row['over_best']:.3f}, over plain at most "
            f"{row['over_prefill_high']:.3f} (plain over itself {row['prefill_over_itself_high']:.3f})",
        )
        for row in rows
    ]
    lines.append(("foretold", f"off by {error:.1%} of what it took (median)"))
    cost_s, model = plan_cost_s(), f"random weights ({bench.why})" if bench.why else MODEL_ID
    lines += [("model", model), ("a plan", f"{cost_s * 1e3:.2f} ms of {RUNS} runs that differ")]
    show(f"plan: {bench.context} + {SUFFIX} tokens, {bench.byte_count / 1e6:.0f} MB, {PAIRS[scale]} pairs", lines)
    ratios = next(each for each in found if each.rate == worst["bytes_per_s"])
    return Result(
        name="plan", value=worst["ours_s"], unit="s", limit=worst[f"{worst['best']}_s"], ratio=worst["over_best"],
        **judged_by(
            Goal("over the best", worst["over_best"], BEST_MAX, is_upper=True),
            Goal("over a prefill", highest, PREFILL_MAX, is_upper=True),
            Goal("error of the forecast", error, ERROR_MAX, is_upper=True),
            Goal("ms of a plan", cost_s * 1e3, COST_S_MAX * 1e3, is_upper=True),
        ),
        runs=PAIRS[scale], spread=quartiles(ratios.ratios("ours", ratios.best)),
        conditions={
            "scale": scale, "model": model, "plan_s": cost_s,
            "layers": bench.runner.spec.layer_count, "context": bench.context, "suffix": SUFFIX,
            "bytes": bench.byte_count, "dtype": "bfloat16", "device": "cpu", "confidence": CONFIDENCE,
            "over_prefill_high": highest, "error": error, "rates": rows,
        },
    )  # fmt: skip
