"""A scene with a pretrained model: documents of real text, computed once behind the start of the chat template, and
questions about them with readable answers. Needs ``make model``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_client import Client
from rich.console import Console
from rich.table import Table

from kvstore.planning import Recompute
from kvstore_ops.demo.progress import progress
from kvstore_ops.pretrained import Absent, pretrained
from kvstore_ops.pretrained.questions import Question, questions

COUNT = 4
DOCUMENTS = (8, 128)
SETTING = Recompute(0, -1, 0.2, "suffix_attention")
NEW_TOKENS = 12
SEED = 7


@dataclass(frozen=True)
class Answered:
    """One question, answered twice: after a full prefill, and over reused caches of documents of which a share was
    computed again (mended)."""

    question: str
    right: str
    in_full: str
    full_s: float
    mended: str
    mended_s: float
    reused: int


def perform(client: Client, console: Console) -> list[Answered]:
    """Ask the pretrained model, or print why there is none. Returns the answers."""
    place = pretrained()
    if isinstance(place, Absent):
        console.print(f"\nreal documents and questions are left out, the trained models answer alone: {place}")
        return []
    with progress(console, f"documents: loading {place.name}") as tell:
        answered = [_asked(client, *each) for each in _cast(client, place, tell)]
    table = Table("question", "a document says", "full prefill", "", "documents reused, 20 % mended", "")
    for each in answered:
        table.add_row(
            each.question, each.right, each.in_full, f"{each.full_s * 1e3:.0f} ms", each.mended,
            f"{each.mended_s * 1e3:.0f} ms",
        )  # fmt: skip
    console.print(
        f"\nquestions about eight documents of real text, by {place.name}; {answered[0].reused:,} tokens reused"
    )
    console.print(table)
    return answered


def _cast(client: Client, place: Path, tell: Callable[[str], None]) -> Iterator[tuple[Any, Any, Question]]:
    """Yield (model, tokenizer, question) for each question, after computing and storing its documents behind their
    preamble. ``tell`` shows each step."""
    from kvstore_client.engines.transformers import CachedModel

    from kvstore_ops.profiling.own import local_model

    runner, tokenizer = local_model(place)
    cached = CachedModel(runner.model, client, spec=runner.spec)
    for number, question in enumerate(questions(tokenizer, COUNT, [DOCUMENTS], SEED), 1):
        tell(f"documents of question {number} of {COUNT}: computing and storing each alone")
        cached.remember(question.documents, preamble=question.preamble)
        tell(f"question {number} of {COUNT}: answering after a full prefill, and over the reused documents")
        yield runner, tokenizer, question


def _asked(client: Client, runner: Any, tokenizer: Any, question: Question) -> Answered:
    import torch
    from kvstore_client.engines.transformers import cache_of
    from kvstore_client.recompute import recompute

    tokens = torch.tensor(question.tokens)

    def said(done: Any) -> str:
        ids = torch.cat((tokens, done.logits[-1:].argmax(-1)))[None]
        out = runner.model.generate(
            ids, past_key_values=cache_of(done.kv), max_new_tokens=NEW_TOKENS, do_sample=False
        )  # fmt: skip
        return str(tokenizer.decode(out[0, len(tokens) :], skip_special_tokens=True)).partition("\n")[0].strip()

    started = time.perf_counter()
    full = recompute(runner, tokens, [], Recompute.full(runner.spec.layer_count))
    between = time.perf_counter()
    mended = client.partial_prefill(
        runner, tokens, segments=question.segments, preamble=question.preamble, recompute=SETTING
    )  # fmt: skip
    ended = time.perf_counter()
    words, right = question.words
    return Answered(
        words, right, said(full), between - started, said(mended), ended - between, mended.plan.reused_token_count
    )  # fmt: skip
