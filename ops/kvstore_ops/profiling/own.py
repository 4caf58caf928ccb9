"""A subject with a model and prompts of the user. Its quality is the share of answers that stay the same with reuse as
after the model's own full prefill.

There are no labels. The model answers every prompt greedily after a full prefill. Over a reused cache an answer is kept
when each of its tokens, given the tokens before it, is again the most probable. Only whole answers count: spaces, full
stops and ends agree in any case, so that nine tokens of ten may agree while half of the answers are lost. Near ties
count as they fall, so that the loss is rather overstated.

Prompts with the same documents are one context. Their answers are kept and lost together, so that errors are of
contexts, all answers of one count as one, and no set of documents that the search used is measured again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvstore_client.engines.transformers_runner import TransformersRunner
from kvstore_client.engines.transformers_spec import CausalModel
from kvstore_client.gate.drift import misled
from kvstore_client.recompute import GivenKV, Recomputed, Run, check_sender, recompute
from transformers import DynamicCache

from kvstore.errors import InvalidRequest
from kvstore.planning import Calibration, Recompute
from kvstore.planning.permit import ALONE, PROVENANCE
from kvstore.planning.profile import Origin
from kvstore.spec import ModelSpec
from kvstore_ops.profiling.answers import agreement, said
from kvstore_ops.profiling.prompts import Prompt, by_documents, digest_of
from kvstore_ops.profiling.subject import Measured

ANSWER_TOKENS = 16
SEARCH_EVERY = 3
"""The search uses every third context; the others are for the figures."""
KEPT_SHARE = 4
"""One part in this many of the machine's memory is for the prompts' caches; other caches are computed each time."""


@dataclass(frozen=True, eq=False)
class _Asked:
    """A prompt and its reference answer. ``tokens`` int64: the prompt's. ``answer`` int64: the model's answer after a
    full prefill. ``logits`` [answer tokens, vocab_size]: the full prefill's at each token of the answer."""

    prompt: Prompt
    tokens: torch.Tensor
    answer: torch.Tensor
    logits: torch.Tensor


def local_model(directory: Path, dtype: str = "auto") -> tuple[TransformersRunner, Any]:
    """Load a model from a directory as transformers saves it, and its tokenizer; None when there is none. ``dtype``:
    "auto" is the one that it was saved in. Only safetensors are read, and no code of the directory is run. Raises:
    InvalidRequest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (directory / "config.json").is_file():
        raise InvalidRequest(
            f"{directory} has no config.json: give a directory as transformers' save_pretrained writes"
        )
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True, **safe).eval()
        has_tokenizer = any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
        tokenizer = AutoTokenizer.from_pretrained(directory, **safe) if has_tokenizer else None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{directory} cannot be loaded: {error}") from error
    model.config.name_or_path = directory.name  # the directory's path would reveal something about this machine
    spec = ModelSpec.from_transformers(model.config, model, tokenizer=tokenizer)
    return TransformersRunner(model, spec=spec), tokenizer


class OwnSubject:
    """A ``Subject`` of any model with a runner, caches for it, and prompts. The model first answers all prompts, also
    when a run continues; ``report`` gets the number of answered prompts.

    Raises: InvalidRequest for a sender of another architecture, rope regime or tokenizer, and a reuse that does not
    go with it.
    """

    def __init__(
        self, receiver: TransformersRunner, sender: TransformersRunner | None, reuse: str, prompts: list[Prompt],
        answer_tokens: int = ANSWER_TOKENS, report: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        if (reuse == "position") != (sender is None):
            raise InvalidRequest("--reuse: 'sibling' and 'both' take a --sender, 'position' takes none")
        if answer_tokens < 1:
            raise InvalidRequest(f"--answer-tokens {answer_tokens} must be at least 1")
        if sender is not None:
            check_sender(receiver.spec, sender.spec)
        self.receiver = receiver.spec
        self.sender = None if sender is None else sender.spec
        self.reuse = reuse
        self.origin = _origin_of(prompts, reuse)
        self._runner = receiver
        self._caches = _Caches(sender or receiver)
        self._asked: list[_Asked] = []
        self._contexts: list[range] = []
        known = by_documents(prompts)
        searched = known[::SEARCH_EVERY]
        judged = [context for index, context in enumerate(known) if index % SEARCH_EVERY]
        for context in (*searched, *judged):
            for prompt in context:
                self._asked.append(self._answered(prompt, answer_tokens))
                report(len(self._asked))
            self._contexts.append(range(len(self._asked) - len(context), len(self._asked)))
        digest = digest_of([each.prompt for each in self._asked], answer_tokens)
        measured = [prompt for context in judged for prompt in context]  # the search's own say nothing of the figures
        runs = 1 if reuse == "sibling" else max(len(prompt.segments) for prompt in measured)
        longest = max(int(prompt.tokens.size) for prompt in measured)
        self.calibration = Calibration(digest, (), len(judged), len(judged), len(searched), longest, runs)

    def full(self) -> Measured:
        """Return the full prefill's measurement. It is perfect, because the other settings are compared with it."""
        return Measured((1.0,) * len(self._contexts), 1.0, 0.0, 1.0, 0.0)

    def measure(self, setting: Recompute, those: range, report: Callable[[int], None]) -> Measured:
        found: list[tuple[float, ...]] = []
        for context in those:
            answers = [self._measured(index, setting) for index in self._contexts[context]]
            found.append(tuple(sum(each) / len(answers) for each in zip(*answers, strict=True)))
            report(len(found))
        kept, *means = zip(*found, strict=True)
        return Measured(kept, *(sum(each) / len(found) for each in means))

    def _measured(self, index: int, setting: Recompute) -> tuple[float, ...]:
        """Return of one answer if it is kept, f, if it misleads, the share of its tokens that are kept, and KL."""
        asked = self._asked[index]
        runs = list(self._runs(index, asked.prompt, setting))
        lossy, share = said(self._runner, asked.tokens, asked.answer, runs, setting)
        found = agreement(asked.logits, lossy, asked.answer, share)
        return float(found.is_kept), found.share, float(misled(asked.logits[:1], lossy[:1])), found.tokens, found.kl

    @torch.inference_mode()
    def _answered(self, prompt: Prompt, answer_tokens: int) -> _Asked:
        known = torch.from_numpy(prompt.tokens.astype("int64"))
        answer = answered_plainly(self._runner.model, known, answer_tokens)
        logits, _ = said(self._runner, known, answer, [], Recompute.full(self.receiver.layer_count))
        return _Asked(prompt, known, answer, logits)

    def _runs(self, index: int, prompt: Prompt, setting: Recompute) -> Iterator[Run]:
        """Yield the reused runs of a prompt. A sibling's cache is one run of the whole context. For other kinds each
        segment is a run, computed alone or behind the preamble. A model's own first segment right behind the preamble
        is exact."""
        layer = setting.first_layer if setting.needs_hidden else None
        pieces = prompt.segments if self.reuse != "sibling" else (range(prompt.context_stop),)
        for number, piece in enumerate(pieces):
            before = prompt.tokens[: prompt.preamble_count if self.origin is Origin.PREAMBLE else 0]
            tokens = torch.from_numpy(np.concatenate([before, prompt.tokens[piece.start : piece.stop]]).astype("int64"))
            source = self._caches.of((index, number), tokens, layer, len(before))
            is_exact = self.sender is None and piece.start == len(before)
            yield Run(piece.start, len(piece), source, len(before), self.sender, is_exact)


def answered_plainly(model: CausalModel, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return the most probable tokens, one after the other: at most ``count``, up to the first that ends an answer,
    int64. A model's generation config may have penalties, of which the logits that are compared later know nothing:
    by ``generate`` an answer would not even agree with its own prefill."""
    last = getattr(model.generation_config, "eos_token_id", None)
    ends = () if last is None else last if isinstance(last, list | tuple) else (last,)
    given, cache, found = tokens[None].to(model.device), DynamicCache(config=model.config), list[int]()
    while len(found) < count and (not found or found[-1] not in ends):
        logits = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        found.append(int(logits[0, -1].argmax()))
        given = given.new_tensor([found[-1:]])
    return torch.tensor(found)


def _origin_of(prompts: list[Prompt], reuse: str) -> Origin:
    """Return the origin of the documents' caches. Raises: InvalidRequest when only some prompts have a preamble."""
    having = sum(prompt.preamble_count > 0 for prompt in prompts)
    if having and having < len(prompts):
        raise InvalidRequest(f"{having} of {len(prompts)} prompts have a preamble: give all of them one, or none")
    return Origin.PREAMBLE if having and reuse in ALONE else PROVENANCE[reuse]


class _Caches:
    """A model's caches of pieces, and E of the requested layers. They are kept as long as there is room."""

    def __init__(self, runner: TransformersRunner) -> None:
        self._runner = runner
        self._room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // KEPT_SHARE
        self._kv: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._hidden: dict[tuple[tuple[int, int], int], torch.Tensor] = {}

    def of(self, name: tuple[int, int], tokens: torch.Tensor, layer: int | None, before: int) -> GivenKV:
        """Return the cache of a piece, which stands behind the first ``before`` tokens, with E of ``layer``; None:
        without E."""
        kv, hidden = self._kv.get(name), None if layer is None else self._hidden.get((name, layer))
        if kv is None or (layer is not None and hidden is None):
            made = self._made(tokens, layer)
            kv = kv or self._keep(self._kv, name, made.kv, sum(k.nbytes + v.nbytes for k, v in made.kv))
            if layer is not None:
                hidden = self._keep(self._hidden, (name, layer), made.hidden[layer], made.hidden[layer].nbytes)
        return GivenKV([(k[:, before:], v[:, before:]) for k, v in kv], None if hidden is None else hidden[before:])

    def _made(self, tokens: torch.Tensor, layer: int | None) -> Recomputed:
        full = Recompute.full(self._runner.spec.layer_count)
        return recompute(self._runner, tokens, [], full, hidden_layers=() if layer is None else (layer,))

    def _keep(self, where: dict[Any, Any], name: Any, value: Any, byte_count: int) -> Any:
        if byte_count <= self._room:
            self._room -= byte_count
            where[name] = value
        return value
