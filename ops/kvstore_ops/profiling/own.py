"""A model of one's own, and prompts: how often reuse says what the model says after its own full prefill.

There are no labels. The model answers every prompt after a full prefill, greedily; every setting is then asked for
each token of that answer, given the ones before it. Quality is the share of these tokens at which its most probable
token is the full prefill's: top-1 agreement, 1 for the full prefill itself. Near ties count as they fall, so that what
is lost is rather overstated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvstore_client.engines.transformers_runner import TransformersRunner
from kvstore_client.gate.drift import misled
from kvstore_client.recompute import GivenKV, Recomputed, Run, check_sender, recompute

from kvstore.errors import InvalidRequest
from kvstore.planning import Calibration, Recompute
from kvstore.spec import ModelSpec
from kvstore_ops.profiling.prompts import Prompt, digest_of
from kvstore_ops.profiling.subject import Measured

ANSWER_TOKENS = 16
SEARCH_EVERY = 3
"""Every third prompt is searched on, the others are for the figures."""
KEPT_SHARE = 4
"""A quarter of the machine's memory is for the prompts' caches; what does not fit is computed again each time."""


@dataclass(frozen=True, eq=False)
class _Asked:
    """``tokens`` int64: a prompt and its answer but for the last token; ``logits`` [answer tokens, vocab_size]: what
    the full prefill says at each of the answer's tokens."""

    prompt: Prompt
    tokens: torch.Tensor
    logits: torch.Tensor


def local_model(directory: Path) -> tuple[TransformersRunner, Any]:
    """A model out of a directory as transformers saves it, in the dtype it was saved in, and its tokenizer, None when
    there is none. Weights in safetensors, no code of the directory's. Raises: InvalidRequest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (directory / "config.json").is_file():
        raise InvalidRequest(
            f"{directory} has no config.json: give a directory as transformers' save_pretrained writes"
        )
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", use_safetensors=True, **safe).eval()
        has_tokenizer = any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
        tokenizer = AutoTokenizer.from_pretrained(directory, **safe) if has_tokenizer else None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{directory} cannot be loaded: {error}") from error
    model.config.name_or_path = directory.name  # a name that says nothing of this machine
    spec = ModelSpec.from_transformers(model.config, model, tokenizer=tokenizer)
    return TransformersRunner(model, spec=spec), tokenizer


class OwnSubject:
    """A ``Subject``: any model with a runner, somebody's caches for it, and prompts. ``report`` gets how many prompts
    the model has answered; that comes first, also when a run goes on.

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
        self._runner = receiver
        self._caches = _Caches(sender or receiver)
        self._asked = []
        searched = prompts[::SEARCH_EVERY]
        prompts = [*searched, *(prompt for index, prompt in enumerate(prompts) if index % SEARCH_EVERY)]
        for index, prompt in enumerate(prompts):
            self._asked.append(self._answered(prompt, answer_tokens))
            report(index + 1)
        answers = sum(len(each.logits) for each in self._asked[len(searched) :])
        digest = digest_of(prompts, answer_tokens)
        self.calibration = Calibration(digest, (), len(prompts) - len(searched), answers, len(searched))

    def full(self) -> Measured:
        """It is what the others are compared with."""
        return Measured((1.0,) * len(self._asked), 1.0, 0.0)

    def measure(self, setting: Recompute, those: range, report: Callable[[int], None]) -> Measured:
        by_context, share, wrong, answers = [], 0.0, 0, 0
        for index in those:
            asked = self._asked[index]
            runs = list(self._runs(index, asked.prompt, setting))
            done = recompute(self._runner, asked.tokens, runs, setting, logit_count=len(asked.logits))
            agrees = done.logits.argmax(-1) == asked.logits.argmax(-1)
            by_context.append(float(agrees.float().mean()))
            share += done.share / len(those)
            wrong += int(misled(asked.logits, done.logits).sum())
            answers += len(asked.logits)
            report(len(by_context))
        return Measured(tuple(by_context), share, wrong / answers)

    @torch.inference_mode()
    def _answered(self, prompt: Prompt, answer_tokens: int) -> _Asked:
        known = torch.from_numpy(prompt.tokens.astype("int64"))
        ids = known[None].to(self._runner.device)
        whole = self._runner.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer_tokens, do_sample=False, num_beams=1,
            pad_token_id=0,
        )  # fmt: skip
        tokens = whole[0, :-1].cpu()
        count = len(tokens) + 1 - len(known)
        full = Recompute.full(self.receiver.layer_count)
        return _Asked(prompt, tokens, recompute(self._runner, tokens, [], full, logit_count=count).logits)

    def _runs(self, index: int, prompt: Prompt, setting: Recompute) -> Iterator[Run]:
        """A sibling's cache is of the whole context, in one piece; others are of each segment alone."""
        layer = setting.first_layer if setting.needs_hidden else None
        pieces = prompt.segments if self.reuse != "sibling" else (range(prompt.context_stop),)
        for number, piece in enumerate(pieces):
            tokens = torch.from_numpy(prompt.tokens[piece.start : piece.stop].astype("int64"))
            yield Run(
                piece.start, len(piece), self._caches.of((index, number), tokens, layer), sender=self.sender
            )  # fmt: skip


class _Caches:
    """What a model caches of pieces, and E of the layers that were asked for: kept as long as there is room."""

    def __init__(self, runner: TransformersRunner) -> None:
        self._runner = runner
        self._room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // KEPT_SHARE
        self._kv: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._hidden: dict[tuple[tuple[int, int], int], torch.Tensor] = {}

    def of(self, name: tuple[int, int], tokens: torch.Tensor, layer: int | None) -> GivenKV:
        """The cache of a piece, and E of a layer, None: of none."""
        kv, hidden = self._kv.get(name), None if layer is None else self._hidden.get((name, layer))
        if kv is None or (layer is not None and hidden is None):
            made = self._made(tokens, layer)
            kv = kv or self._keep(self._kv, name, made.kv, sum(k.nbytes + v.nbytes for k, v in made.kv))
            if layer is not None:
                hidden = self._keep(self._hidden, (name, layer), made.hidden[layer], made.hidden[layer].nbytes)
        return GivenKV(kv, hidden)

    def _made(self, tokens: torch.Tensor, layer: int | None) -> Recomputed:
        full = Recompute.full(self._runner.spec.layer_count)
        return recompute(self._runner, tokens, [], full, hidden_layers=() if layer is None else (layer,))

    def _keep(self, where: dict[Any, Any], name: Any, value: Any, byte_count: int) -> Any:
        if byte_count <= self._room:
            self._room -= byte_count
            where[name] = value
        return value
