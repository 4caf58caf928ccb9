"""vllm-documents: prompts over documents that were computed one by one, in a real vLLM on this machine's processors:
the time to the first token over a prefill in full, and the answers that are kept.

Two engines with the pretrained model take turns: one computes each prompt in full, the other over the stored caches of
its documents. Prompts are questions about documents of real text, behind a chat template's beginning, as in
``reuse``. Neither engine has a prefix of a prompt in its own cache when it is timed. The documents are computed before,
by requests of their own, in the same engine.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from pathlib import Path
from typing import Any

from kvstore_client import Client, connect
from kvstore_client.engines.vllm.documents import DERIVED

from kvstore.errors import Unavailable
from kvstore_ops.bench.result import Goal, Result, judged_by, note, quartiles, show
from kvstore_ops.bench.vllm_cold import wait_stored
from kvstore_ops.bench.vllm_engine import Answer, Asked, Engine
from kvstore_ops.pretrained import Absent, pretrained
from kvstore_ops.pretrained.questions import Question, questions
from kvstore_ops.sidecar import Sidecar

RECOMPUTE = {"selector": "suffix_attention", "ratio": 0.25}
"""The setting that ``reuse`` chose for documents computed alone; behind a preamble it computes more than is needed."""
CONTEXTS = {"full": 12, "quick": 3, "tiny": 1}
ASKED = {"full": 4, "quick": 2, "tiny": 1}
"""Prompts of each context: they differ in the question."""
SIZE = {"full": (8, 256), "quick": (8, 256), "tiny": (2, 64)}
"""(documents of a prompt, tokens of each)."""
SEED = 20261128
CAPACITY = "2 GiB"
THREADS = 2
SPEED, KEPT = 2.0, 0.9


def named(question: Question) -> dict[str, Any]:
    """Return what a request says of its documents."""
    return {"kvstore_documents": question.segments, "kvstore_preamble": len(question.preamble)}


def remember(engine: Engine, question: Question, client: Client) -> None:
    """Have an engine compute a prompt's documents, each behind the preamble, and return when they are stored. Raises
    Internal where one is not."""
    stored = client.stats().counters["store_committed_chunks"]
    before = len(question.preamble)
    for each in question.documents:
        told = {"kvstore_documents": [(before, before + len(each))], "kvstore_preamble": before}
        engine.ask([Asked([*question.preamble, *each], transfer=told)])
    wait_stored(client, stored + len(question.documents))


def asked(engine: Engine, salt: str, transfer: dict[str, Any], question: Question) -> Answer:
    """Return an engine's answer, and the seconds to its first token."""
    first = Asked(question.tokens, 1, salt, transfer, is_anew=True)
    rest = Asked(question.tokens, len(question.answer), salt, transfer)
    began, ended = engine.ask([first, rest])
    return Answer(began.seconds, ended.tokens)


def measured(model: Path, prompts: list[Question], asked_count: int) -> tuple[list[tuple[float, float]], list[Any]]:
    """Return per prompt the seconds to the first token, in full and over documents, and the two answers."""
    token_count_max = max(len(each.tokens) + len(each.answer) for each in prompts) + 8
    options: dict[str, Any] = {"load_format": "auto", "enable_prefix_caching": True, "async_scheduling": False}
    took, answers = [], []
    with (
        Sidecar("--capacity", CAPACITY) as sidecar,
        Engine(model, sidecar.address, token_count_max, THREADS, extra={"recompute": RECOMPUTE}, **options) as ours,
        Engine(model, None, token_count_max, THREADS, **options) as plain,
        connect(sidecar.address) as client,
    ):
        for engine in (ours, plain):
            engine.wait_ready()
        for number, question in enumerate(prompts):
            if number % asked_count == 0:
                remember(ours, question, client)
            sides = [(plain, "", {}), (ours, DERIVED, named(question))]
            found = [asked(*side, question) for side in (sides[::-1] if number % 2 else sides)]
            full, mended = found[::-1] if number % 2 else found
            took.append((full.seconds, mended.seconds))
            answers.append((full.tokens, mended.tokens))
            speed = full.seconds / mended.seconds
            note(f"vllm-documents: prompt {number + 1} of {len(prompts)}, {speed:.2f}x")
    return took, answers


def run(scale: str) -> Result:
    """Measure both. Raises Unavailable where vLLM or the pretrained model is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable(
            "vllm-documents needs vLLM, which this environment lacks: `make setup-vllm`, then "
            "`.venv-vllm/bin/kvstore bench vllm-documents`"
        )
    model = pretrained()
    if isinstance(model, Absent):
        raise Unavailable(f"vllm-documents: {model}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = list(questions(tokenizer, CONTEXTS[scale], [SIZE[scale]], SEED, ASKED[scale]))
    took, answers = measured(model, prompts, ASKED[scale])
    ratios = [full / mended for full, mended in took]
    right = [
        (full, mended) for (full, mended), each in zip(answers, prompts, strict=True) if tuple(full) == each.answer
    ]
    kept = sum(full == mended for full, mended in right) / max(1, len(right))
    full_s, mended_s = (statistics.median(side) for side in zip(*took, strict=True))
    tokens = statistics.median(len(each.tokens) for each in prompts)
    speed = statistics.median(ratios)
    show(
        f"vllm-documents: {len(prompts)} prompts of {tokens:.0f} tokens, {SIZE[scale][0]} documents",
        [
            ("first token, computed in full", f"{full_s * 1e3:.0f} ms"),
            ("first token, over documents", f"{mended_s * 1e3:.0f} ms, {speed:.2f}x"),
            ("right answers kept", f"{kept:.3f} of {len(right)}, of {len(prompts)} prompts"),
        ],
    )  # fmt: skip
    conditions: dict[str, Any] = {
        "scale": scale, "tokens": tokens, "prompts": len(prompts), "right": len(right), "kept": kept,
        "recompute": RECOMPUTE, "processors": os.cpu_count(),
    }  # fmt: skip
    return Result(
        name="vllm-documents", value=mended_s, unit="s", limit=full_s, ratio=speed, runs=len(ratios),
        spread=quartiles(ratios), conditions=conditions,
        **judged_by(Goal("times as fast", speed, SPEED), Goal("answers kept", kept, KEPT)),
    )  # fmt: skip
