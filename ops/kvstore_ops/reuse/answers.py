"""Answers: every prompt's answer over every row's cache, compared with the answer after a full prefill."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from kvstore_client.recompute import recompute

from kvstore.errors import InvalidRequest
from kvstore_ops.bench.result import note
from kvstore_ops.pretrained.questions import Question
from kvstore_ops.profiling.answers import Agreement, agreement, greedy, said_after
from kvstore_ops.profiling.run_file import RunFile
from kvstore_ops.reuse.settings import Asked
from kvstore_ops.reuse.subject import Caches, Subject

FORMAT = "kvstore reuse answers"
VERSION = 1


@dataclass(frozen=True)
class Mean:
    """A mean over prompts. ``error``: its standard error, from how far contexts differ: a context's prompts share its
    documents, so that they tell less than as many prompts of different contexts."""

    value: float
    error: float

    def bound(self, errors: int) -> float:
        """Return the mean and so many standard errors more, or less where that is negative."""
        return self.value + errors * self.error if errors else self.value  # an endless error times 0 is no number

    @classmethod
    def of(cls, by_context: list[list[float]], default: float) -> Mean:
        """Return the mean of all contexts' values; ``default``, without an error, when there are none."""
        found = [each for each in by_context if each]
        count = sum(map(len, found))
        if not count:
            return cls(default, 0.0)
        value = sum(map(sum, found)) / count
        if len(found) == 1:
            return cls(value, math.inf)
        residues = [sum(each) - len(each) * value for each in found]
        spread = math.fsum(residue**2 for residue in residues) * len(found) / (len(found) - 1)
        return cls(value, math.sqrt(spread) / count)


@dataclass(frozen=True)
class Figures:
    """A row's figures on some contexts: of the ``answers`` that are right after a full prefill the share ``kept``, and
    ``tokens`` and ``kl`` of all prompts."""

    answers: int
    kept: Mean
    tokens: Mean
    kl: Mean

    def as_dict(self) -> dict[str, float]:
        found: dict[str, float] = {"answers": self.answers}
        for name in ("kept", "tokens", "kl"):
            mean: Mean = getattr(self, name)
            found |= {name: mean.value, f"{name}_error": mean.error}
        return found


@dataclass
class Answers:
    """What was found. ``right``: {prompt: the answer after a full prefill is right}. ``kept``: per row {prompt: its
    agreement}."""

    right: dict[int, bool] = field(default_factory=dict)
    kept: dict[Asked, dict[int, Agreement]] = field(default_factory=dict)

    @classmethod
    def of(cls, rounds: list[list[Asked]]) -> Answers:
        return cls({}, {row: {} for rows in rounds for row in rows})

    def judged(self, row: Asked, halves: Collection[int], asked_count: int) -> Figures:
        """Return a row's figures on some halves of the contexts, 0 and 1. ``asked_count``: prompts of each context."""
        by_context: dict[int, dict[int, Agreement]] = {}
        for index, each in self.kept[row].items():
            if index // asked_count % 2 in halves:
                by_context.setdefault(index // asked_count, {})[index] = each
        contexts = list(by_context.values())
        kept = [[float(each.is_kept) for index, each in found.items() if self.right[index]] for found in contexts]
        return Figures(
            answers=sum(map(len, kept)),
            kept=Mean.of(kept, 0.0),
            tokens=Mean.of([[each.tokens for each in found.values()] for found in contexts], 0.0),
            kl=Mean.of([[each.kl for each in found.values()] for found in contexts], math.inf),
        )

    def whole_rows(self) -> list[Asked]:
        """Return the rows that answered all prompts that were asked: a later round's may have only some so far."""
        return [row for row, kept in self.kept.items() if kept and len(kept) == len(self.right)]

    def share(self, row: Asked) -> float:
        return float(statistics.mean(each.share for each in self.kept[row].values()))


def answered(subject: Subject, rounds: list[list[Asked]], caches: Caches, file: RunFile | None = None) -> Answers:
    """Ask every prompt with every row, round by round. ``file``: what it has is not asked again, and what is found is
    kept there."""
    found = Answers.of(rounds)
    known = take(file, rounds, found) if file else set()
    every = [(number, index) for number in range(len(rounds)) for index in range(len(subject.prompts))]
    left = [each for each in every if each not in known]
    began_s = time.monotonic()
    for count, (number, index) in enumerate(left, start=1):
        is_right, agreements = ask(subject, caches, subject.prompts[index], rounds[number])
        _take(found, index, is_right, rounds[number], agreements)
        if file:
            rows = [asdict(each) for each in agreements]
            file.add({"round": number, "prompt": index, "is_right": is_right, "rows": rows})
        if file or count % 10 == 0:
            rest_s = (time.monotonic() - began_s) / count * (len(left) - count)
            note(
                f"reuse: {len(every) - len(left) + count} of {len(every)} answers, {sum(found.right.values())} of "
                f"{len(found.right)} right in full, about {rest_s / 60:.0f} min left"
            )
    return found


def ask(subject: Subject, caches: Caches, question: Question, rows: list[Asked]) -> tuple[bool, list[Agreement]]:
    """Return the judgement of full prefill's answer to one prompt, and each row's agreement with it."""
    runner, asked = subject.runner, question.answer
    tokens = torch.tensor(question.tokens)
    count = len(asked) + 2 * bool(subject.last)
    answer, known = greedy(runner, tokens, count, subject.last, caches.whole(question))
    agreements = []
    looked: dict[tuple[str, str], torch.Tensor | None] = {}
    for row in rows:
        runs, alike = list(caches.runs(question, row)), (row.origin, row.setting.selector)
        attention = looked.get(alike) if row.setting.looks_ahead else None
        first = recompute(runner, tokens, runs, row.setting, attention=attention)
        looked[alike] = first.attention
        lossy, share = said_after(runner, tokens, answer, first)
        agreements.append(agreement(known, lossy, answer, share))
    return tuple(answer.tolist()[: len(asked)]) == asked, agreements


def run_file(path: Path, subject: Subject, rounds: list[list[Asked]], *, fresh: bool = False) -> RunFile:
    """Return the run's file, for these prompts and rows of this model."""
    header = {
        "format": FORMAT, "version": VERSION, **subject.made_by,
        "rounds": [[row.name for row in rows] for rows in rounds],
    }  # fmt: skip
    return RunFile(path, header, int(time.time()), fresh=fresh)


def take(file: RunFile, rounds: list[list[Asked]], found: Answers) -> set[tuple[int, int]]:
    """Take what the file has. Returns its (round, prompt)."""
    known = set()
    for number, line in enumerate(file.found, start=2):
        try:
            rows = rounds[line["round"]]
            agreements = [Agreement(**each) for each in line["rows"]]
            _take(found, int(line["prompt"]), bool(line["is_right"]), rows, agreements)
            known.add((int(line["round"]), int(line["prompt"])))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InvalidRequest(f"{file.path}, line {number}: not an answer; begin anew with --fresh") from error
    return known


def _take(found: Answers, index: int, is_right: bool, rows: list[Asked], agreements: list[Agreement]) -> None:
    found.right[index] = is_right
    for row, each in zip(rows, agreements, strict=True):
        found.kept[row][index] = each
