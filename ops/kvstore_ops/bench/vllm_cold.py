"""vllm-cold: the time to the first token of prompts that hit nothing, in a real vLLM on this machine's processors, with
the connector over without it.

Two engines take turns. A turn is some prompts, one after another without a pause, so that the store of a prefill runs
into the next one: the last prompt of a turn is followed by nothing, which is why the figure is that of whole turns.
Beside it stand the first prompts of the turns, which no store disturbs, the later ones, and the fastest ones, which
other work of the machine disturbed least. The model is the 1B geometry, in quick runs 4 layers of it: a narrower one
would have as much to store for less to compute, and say what no model has.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from kvstore_client import Client, connect

from kvstore.errors import Internal, Unavailable
from kvstore_ops.bench.model_1b import config_of
from kvstore_ops.bench.result import Result, note, quartiles, show
from kvstore_ops.bench.vllm_engine import Engine
from kvstore_ops.sidecar import Sidecar

TARGET = 1.03
TOKENS = {"full": 2048, "quick": 512, "tiny": 256}
ROUNDS = {"full": 12, "quick": 6, "tiny": 1}
PROMPTS = {"full": 3, "quick": 3, "tiny": 2}
"""Prompts of a turn."""
CAPACITY = {"full": "4 GiB", "quick": "1 GiB", "tiny": "64 MiB"}
CHUNK_TOKENS = 256
THREADS = 2
STORED_S_MAX = 60.0
RESAMPLES = 2000


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by drawing the rounds again."""
    made = np.random.default_rng(1)
    drawn = np.median(made.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def wait_stored(client: Client, chunk_count: int) -> None:
    """Return when so many chunks are stored. Raises Internal when they are not in time: a connector that keeps nothing
    costs nothing, and would not be worth a figure."""
    until_s = time.monotonic() + STORED_S_MAX
    while (stored := client.stats().counters["store_committed_chunks"]) < chunk_count:
        if time.monotonic() > until_s:
            raise Internal(f"{stored} of {chunk_count} chunks were stored")
        time.sleep(0.02)


def measured(scale: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return, with the connector and without, the seconds to the first token of each prompt, by turn."""
    config = config_of(scale)
    config.architectures = ["LlamaForCausalLM"]
    count, prompt_count = TOKENS[scale], PROMPTS[scale]
    made = np.random.default_rng(2)

    def prompts() -> list[list[int]]:
        return [made.integers(5, config.vocab_size, count).tolist() for _ in range(prompt_count)]

    took: tuple[list[list[float]], list[list[float]]] = ([], [])
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-model-") as model,
        Sidecar("--capacity", CAPACITY[scale]) as sidecar,
    ):
        config.save_pretrained(model)
        token_count_max = count + 64
        with (
            Engine(Path(model), sidecar.address, token_count_max, THREADS) as ours,
            Engine(Path(model), None, token_count_max, THREADS) as plain,
            connect(sidecar.address, timeout_s=60.0) as client,
        ):
            engines = (ours, plain)
            for engine in engines:
                engine.wait_ready()
            sidecar.wait_prefaulted()
            for number in range(-1, ROUNDS[scale]):  # the first warms up
                for side in (0, 1) if number % 2 else (1, 0):
                    seconds = engines[side].first_token_s(prompts())
                    if number >= 0:
                        took[side].append(seconds)
                    chunks = (number + 2) * prompt_count * (count // CHUNK_TOKENS)
                    if side == 0:
                        wait_stored(client, chunks)
                if number >= 0:
                    note(f"vllm-cold: round {number + 1} of {ROUNDS[scale]}, {sum(took[0][-1]) / sum(took[1][-1]):.3f}")
    return took


def run(scale: str) -> Result:
    """Measure both. Raises Unavailable where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable(
            "vllm-cold needs vLLM, which this environment lacks: `make setup-vllm`, then `.venv-vllm/bin/kvstore bench "
            "vllm-cold`"
        )
    ours, plain = measured(scale)
    ratios = [sum(mine) / sum(theirs) for mine, theirs in zip(ours, plain, strict=True)]
    parts = {
        name: statistics.median(sum(mine[some]) / sum(theirs[some]) for mine, theirs in zip(ours, plain, strict=True))
        for name, some in (("first", slice(0, 1)), ("later", slice(1, None)))
    }
    ratio, (low, high) = statistics.median(ratios), interval(ratios)
    mine_s, theirs_s = (statistics.median(each for turn in side for each in turn) for side in (ours, plain))
    fastest = [min(each for turn in side for each in turn) for side in (ours, plain)]
    added_s = statistics.median((sum(mine) - sum(theirs)) / len(mine) for mine, theirs in zip(ours, plain, strict=True))
    show(
        f"vllm-cold: {TOKENS[scale]} tokens, {len(ratios)} turns of {PROMPTS[scale]} prompts",
        [
            ("first token, with the connector", f"{mine_s * 1e3:.1f} ms"),
            ("first token, without", f"{theirs_s * 1e3:.1f} ms"),
            ("paired, turn by turn", f"{ratio:.4f} [{low:.4f}, {high:.4f}], {added_s * 1e3:+.1f} ms a prompt"),
            ("  first prompts of the turns; later ones", f"{parts['first']:.4f}; {parts['later']:.4f}"),
            ("  fastest prompts", f"{fastest[0] / fastest[1]:.4f}, {(fastest[0] - fastest[1]) * 1e3:+.1f} ms"),
        ],
    )  # fmt: skip
    conditions: dict[str, Any] = {
        "scale": scale, "tokens": TOKENS[scale], "prompts": PROMPTS[scale], "processors": os.cpu_count(),
        "interval": [low, high], "first": parts["first"], "later": parts["later"], "added_s": added_s,
        "fastest": fastest[0] / fastest[1],
    }  # fmt: skip
    return Result(
        name="vllm-cold", value=mine_s, unit="s", limit=theirs_s, ratio=ratio, target=f"<= {TARGET}",
        met=ratio <= TARGET, runs=len(ratios), spread=quartiles(ratios), conditions=conditions,
    )  # fmt: skip
