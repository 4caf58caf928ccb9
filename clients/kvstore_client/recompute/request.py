"""The request of a partial prefill: a call's arguments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra, Tokens
from kvstore.planning import ANY_TERMS, Recompute, Terms, check_sender
from kvstore.spec import Exactness, ModelSpec
from kvstore_client.prompt import GivenTokens, Prompt, preamble_tokens
from kvstore_client.recompute.runner import ModelRunner
from kvstore_client.segments.runs import GivenRun, named_segments


@dataclass(frozen=True)
class Request:
    """A call's arguments, checked. ``reused_min``: where fewer tokens are reused, DataLoss is raised, and the caller
    computes the prompt in a way of its own."""

    runner: ModelRunner
    tokens: Tokens
    segments: Sequence[GivenRun] | None
    senders: tuple[ModelSpec, ...]
    setting: Recompute | None
    extras: tuple[Extra, ...]
    logit_count: int
    preamble: Tokens
    terms: Terms = ANY_TERMS
    reused_min: int = 0

    @staticmethod
    def of(
        runner: ModelRunner, tokens: GivenTokens, segments: Sequence[GivenRun] | None, senders: Sequence[ModelSpec],
        setting: Recompute | None, extras: Sequence[Extra], logit_count: int, preamble: GivenTokens = (),
        terms: Terms = ANY_TERMS, reused_min: int = 0,
    ) -> Request:  # fmt: skip
        """Check the arguments and return the request. Raises: InvalidRequest naming the argument, and the field in
        which a sender differs."""
        if not hasattr(runner, "spec"):
            raise InvalidRequest(
                f"runner is a {type(runner).__name__}: give TransformersRunner(model), or a runner of your own"
            )
        prompt = Prompt.of(runner.spec, tokens, extras, Exactness.EXACT)
        known = prompt.tokens
        if known is None:
            raise InvalidRequest("tokens must be the tokens: their hashes cannot be computed with")
        if not known.size:
            raise InvalidRequest("tokens must be one run of whole numbers, one or more")
        if not hasattr(logit_count, "__index__") or not 1 <= logit_count <= known.size:
            raise InvalidRequest(f"logit_count {logit_count!r:.40} must be in 1..{known.size}, the prompt's tokens")
        if not isinstance(senders, Sequence):
            raise InvalidRequest(f"senders must be a list of ModelSpec, not {type(senders).__name__}")
        for index, sender in enumerate(senders):
            if not isinstance(sender, ModelSpec):
                raise InvalidRequest(f"senders[{index}] must be a ModelSpec, not {type(sender).__name__}")
            check_sender(runner.spec, sender)
        named_segments(prompt, segments, Exactness.EXACT, preamble)
        if setting is not None:
            if not isinstance(setting, Recompute):
                raise InvalidRequest(f"recompute must be a Recompute, not {setting!r:.40}")
            setting.check(runner.spec.layer_count)
        # The model's own cache is no sender's: it is looked up, and fetched, once.
        others = tuple(sender for sender in dict.fromkeys(senders) if sender != runner.spec)
        before = preamble_tokens(preamble, runner.spec)
        return Request(runner, known, segments, others, setting, tuple(extras), logit_count, before, terms, reused_min)

    @property
    def reusable_token_count(self) -> int:
        """Number of tokens before those whose logits are wanted."""
        return int(self.tokens.size) - self.logit_count
