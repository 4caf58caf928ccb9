"""Times: the first token of one prompt, by a full prefill in one pass and by each row through the sidecar, in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore_ops.bench.result import note
from kvstore_ops.pretrained.questions import Question
from kvstore_ops.profiling.run_file import RunFile
from kvstore_ops.reuse.settings import Asked
from kvstore_ops.reuse.subject import Caches, Subject

FORMAT = "kvstore reuse times"
STORED_S_MAX = 60.0


class Turns:
    """The turns of some rows. Each begins and ends with a full prefill, and its rows are compared with the mean of the
    two, so that load that comes and goes weighs on both. Each turn begins with another row. ``file``: the turns of it
    count, and those that are taken are kept there."""

    def __init__(self, rows: list[Asked], file: RunFile | None = None) -> None:
        self._rows, self._file = rows, file
        self._turns = [_parsed(file, number, len(rows)) for number in range(len(file.found))] if file else []

    def __len__(self) -> int:
        return len(self._turns)

    def ratios(self) -> dict[Asked, list[float]]:
        """Return, for each row and turn, the full prefill's time over the row's."""
        return {
            row: [(turn[0] + turn[1]) / 2 / turn[2 + index] for turn in self._turns]
            for index, row in enumerate(self._rows)
        }

    def take(self, subject: Subject, caches: Caches, client: Any, question: Question, count: int) -> None:
        """Take ``count`` more turns of a prompt."""
        _store(subject, caches, client, question, self._rows)
        ids = torch.tensor([question.tokens])

        def full() -> None:
            with torch.inference_mode():
                subject.runner.model(ids, logits_to_keep=1)

        ours = [_first_token(subject, client, question, row) for row in self._rows]
        for action in (full, *ours):
            action()  # what is slow only once, as memory that is touched for the first time, is no part of a turn
        before_s = _took(full)
        for number in range(len(self), len(self) + count):
            order = sorted(range(len(ours)), key=lambda index: (index - number) % len(ours))
            seconds = {index: _took(ours[index]) for index in order}
            after_s = _took(full)
            self._turns.append([before_s, after_s, *(seconds[index] for index in range(len(ours)))])
            if self._file:
                self._file.add({"seconds": self._turns[-1]})
            note(f"reuse: turn {number + 1}, a full prefill took {after_s:.1f} s")
            before_s = after_s


def run_file(answers: Path, subject: Subject, rows: list[Asked]) -> RunFile:
    """Return the file of a full run's turns, beside the file of its answers. Other rows have another file: turns are
    compared with each other, so that all rows take part in each."""
    header = {
        "format": FORMAT, "model": subject.runner.spec.weights_digest, "prompts": subject.digest,
        "rows": [row.name for row in rows], **subject.sent_by,
    }  # fmt: skip
    name = blake3(json.dumps(header).encode()).hexdigest(4)
    return RunFile(answers.with_name(f"{answers.name}.times-{name}"), header, int(time.time()))


def _parsed(file: RunFile, number: int, row_count: int) -> list[float]:
    found = file.found[number].get("seconds")
    if not isinstance(found, list) or len(found) != 2 + row_count or not all(isinstance(each, float) for each in found):
        raise InvalidRequest(f"{file.path}, line {number + 2}: not a turn; remove that file")
    return found


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
