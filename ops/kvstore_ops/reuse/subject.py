"""The model that answers, the caches that it reuses, and its prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from blake3 import blake3
from kvstore_client.recompute import GivenKV, Run, recompute

from kvstore.planning import Recompute
from kvstore_ops.pretrained import Absent, pretrained
from kvstore_ops.pretrained.questions import Question, questions
from kvstore_ops.reuse.settings import Asked

CONTEXTS = {"full": 50, "quick": 1, "tiny": 8}
ASKED = {"full": 4, "quick": 2, "tiny": 1}
"""Prompts of each context: they differ in the question."""
SIZES = {"full": [(8, 128)], "quick": [(8, 96)]}
"""(documents of a prompt, tokens of each): with preamble and question about 1,100 tokens."""
SEED = 20261123
DTYPE = "float32"
"""The model computes in fp32, from weights that were saved in bf16: processors without bf16 products take six times as
long in bf16, and no other answers come of it but those of a finer rounding."""


class Subject:
    """A model with prompts. ``why``: why it is not the pretrained model. ``last``: tokens that end an answer."""

    def __init__(self, scale: str) -> None:
        place = pretrained()
        self.why = "tiny" if scale == "tiny" else str(place) if isinstance(place, Absent) else ""
        self.scale = scale if not self.why else "tiny"
        self.last: list[int] = []
        self.runner: Any
        if self.why:
            self.runner, self.prompts = _trained(CONTEXTS["tiny"])
            return
        from kvstore_ops.profiling.own import local_model

        assert not isinstance(place, Absent), "it is there, or there is a reason"
        self.runner, tokenizer = local_model(place, DTYPE)
        self.prompts = list(questions(tokenizer, CONTEXTS[scale], SIZES[scale], SEED, ASKED[scale]))
        self.last = [self.prompts[0].answer[-1], int(tokenizer.eos_token_id)]

    @property
    def digest(self) -> str:
        """The digest of all prompts, for a run's file."""
        return blake3(repr([(each.tokens, each.answer) for each in self.prompts]).encode()).hexdigest()


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


class Caches:
    """The caches of one prompt's context at a time: the next context's take their place."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._made: dict[tuple[int, ...], Any] = {}
        self._of: Any = None

    def whole(self, question: Question) -> list[Run]:
        """Return the model's own cache of everything before the suffix."""
        self._begin(question)
        context = question.tokens[: -len(question.suffix)]
        return [Run(0, len(context), GivenKV(self._computed(context).kv), is_exact=True)]

    def runs(self, question: Question, asked: Asked) -> Iterator[Run]:
        """Yield the runs that a row reuses."""
        self._begin(question)
        before = question.preamble if asked.origin == "preamble" else ()
        for document, (start, stop) in zip(question.documents, question.segments, strict=True):
            made = self._computed([*before, *document])
            kv = [(k[:, len(before) :], v[:, len(before) :]) for k, v in made.kv]
            yield Run(start, stop - start, GivenKV(kv), len(before), is_exact=start == len(before))

    def _begin(self, question: Question) -> None:
        of = (question.preamble, question.documents)
        if self._of != of:
            self._of, self._made = of, {}

    def _computed(self, tokens: list[int]) -> Any:
        key = tuple(tokens)
        if key not in self._made:
            self._made[key] = recompute(self._runner, tokens, [], Recompute.full(self._runner.spec.layer_count))
        return self._made[key]
