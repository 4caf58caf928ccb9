"""reuse: the share of a pretrained model's answers that lossy reuse keeps, and its speed-up, one row per setting.

Prompts are questions about documents of real text (``kvstore_ops.pretrained.questions``); each document was computed by
itself, or behind the prompt's own preamble. For every setting the table has f; the time to the first token through a
sidecar beside a full prefill in one pass; of the answers that are right after a full prefill, the share that is kept
whole; the share of kept tokens; and the KL divergence. The first half of the prompts chooses a setting: the fastest
that keeps as much as the target asks for. The figure is that setting's on the other half. The trained testbed model
answers when the pretrained model is missing, and at the scale tiny.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.planning import Recompute
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, note, quartiles
from kvstore_ops.pretrained import Absent, pretrained
from kvstore_ops.pretrained.questions import Question, questions

KEPT, TOKENS, KL, FASTER = 0.90, 0.97, 0.08, 2.0
RIGHT = 0.9
"""Least share of right answers after a full prefill: a task with fewer says little about reuse."""
PROMPTS = {"full": 240, "quick": 4, "tiny": 8}
TIMED = {"full": 12, "quick": 1, "tiny": 1}
SIZES = {"full": [(8, 128), (8, 256), (8, 480)], "quick": [(8, 96)], "tiny": []}
"""(documents of a prompt, tokens of each): with preamble and question about 1,100, 2,100 and 3,900 tokens."""
SEED = 20261123
PEAK = "suffix_peak"


def settings_of(scale: str) -> list[tuple[str, Recompute]]:
    """Return (origin of the documents' caches, setting) of each row: "alone" or behind the "preamble"."""
    if scale == "tiny":
        return [("alone", Recompute.reuse()), ("alone", Recompute(0, -1, 0.2, "suffix_attention"))]
    asked = [("alone", Recompute.reuse()), ("preamble", Recompute.reuse())]
    for ratio in (0.05, 0.1, 0.2, 0.3) if scale == "full" else (0.2,):
        asked += [("alone", Recompute(0, -1, ratio, "suffix_attention"))]
        asked += [("preamble", Recompute(0, -1, ratio, selector)) for selector in ("suffix_attention", PEAK)]
    if scale == "full":
        asked += [("alone", Recompute.cacheblend(1, 0.15)), ("preamble", Recompute(0, -1, 0.5, PEAK))]
    return asked


@dataclass
class Row:
    """One setting. ``found``: the ``Agreement`` of each prompt. ``seconds``: (full prefill's, this setting's) time to
    the first token of each timed prompt."""

    origin: str
    setting: Recompute
    found: list[Any] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)

    @property
    def faster(self) -> float:
        return statistics.median(full / ours for full, ours in self.seconds)

    @property
    def share(self) -> float:
        return float(statistics.mean(each.share for each in self.found))

    def judged(self, right: Sequence[bool], those: range) -> dict[str, float]:
        """Return the share of full prefill's right answers that are kept, and the tokens and KL of all answers."""
        found = [self.found[index] for index in those]
        kept = [
            each.is_kept for each, is_right in zip(found, (right[index] for index in those), strict=True) if is_right
        ]
        return {
            "kept": statistics.mean(kept) if kept else 0.0,
            "tokens": statistics.mean(each.tokens for each in found),
            "kl": statistics.mean(each.kl for each in found),
        }

    def holds(self, right: Sequence[bool], those: range) -> bool:
        found = self.judged(right, those)
        return found["kept"] >= KEPT and found["tokens"] >= TOKENS and found["kl"] <= KL


class Model:
    """The model that answers: the pretrained model, or the testbed's. ``why``: why it is not the pretrained model."""

    def __init__(self, scale: str) -> None:
        place = pretrained()
        self.why = "tiny" if scale == "tiny" else str(place) if isinstance(place, Absent) else ""
        self.scale = scale if not self.why else "tiny"
        self.last: list[int] = []
        if self.why:
            self.runner, self.prompts = _trained(PROMPTS["tiny"])
            return
        from kvstore_ops.profiling.own import local_model

        self.runner, tokenizer = local_model(place)  # type: ignore[arg-type]  # it is there, or there is a reason
        self.prompts = list(questions(tokenizer, PROMPTS[scale], SIZES[scale], SEED))
        self.last = [self.prompts[0].answer[-1], int(tokenizer.eos_token_id)]


def _trained(count: int) -> tuple[Any, list[Question]]:
    """Return the testbed's model, and its contexts with one question each."""
    import torch
    from kvstore_client.engines.transformers_runner import TransformersRunner

    from kvstore_ops.profiling.subject import spec_of
    from kvstore_ops.testbed import contexts, evaluation, load, recipe
    from kvstore_ops.testbed.evaluate import expected

    name = "l6-s2"
    found = contexts(evaluation(), count)
    bounds = found.boundaries
    wanted = expected(found, recipe(name).answers)
    prompts = []
    for tokens, suffix, answers in zip(found.context.tolist(), found.suffix.tolist(), wanted.tolist(), strict=True):
        documents = tuple(tuple(tokens[a:b]) for a, b in pairwise(bounds))
        prompts.append(Question((), documents, tuple(suffix[:2]), (answers[0],)))
    return TransformersRunner(load(name, torch.float32)[0], spec=spec_of(name)), prompts


class Bench:
    """The rows of one run."""

    def __init__(self, model: Model, client: Any) -> None:
        self.model, self.client = model, client
        self.rows = [Row(*each) for each in settings_of(model.scale)]
        self.right: list[bool] = []
        self._cached: dict[tuple[str, tuple[int, ...]], Any] = {}

    def ask(self, question: Question) -> None:
        """Compare every setting's answer to one prompt with full prefill's."""
        import torch

        from kvstore_ops.profiling.answers import agreement, greedy, said

        runner = self.model.runner
        tokens, asked = torch.tensor(question.tokens), question.answer
        answer, known = greedy(runner, tokens, len(asked) + 2 * bool(self.model.last), self.model.last)
        self.right.append(tuple(answer.tolist()[: len(asked)]) == asked)
        for row in self.rows:
            runs = list(self._runs(question, row.origin))
            lossy, share = said(runner, tokens, answer, runs, row.setting)
            row.found.append(agreement(known, lossy, answer, share))
        self._cached.clear()

    def _runs(self, question: Question, origin: str) -> Iterator[Any]:
        from kvstore_client.recompute import GivenKV, Run

        stood_at = len(question.preamble) if origin == "preamble" else 0
        for document, (start, stop) in zip(question.documents, question.segments, strict=True):
            kv = self._computed(question, document, stood_at)
            yield Run(start, stop - start, GivenKV(kv), stood_at, is_exact=start == stood_at)

    def _computed(self, question: Question, document: tuple[int, ...], stood_at: int) -> Any:
        """Return a document's cache, computed alone or behind the preamble."""
        from kvstore_client.recompute import recompute

        key = (str(stood_at), document)
        if key not in self._cached:
            full = Recompute.full(self.model.runner.spec.layer_count)
            made = recompute(self.model.runner, [*question.preamble[:stood_at], *document], [], full)
            self._cached[key] = [(k[:, stood_at:], v[:, stood_at:]) for k, v in made.kv]
        return self._cached[key]

    def time(self, question: Question) -> None:
        """Time the first token of one prompt, in turns by a full prefill and by every setting through the sidecar."""
        import torch

        runner, spec = self.model.runner, self.model.runner.spec
        for document in question.documents:
            for preamble in {(), question.preamble}:
                kv = self._computed(question, document, len(preamble))
                self.client.store_segment(spec, document, kv, preamble=preamble).wait(60.0)
        self._cached.clear()
        tokens = question.tokens
        ids = torch.tensor([tokens])
        for row in self.rows:
            preamble = question.preamble if row.origin == "preamble" else ()

            def ours(row: Row = row, preamble: tuple[int, ...] = preamble) -> None:
                done = self.client.partial_prefill(
                    runner, tokens, segments=question.segments, preamble=preamble, recompute=row.setting
                )
                assert done.plan.reused_token_count == sum(map(len, question.documents)), done.plan

            def full() -> None:
                with torch.inference_mode():
                    runner.model(ids, logits_to_keep=1)

            row.seconds.append((_took(full), _took(ours)))


def _took(action: Callable[[], None]) -> float:
    before = time.perf_counter()
    action()
    return time.perf_counter() - before


def _shown(bench: Bench, those: range) -> None:
    table = Table("documents", "computed again", "f", "TTFT", "answers kept", "tokens", "KL")
    for row in bench.rows:
        found = row.judged(bench.right, those)
        table.add_row(
            row.origin, _told(row.setting), f"{row.share:.3f}", f"{row.faster:.2f}x", f"{found['kept']:.3f}",
            f"{found['tokens']:.3f}", f"{found['kl']:.3f}",
        )  # fmt: skip
    Console().print(table)


def _told(setting: Recompute) -> str:
    from kvstore_ops.profiling.profiler import told

    return told(setting)


def run(scale: str) -> Result:
    """Measure all settings. The figure is that of the setting chosen on the first half, on the other half."""
    from kvstore_ops.testbed.trial import one_thread

    model = Model(scale)
    with one_thread() if model.why else nullcontext():  # a small model gains nothing by a second thread
        return _measured(scale, model)


def _measured(scale: str, model: Model) -> Result:
    note(f"reuse: {model.runner.spec.model_id} answers{f' ({model.why})' if model.why else ''}")
    with shared.ready("tiny" if model.why else "full") as (_, client):
        bench = Bench(model, client)
        for index, question in enumerate(model.prompts):
            bench.ask(question)
            if index % 10 == 9:
                note(f"reuse: {index + 1} of {len(model.prompts)} prompts, {sum(bench.right)} right in full")
        step = max(1, len(model.prompts) // TIMED[scale])
        for question in model.prompts[::step][: TIMED[scale]]:
            bench.time(question)
    half = len(model.prompts) // 2
    chosen = max(
        (row for row in bench.rows if row.holds(bench.right, range(half))), key=lambda row: row.faster, default=None
    )
    return _result(scale, bench, chosen, range(half, len(model.prompts)))


def _result(scale: str, bench: Bench, chosen: Row | None, those: range) -> Result:
    _shown(bench, those)
    model, right = bench.model, statistics.mean(bench.right)
    is_kept = chosen is not None and chosen.holds(bench.right, those)
    as_it_is = {
        row.origin: row.judged(bench.right, those)["kl"] for row in bench.rows if row.setting == Recompute.reuse()
    }
    five = [
        row for row in bench.rows if row.faster >= 5 and row.judged(bench.right, those)["kl"] <= as_it_is["alone"] / 2
    ]
    exact = [row for row in bench.rows if row.judged(bench.right, those)["kept"] >= 0.99]
    ratio = chosen.faster if chosen is not None and is_kept else 0.0
    times = [full / ours for full, ours in chosen.seconds] if chosen is not None else [0.0]
    return Result(
        name="reuse", value=chosen.share if chosen else 1.0, unit="share of a prefill's compute (f)", limit=1.0,
        ratio=ratio, target=f">= {FASTER}, answers >= {KEPT}, tokens >= {TOKENS}, KL <= {KL}",
        met=ratio >= FASTER and right >= RIGHT, runs=len(model.prompts), spread=quartiles(times),
        conditions={
            "scale": scale, "model": model.runner.spec.model_id, "why_not_pretrained": model.why,
            "prompts": len(model.prompts), "judged": len(those), "right_in_full": right,
            "tokens": sorted({len(each.tokens) for each in model.prompts})[:: max(1, len(model.prompts) - 1)],
            "chosen": f"{chosen.origin}: {_told(chosen.setting)}" if chosen else "none",
            "at_5x": [f"{row.origin}: {_told(row.setting)}" for row in five],
            "kept_0.99_at_f": min((row.share for row in exact), default=1.0),
            "rows": [
                {"documents": row.origin, "setting": asdict(row.setting), "f": row.share, "faster": row.faster,
                 **row.judged(bench.right, those)} for row in bench.rows
            ],
        },
    )  # fmt: skip
