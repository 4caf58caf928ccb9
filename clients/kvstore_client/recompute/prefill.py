"""Partial prefill: what the sidecar has of a prompt is fetched and reused, as far as the setting allows, the rest is
computed. Planned in the client, over lookups and fetches.

A prompt's exact prefix comes first and is never touched. Behind it a sibling's cache of the same tokens may follow,
with E of the transition layer fetched before anything else. Whatever does not come is computed: the answer says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, InvalidRequest, Unavailable
from kvstore.keys import Extra, Tokens
from kvstore.seams import Clock
from kvstore.spec import ChunkState, Exactness, MissReason, ModelSpec
from kvstore_client.match import Match
from kvstore_client.prompt import Prompt
from kvstore_client.recompute.fetched import FetchedRun, places
from kvstore_client.recompute.fused import recompute
from kvstore_client.recompute.merged import dense_planes
from kvstore_client.recompute.plan import Plan, PlannedRun
from kvstore_client.recompute.result import PartialPrefill, Recomputed
from kvstore_client.recompute.runner import ModelRunner
from kvstore_client.recompute.runs import Run, check_sender
from kvstore_client.setting import Recompute

if TYPE_CHECKING:
    from kvstore_client.client import Client

_log = logging.getLogger("kvstore.client")
LOST = (DataLoss, DeadlineExceeded, Exhausted, Unavailable)
UNPROFILED = "no valid profile for these weights: only the exact prefix is reused; give recompute= to decide yourself"


@dataclass(frozen=True)
class Request:
    """A call's arguments, checked."""

    runner: ModelRunner
    tokens: Tokens
    senders: tuple[ModelSpec, ...]
    setting: Recompute | None
    extras: tuple[Extra, ...]
    logit_count: int

    @staticmethod
    def of(
        runner: ModelRunner, tokens: Any, senders: Sequence[ModelSpec], setting: Recompute | None,
        extras: Sequence[Extra], logit_count: int,
    ) -> Request:  # fmt: skip
        """Raises: InvalidRequest naming the argument, and the field in which a sender differs."""
        known = Prompt.of(runner.spec, tokens, extras, Exactness.EXACT).tokens
        if known is None:
            raise InvalidRequest("tokens must be the tokens: their hashes cannot be computed with")
        if not 1 <= logit_count <= known.size:
            raise InvalidRequest(f"logit_count {logit_count} must be in 1..{known.size}, the prompt's tokens")
        for index, sender in enumerate(senders):
            if not isinstance(sender, ModelSpec):
                raise InvalidRequest(f"senders[{index}] must be a ModelSpec, not {type(sender).__name__}")
            check_sender(runner.spec, sender)
        if setting is not None:
            setting.check(runner.spec.layer_count)
        return Request(runner, known, tuple(senders), setting, tuple(extras), logit_count)

    @property
    def reusable_token_count(self) -> int:
        """What lies before the tokens whose logits are wanted."""
        return int(self.tokens.size) - self.logit_count

    def computed(self, runs: Sequence[Run], kv: Any, clock: Clock) -> Recomputed:
        setting = self.setting or Recompute.reuse()
        tokens = self.tokens.astype("int64")
        return recompute(self.runner, tokens, runs, setting, logit_count=self.logit_count, kv=kv, clock=clock)


def partial_prefill(client: Client, request: Request, timeout_s: float, clock: Clock) -> PartialPrefill:
    """See ``Client.partial_prefill``."""
    started_s = clock.monotonic()
    fetching = _Fetching(client, request, timeout_s)
    try:
        plan, runs, planes = fetching.begin()
        prepared_s = clock.monotonic()
        result = request.computed(runs, planes, clock)
        fetching.finish()
    except LOST as error:
        _log.warning("kvstore: %s; computing the prompt in full", error.message)
        fetching.close()
        prepared_s = clock.monotonic()
        plan = Plan(len(request.tokens), reason=f"{error.message}: the prompt was computed in full")
        result = request.computed((), None, clock)
    except BaseException:
        fetching.close()
        raise
    timeline = replace(result.timeline, total_s=clock.monotonic() - started_s, prepare_s=prepared_s - started_s)
    return PartialPrefill(plan=plan, **{**vars(result), "timeline": timeline})


class _Fetching:
    """What is fetched of one prompt, and where it goes."""

    def __init__(self, client: Client, request: Request, timeout_s: float) -> None:
        self._client, self._request, self._timeout_s = client, request, timeout_s
        self._runner, self._tokens = request.runner, request.tokens
        self._sources: list[FetchedRun] = []
        self._runs: list[Run] = []
        self._planned: list[PlannedRun] = []
        self._planes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> tuple[Plan, list[Run], Any]:
        """Ask what is there and start what is to be fetched. Returns the plan, its runs, and where they land."""
        request = self._request
        own = self._held(self._runner.spec)
        exact = min(own.prefix_token_count, request.reusable_token_count)
        self._planes = dense_planes(self._runner.spec, len(self._tokens), self._runner.device)
        if exact:
            layers = self._runner.spec.slab_layers
            transfer = self._client.start_fetch(own.ticket or b"", into=places(self._planes, layers, 0))
            self._take(FetchedRun(transfer, self._timeout_s), 0, exact, layers, None)
        else:
            self._client.release_ticket(own.ticket)
        reason = _missing(own)
        setting = request.setting
        if setting is None:
            reason = reason or (UNPROFILED if request.senders else "")
        elif request.senders and not setting.computes_all(self._runner.spec.layer_count):
            reason = reason or self._take_sibling(setting, exact)
        lossy = any(planned.sender is not None for planned in self._planned)
        plan = Plan(len(self._tokens), tuple(self._planned), setting if lossy else None, reason)
        return plan, self._runs, self._planes

    def finish(self) -> None:
        """Return when everything has landed. Raises what did not."""
        for source in self._sources:
            source.finish()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _held(self, spec: ModelSpec) -> Match:
        return self._client.lookup(spec, self._tokens, hold=True, extras=self._request.extras)

    def _take_sibling(self, setting: Recompute, exact: int) -> str:
        """Fetch the tokens behind the exact prefix from the sender that has the most of them. Returns why not."""
        matches = [(self._held(sender), sender) for sender in self._request.senders]
        matches.sort(key=lambda pair: -pair[0].prefix_token_count)
        taken, reason = None, "no sender has anything behind the exact prefix"
        for match, sender in matches:
            if taken is None and min(match.prefix_token_count, self._request.reusable_token_count) > exact:
                reason = self._take_from(setting, exact, match, sender)
                taken = None if reason else match
        for match, _ in matches:
            if match is not taken:
                self._client.release_ticket(match.ticket)
        return "" if taken else reason

    def _take_from(self, setting: Recompute, exact: int, match: Match, sender: ModelSpec) -> str:
        count = min(match.prefix_token_count, self._request.reusable_token_count)
        layers = setting.loaded_layers(self._runner.spec.layer_count)
        hidden, landed = None, layers[:0]
        if setting.needs_hidden:
            # Layer 0 is always loaded then, and comes along.
            landed = layers[:1]
            fetched = self._client.fetch(
                sender, self._tokens, layers=landed, hidden_layers=(setting.first_layer,), extras=self._request.extras
            )
            count = min(count, fetched.token_count)
            if count <= exact:
                return f"sender {sender.model_id!r} has no E of layer {setting.first_layer}: {fetched.reason.name}"
            hidden = fetched.hidden[setting.first_layer][exact:count].to(self._runner.device)
            for (k, v), layer in zip(fetched, landed, strict=True):
                self._planes[layer][0][:, exact:count] = k[:, exact:count]
                self._planes[layer][1][:, exact:count] = v[:, exact:count]
        coming, transfer = layers[len(landed) :], None
        if coming:
            into = places(self._planes, coming, exact)
            transfer = self._client.start_fetch(match.ticket or b"", into=into, layers=coming)
        else:
            self._client.release_ticket(match.ticket)
        source = FetchedRun(transfer, self._timeout_s, landed=frozenset(landed), hidden=hidden)
        self._take(source, exact, count, layers, sender)
        return ""

    def _take(
        self, source: FetchedRun, start: int, stop: int, layers: tuple[int, ...], sender: ModelSpec | None
    ) -> None:
        self._sources.append(source)
        self._runs.append(Run(start, stop - start, source, start, sender, is_exact=sender is None))
        self._planned.append(PlannedRun(start, stop - start, layers, sender))


def _missing(match: Match) -> str:
    """Why nothing can be there, when it is the sidecar that is not."""
    gone = [chunk for chunk in match.chunks if chunk.reason is MissReason.UNAVAILABLE]
    return "the sidecar is unavailable" if gone and gone[0].state is ChunkState.MISS and not match else ""
