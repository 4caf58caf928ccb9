"""The model that answers, the caches that it reuses, and its prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from blake3 import blake3
from kvstore_client.recompute import GivenKV, Run, recompute

from kvstore.planning import Recompute
from kvstore_ops.pretrained import Absent, pretrained, sibling
from kvstore_ops.pretrained.questions import FORM, Question, questions
from kvstore_ops.reuse.settings import Asked, Asking

CONTEXTS = {"full": 26, "quick": 1, "tiny": 8}
ASKED = {"full": 8, "quick": 2, "tiny": 1}
"""Prompts of each context: they differ in the question."""
CONTEXTS_ANEW, ASKED_ANEW = 60, 4
"""The same of prompts that are asked anew: contexts differ more than a context's prompts."""
SIZES = {"full": [(8, 128), (8, 128), (8, 256), (8, 256), (8, 512), (8, 512)], "quick": [(8, 96)]}
"""(documents of a prompt, tokens of each), in turn: with preamble and question about 1,100, 2,100 and 4,200 tokens. Two
contexts of each, since every other one chooses and the rest judge."""
SEED, SEED_ANEW = 20261125, 20261126
BASE, SIBLING = "l6-s2", "l6-s2-plus11"
"""The testbed's models, where the pretrained ones are missing."""


def _dtype() -> str:
    """Return the dtype that the model computes in: bf16, as its weights were saved, where the processor multiplies
    bf16; else fp32, for without such products bf16 takes six times as long."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


class Subject:
    """A model with prompts. ``why``: why it is not the pretrained model. ``last``: tokens that end an answer.
    ``sender``: the sibling model whose caches it reuses; None: it reuses its own."""

    def __init__(self, scale: str, asking: Asking = Asking.OWN) -> None:
        is_sibling = asking is Asking.SIBLING
        base, tuned = pretrained(), sibling() if is_sibling else None
        absent = next((each for each in (base, tuned) if isinstance(each, Absent)), None)
        self.why = "tiny" if scale == "tiny" else str(absent or "")
        self.scale = scale if not self.why else "tiny"
        contexts, self.asked, seed = _prompts_of(asking, self.scale)
        self.last: list[int] = []
        self.dtype = "float32" if self.why else _dtype()
        self.runner: Any
        self.sender: Any = None
        if self.why:
            name = SIBLING if is_sibling else BASE
            self.runner, self.prompts = _testbed(name), _contexts(contexts, name)
            self.sender = _testbed(BASE) if is_sibling else None
            return
        from kvstore_ops.profiling.own import local_model

        assert isinstance(base, Path), "it is there, or there is a reason"
        self.runner, tokenizer = local_model(base, self.dtype)
        form = FORM
        if isinstance(tuned, Path):
            from kvstore_ops.pretrained.tuning import FORM as SAYS

            form = SAYS
            self.sender, self.runner = self.runner, local_model(tuned, self.dtype)[0]
        self.prompts = list(questions(tokenizer, contexts, SIZES[scale], seed, self.asked, form))
        self.last = [self.prompts[0].answer[-1], int(tokenizer.eos_token_id)]

    @property
    def made_by(self) -> dict[str, str]:
        """What caches and answers come from, for a run's file: weights, those of the sibling that made the reused
        caches, dtype, and prompts."""
        sent = {} if self.sender is None else {"sender": self.sender.spec.weights_digest}
        return {"model": self.runner.spec.weights_digest, "dtype": self.dtype, "prompts": self._digest, **sent}

    @property
    def lengths(self) -> list[Question]:
        """One prompt, the first, of each length of documents."""
        return list({len(each.documents[0]): each for each in reversed(self.prompts)}.values())[::-1]

    @property
    def _digest(self) -> str:
        return blake3(repr([(each.tokens, each.answer) for each in self.prompts]).encode()).hexdigest()


def _prompts_of(asking: Asking, scale: str) -> tuple[int, int, int]:
    """Return the number of contexts, the prompts of each, and their seed."""
    if asking is Asking.ANEW and scale == "full":
        return CONTEXTS_ANEW, ASKED_ANEW, SEED_ANEW
    return CONTEXTS[scale], ASKED[scale], SEED


def _testbed(name: str) -> Any:
    """Return the runner of a model of the testbed."""
    import torch
    from kvstore_client.engines.transformers_runner import TransformersRunner

    from kvstore_ops.profiling.subject import spec_of
    from kvstore_ops.testbed import load

    return TransformersRunner(load(name, torch.float32)[0], spec=spec_of(name))


def _contexts(count: int, name: str) -> list[Question]:
    """Return contexts of the testbed with one question each, and the answers of one of its models."""
    from kvstore_ops.testbed import contexts, evaluation, recipe
    from kvstore_ops.testbed.evaluate import expected

    found = contexts(evaluation(), count)
    wanted = expected(found, recipe(name).answers)
    prompts = []
    for tokens, suffix, answers in zip(found.context.tolist(), found.suffix.tolist(), wanted.tolist(), strict=True):
        documents = tuple(tuple(tokens[a:b]) for a, b in pairwise(found.boundaries))
        prompts.append(Question((), documents, tuple(suffix[:2]), (answers[0],)))
    return prompts


class Caches:
    """The caches of one prompt's context at a time: the next context's take their place. ``layers``: whose E is kept
    of a sibling's cache."""

    def __init__(self, subject: Subject, rows: list[Asked]) -> None:
        self._runner, self._sender = subject.runner, subject.sender
        self._layers = tuple(sorted({row.setting.first_layer for row in rows if row.setting.needs_hidden}))
        self._made: dict[Any, Any] = {}
        self._of: Any = None

    def whole(self, question: Question) -> list[Run]:
        """Return the model's own cache of everything before the suffix."""
        context = question.tokens[: -len(question.suffix)]
        return [Run(0, len(context), GivenKV(self._computed(question, context).kv), is_exact=True)]

    def theirs(self, question: Question) -> Any:
        """Return the sibling's cache of everything before the suffix."""
        return self._computed(question, question.tokens[: -len(question.suffix)], is_theirs=True)

    def document(self, question: Question, document: tuple[int, ...], preamble: tuple[int, ...]) -> Any:
        """Return a document's cache, computed alone or behind the preamble."""
        made, before = self._computed(question, [*preamble, *document]), len(preamble)
        return [(k[:, before:], v[:, before:]) for k, v in made.kv]

    def runs(self, question: Question, row: Asked) -> Iterator[Run]:
        """Yield the runs that a row reuses."""
        if row.origin == "sibling":
            made, setting = self.theirs(question), row.setting
            hidden = made.hidden[setting.first_layer] if setting.needs_hidden else None
            yield Run(0, made.kv[0][0].shape[1], GivenKV(made.kv, hidden), 0, self._sender.spec)
            return
        preamble = question.preamble if row.origin == "preamble" else ()
        for document, (start, stop) in zip(question.documents, question.segments, strict=True):
            kv = self.document(question, document, preamble)
            yield Run(start, stop - start, GivenKV(kv), len(preamble), is_exact=start == len(preamble))

    def _computed(self, question: Question, tokens: list[int], *, is_theirs: bool = False) -> Any:
        of = (question.preamble, question.documents)
        if self._of != of:
            self._of, self._made = of, {}
        key = (is_theirs, *tokens)
        if key not in self._made:
            runner, layers = (self._sender, self._layers) if is_theirs else (self._runner, ())
            everything = Recompute.full(runner.spec.layer_count)
            self._made[key] = recompute(runner, tokens, [], everything, hidden_layers=layers)
        return self._made[key]
