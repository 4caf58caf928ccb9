"""Times: the first token of a prompt of each length, by a full prefill in one pass and by each row through the sidecar,
in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
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


@dataclass(frozen=True)
class Turn:
    """One turn of a prompt of ``tokens``. ``seconds``: of the full prefills before and behind, and of each row."""

    tokens: int
    seconds: list[float]

    def ratio(self, row_index: int) -> float:
        """Return the mean of both full prefills over the row's time: load that comes and goes weighs on both."""
        return (self.seconds[0] + self.seconds[1]) / 2 / self.seconds[2 + row_index]


class Turns:
    """The turns of some rows. Prompts take turns, and each round of them begins with another row. ``file``: the turns
    in it count, and those that are taken are kept there."""

    def __init__(self, rows: list[Asked], file: RunFile | None = None) -> None:
        self._rows, self._file = rows, file
        self._turns = [_parsed(file, number, len(rows)) for number in range(len(file.found))] if file else []

    def __len__(self) -> int:
        return len(self._turns)

    def ratios(self) -> dict[Asked, dict[int, list[float]]]:
        """Return, for each row, by how much it is faster than a full prefill: {tokens of the prompt: each turn}."""
        found: dict[Asked, dict[int, list[float]]] = {row: {} for row in self._rows}
        for turn in self._turns:
            for index, row in enumerate(self._rows):
                found[row].setdefault(turn.tokens, []).append(turn.ratio(index))
        return found

    def take(self, subject: Subject, caches: Caches, client: Any, questions: list[Question], count: int) -> None:
        """Take ``count`` more turns of these prompts."""
        stored: set[int] = set()
        for number in range(len(self), len(self) + count):
            index = number % len(questions)
            question = questions[index]
            full = partial(_in_full, subject, torch.tensor([question.tokens]))
            ours = [_first_token(subject, client, question, row) for row in self._rows]
            if index not in stored:
                stored.add(index)
                _store(subject, caches, client, question, self._rows)
                full()  # what is slow only once, as memory that is touched for the first time, is no part of a turn
                for action in ours:
                    action()
            first = number // len(questions)
            order = sorted(range(len(ours)), key=lambda row: (row - first) % len(ours))
            before_s = _took(full)
            seconds = {row: _took(ours[row]) for row in order}
            after_s = _took(full)
            turn = Turn(len(question.tokens), [before_s, after_s, *(seconds[row] for row in range(len(ours)))])
            self._turns.append(turn)
            if self._file:
                self._file.add(asdict(turn))
            note(f"reuse: turn {number + 1}, a full prefill of {turn.tokens} tokens took {after_s:.1f} s")


def run_file(answers: Path, subject: Subject, rows: list[Asked]) -> RunFile:
    """Return the file of a full run's turns, beside the file of its answers. Other rows have another file: turns are
    compared with each other, so that all rows take part in each."""
    header = {
        "format": FORMAT, **subject.made_by, "rows": [row.name for row in rows],
    }  # fmt: skip
    name = blake3(json.dumps(header).encode()).hexdigest(4)
    return RunFile(answers.with_name(f"{answers.name}.times-{name}"), header, int(time.time()))


def _parsed(file: RunFile, number: int, row_count: int) -> Turn:
    line = file.found[number]
    tokens, seconds = line.get("tokens"), line.get("seconds")
    if isinstance(tokens, int) and isinstance(seconds, list) and len(seconds) == 2 + row_count:
        if all(isinstance(each, float) for each in seconds):
            return Turn(tokens, seconds)
    raise InvalidRequest(f"{file.path}, line {number + 2}: not a turn; remove that file")


def _in_full(subject: Subject, ids: torch.Tensor) -> None:
    with torch.inference_mode():
        subject.runner.model(ids, logits_to_keep=1)


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
