"""Planning of one generation: how much of a prompt is loaded, and how long the model computed the rest."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from kvstore.planning.loading import LoadPlan, Prefill
from kvstore.seams import Clock
from kvstore.spec import MissReason, ModelSpec
from kvstore_client.client import Client
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.loading.patience import in_time
from kvstore_client.loading.probe import probe
from kvstore_client.lookup.match import Match, missed_chunks


class PromptPlan:
    """The client's plan for one prompt, of which at most ``most_tokens`` may be loaded. ``token_count``: number of
    tokens to load; all where planning is off or only observes."""

    def __init__(
        self, client: Client, spec: ModelSpec, tokens: Any, most_tokens: int, step_tokens: int, left_s: float = math.inf
    ) -> None:
        """``left_s``: seconds after which an answer of the sidecar comes too late, where plans are carried out."""
        self._client, self._spec, self._tokens = client, spec, tokens
        self.plan: LoadPlan | None = None
        self.token_count = most_tokens
        self.reason = MissReason.NONE
        self._match = Match(0, ())
        planner = client.planner
        if planner.mode == "off" or not most_tokens:
            return
        match = client.peek(spec, tokens[:most_tokens])
        self._match = self._looked_up(most_tokens, left_s) if match is None else match
        if planner.mode == "on" and any(each.reason is MissReason.UNAVAILABLE for each in self._match.chunks[:1]):
            self.token_count, self.reason = 0, MissReason.UNAVAILABLE  # do not ask a sidecar again that did not answer
            return
        self.plan = planner.plan(spec, self._match, len(tokens), most_tokens, step_tokens)
        if planner.mode == "on" and self._match:
            self.token_count = self.plan.chosen.load_stop

    def _looked_up(self, most_tokens: int, left_s: float) -> Match:
        look = partial(self._client.lookup, self._spec, self._tokens[:most_tokens])
        if self._client.planner.mode != "on":
            return look()
        found = in_time(look, left_s, lambda _: None)
        if found is None:
            self._client.planner.given_up()
            return Match(0, missed_chunks(self._spec.chunk_tokens, 0, most_tokens, MissReason.UNAVAILABLE))
        return found

    def opened(self, tokens: Any, into: list[Any], left_s: float) -> LayerStream | None:
        """Open the fetch of the tokens that the plan loads. None: the sidecar did not answer in time. Nothing is
        written to ``into`` before the stream is read."""
        opening = partial(self._client.fetch_layers, self._spec, tokens, into=into)
        if self._client.planner.mode != "on":
            return opening()
        stream = in_time(opening, left_s, LayerStream.close)
        if stream is None:
            self._client.planner.given_up()
        return stream

    def probe(self) -> None:
        """Measure the load that the plan left out, if it is time. Blocks; never raises."""
        if self.plan is None or self._client.planner.mode != "on" or self.token_count >= self._match.prefix_token_count:
            return
        probe(self._client, self._spec, self._tokens, self.token_count, self._match)


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

    def ended(self, token_count: int) -> None:
        """Report the time to the planner: the first token behind ``token_count`` tokens is ready."""
        if self._start is None:
            return
        token, since_s = self._start
        new = token_count - token
        passes = max(1, -(-new // self._step_tokens))
        prefill = Prefill(new, token, self._clock.monotonic() - since_s, passes)
        self._client.planner.computed(self._spec, self._step_tokens, prefill)
