"""Planning of one generation: how much of a prompt is loaded, and how long the model computed the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import LogitsProcessor

from kvstore.keys import Tokens
from kvstore.planning import ANY_TERMS, Terms
from kvstore.planning.loading import LoadPlan, Prefill
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.seams import Clock
from kvstore.spec import Exactness, MissReason, ModelSpec
from kvstore_client.arrays import settle_device
from kvstore_client.client import Client
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.loading.call import Asked, PrefillCall
from kvstore_client.loading.patience import result_in_time
from kvstore_client.loading.planner import ENGINE_WAYS
from kvstore_client.loading.probe import probe
from kvstore_client.lookup.match import Match, chunk_matches, unknown_chunks
from kvstore_client.prompt import Prompt

Answer = TypeVar("Answer")


class PromptPlan:
    """The client's plan for one prompt, of which at most ``most_tokens`` may be loaded. ``token_count``: number of
    tokens to load; all where planning is off or only observes."""

    def __init__(
        self, client: Client, spec: ModelSpec, tokens: Tokens, most_tokens: int, step_tokens: int,
        terms: Terms = ANY_TERMS, left_s: float = math.inf,
    ) -> None:  # fmt: skip
        """``terms``: the caller's, from now on. ``left_s``: seconds after which an answer of the sidecar comes too
        late, where plans are carried out."""
        self._client, self._spec, self._tokens = client, spec, tokens
        self._mode = client.planner.mode_under(terms)
        self.plan: LoadPlan | None = None
        self.token_count = most_tokens
        self.reason = MissReason.NONE
        self._match = Match(0, ())
        self._call: PrefillCall | None = None
        self._untold: LoadPlan | None = None
        self._made_s, self._step_tokens = client.planner.clock.monotonic(), step_tokens
        planner = client.planner
        if terms.is_overdue:
            self.plan = planner.plan(spec, self._match, len(tokens), most_tokens, step_tokens, terms=terms)
            self.token_count = 0
            return
        if self._mode == "off" or not most_tokens:
            return
        match = client.peek(spec, tokens[:most_tokens])
        if match is None and self._planned_there(most_tokens, step_tokens, terms, left_s):
            return
        self._match = self._looked_up(most_tokens, left_s) if match is None else match
        if self._mode == "on" and any(each.reason is MissReason.UNAVAILABLE for each in self._match.chunks[:1]):
            self.token_count, self.reason = 0, MissReason.UNAVAILABLE  # do not ask a sidecar again that did not answer
            return
        left = terms.after(planner.clock.monotonic() - self._made_s)
        self.plan = planner.plan(spec, self._match, len(tokens), most_tokens, step_tokens, terms=left)
        self._untold = self.plan
        if self._mode == "on" and self._match:
            self.token_count = self.plan.chosen.load_stop

    def _planned_there(self, most_tokens: int, step_tokens: int, terms: Terms, left_s: float) -> bool:
        """Have the sidecar plan a prompt that does not show in shared memory. False: its release plans none."""
        planner, prompt = self._client.planner, Prompt.of(self._spec, self._tokens, (), Exactness.EXACT)
        asked = Asked(most_tokens, step_tokens, ENGINE_WAYS, self._mode, terms=terms)

        def begin() -> tuple[PrefillCall | None]:
            return (planner.begin(prompt, asked),)

        with planner.or_miss():
            begun = self._in_time(begin, left_s, _take_back)
            if begun is not None:
                if begun[0] is not None:
                    self._follow(begun[0], most_tokens)
                return begun[0] is not None
        self.token_count, self.reason = 0, MissReason.UNAVAILABLE
        return True

    def _follow(self, call: PrefillCall, most_tokens: int) -> None:
        """Take the sidecar's plan. What it holds is held until ``ended``, or ``close``."""
        self._call, self.plan, step = call, call.plan, self._spec.chunk_tokens
        found = call.answer.found
        chunks = chunk_matches(found.runs, step, 0, len(self._tokens))
        self._match = Match(min(found.hit_count * step, most_tokens), chunks)
        if self._mode == "on" and self.plan is not None and self._match:
            self.token_count = min(self.plan.chosen.load_stop, most_tokens)

    @property
    def _loads(self) -> bool:
        return self.token_count > 0 and bool(self._match)

    @property
    def is_called(self) -> bool:
        """True when the sidecar hears of the outcome by ``ended``."""
        return self._call is not None

    def ended(self, ttft_s: float, wait_s: float, computed: Prefill | None) -> None:
        """Tell the sidecar the outcome, where it made the plan."""
        if self._call is not None:
            self._call.end(ttft_s, wait_s, is_given_up=False, computed=computed)
            self._call = None
        self._tell(ttft_s, wait_s)

    def _tell(self, ttft_s: float | None, wait_s: float, *, is_given_up: bool = False) -> None:
        """Report the outcome of the client's own plan, once."""
        plan, self._untold = self._untold, None
        if plan is not None:
            age_s = self._client.planner.clock.monotonic() - self._made_s
            stored = self._match.prefix_token_count
            outcome = PlanOutcome(plan, self._mode, stored, ttft_s, wait_s, is_given_up, age_s)
            self._client.planner.planned(self._spec, self._step_tokens, outcome)

    def close(self) -> None:
        """Have the sidecar hold nothing for a plan without an outcome. Idempotent."""
        if self._call is not None:
            self._call.close()
            self._call = None
        self._tell(None, 0.0, is_given_up=self._loads)

    @contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Close the plan when what is done with it raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _in_time(
        self, question: Callable[[], Answer], left_s: float, undo: Callable[[Answer], object]
    ) -> Answer | None:
        """Return the sidecar's answer. None: it did not come in time, where plans are carried out; ``undo`` gets one
        that comes later."""
        if self._mode != "on":
            return question()
        answer = result_in_time(question, left_s, undo)
        if answer is None:
            self._client.planner.given_up()
        return answer

    def _looked_up(self, most_tokens: int, left_s: float) -> Match:
        look = partial(self._client.lookup, self._spec, self._tokens[:most_tokens])
        found = self._in_time(look, left_s, lambda _: None)
        return Match(0, unknown_chunks(self._spec.chunk_tokens, 0, most_tokens)) if found is None else found

    def opened(self, tokens: Tokens, into: list[Any], left_s: float) -> LayerStream | None:
        """Open the fetch of the tokens that the plan loads. None: the sidecar did not answer in time. Nothing is
        written to ``into`` before the stream is read."""
        opening = partial(self._client.fetch_layers, self._spec, tokens, into=into)
        return self._in_time(opening, left_s, LayerStream.close)

    def probe(self) -> None:
        """Measure the load that the plan left out, if it is time. Blocks; never raises."""
        if self.plan is None or self._mode != "on" or self.token_count >= self._match.prefix_token_count:
            return
        probe(self._client, self._spec, self._tokens, self.token_count, self._match)


def _take_back(begun: tuple[PrefillCall | None]) -> None:
    """Close a call whose answer came too late."""
    if begun[0] is not None:
        begun[0].close()


class Stopwatch:
    """Measures how long the model computes, without its waits: from the first step that no layer on its way can delay,
    to the first token."""

    def __init__(self, client: Client, spec: ModelSpec, step_tokens: int, clock: Clock) -> None:
        self._client, self._spec, self._step_tokens, self._clock = client, spec, step_tokens, clock
        self._start: tuple[int, float] | None = None

    def computes(self, token: int, *, waits: bool) -> None:
        """Note that the step from ``token`` on begins; ``waits``: it waits for layers that are on their way."""
        if self._start is None and not waits:
            self._start = token, self._clock.monotonic()

    def ended(self, token_count: int, *, is_told: bool = False) -> Prefill | None:
        """Report the time to the planner: the first token behind ``token_count`` tokens is ready. ``is_told``: the
        sidecar hears of it from the caller. Returns the prefill; None: none was timed."""
        if self._start is None:
            return None
        token, since_s = self._start
        new = token_count - token
        passes = max(1, -(-new // self._step_tokens))
        prefill = Prefill(new, token, self._clock.monotonic() - since_s, passes)
        self._client.planner.computed(self._spec, self._step_tokens, prefill, is_told=is_told)
        return prefill


class FirstToken(LogitsProcessor):  # type: ignore[misc]  # transformers ships no types
    """Calls ``action`` once, when the first token's logits are ready: on a GPU, when all kernels before them have
    ended. Whoever keeps the prompt's cache then may read it on any stream, and the time is that of the work, not of
    its launch. It costs nothing: ``generate`` waits for the token anyway."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        action, self._action = self._action, None
        if action is not None:
            settle_device([scores])
            action()
        return scores
