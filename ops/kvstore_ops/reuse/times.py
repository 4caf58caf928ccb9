"""Times: the first token of one prompt, by a full prefill in one pass and by each row through the sidecar, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvstore_ops.bench.result import note
from kvstore_ops.pretrained.questions import Question
from kvstore_ops.reuse.settings import Asked
from kvstore_ops.reuse.subject import Caches, Subject

STORED_S_MAX = 60.0


def timed(
    subject: Subject, caches: Caches, client: Any, question: Question, rows: list[Asked], turns: int
) -> dict[Asked, list[float]]:
    """Return, for each row and turn, the full prefill's time over the row's. A turn begins with a full prefill, and its
    rows are compared with the mean of that and the next turn's, so that load that comes and goes weighs on both. Each
    turn begins with another row."""
    _store(subject, caches, client, question, rows)
    ids = torch.tensor([question.tokens])

    def full() -> None:
        with torch.inference_mode():
            subject.runner.model(ids, logits_to_keep=1)

    ours = {row: _first_token(subject, client, question, row) for row in rows}
    for action in (full, *ours.values()):
        action()  # what is only slow once, as memory that is touched for the first time, is no part of a turn
    ratios: dict[Asked, list[float]] = {row: [] for row in rows}
    before_s = _took(full)
    for turn in range(turns):
        start = turn % len(rows)
        seconds = {row: _took(ours[row]) for row in (*rows[start:], *rows[:start])}
        after_s = _took(full)
        for row, its_s in seconds.items():
            ratios[row].append((before_s + after_s) / 2 / its_s)
        before_s = after_s
        note(f"reuse: turn {turn + 1} of {turns}, a full prefill took {after_s:.1f} s")
    return ratios


def _first_token(subject: Subject, client: Any, question: Question, row: Asked) -> Callable[[], None]:
    preamble = question.preamble if row.origin == "preamble" else ()
    reused = {"segments": question.segments, "preamble": preamble}
    if subject.sender is not None:
        reused = {"senders": (subject.sender.spec,)}

    def ours() -> None:
        done = client.partial_prefill(subject.runner, question.tokens, recompute=row.setting, **reused)
        assert done.plan.reused_token_count, done.plan

    return ours


def _store(subject: Subject, caches: Caches, client: Any, question: Question, rows: list[Asked]) -> None:
    """Store what the rows reuse."""
    if subject.sender is not None:
        layers = {row.setting.first_layer for row in rows if row.setting.needs_hidden}
        made = caches.theirs(question)
        hidden = {layer: made.hidden[layer] for layer in layers}
        spec, context = subject.sender.spec, question.tokens[: -len(question.suffix)]
        client.store(spec, context, made.kv, hidden=hidden).wait(STORED_S_MAX)
        return
    for origin in {row.origin for row in rows}:
        preamble = question.preamble if origin == "preamble" else ()
        for document in question.documents:
            kv = caches.document(question, document, preamble)
            client.store_segment(subject.runner.spec, document, kv, preamble=preamble).wait(STORED_S_MAX)


def _took(action: Callable[[], None]) -> float:
    before = time.perf_counter()
    action()
    return time.perf_counter() - before
