"""Partial prefill: what the sidecar has of a prompt is fetched and reused, as far as the setting allows, the rest is
computed. Planned in the client, over lookups and fetches.

A prompt's exact prefix comes first and is never touched. Behind it segments may follow that were computed alone, and a
sibling's cache of the same tokens where there are none of these, with E of the transition layer asked for before
anything else and waited for where it is needed. Whatever does not come is computed: the answer says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, InvalidRequest, Unavailable
from kvstore.keys import Extra, Tokens
from kvstore.seams import Clock
from kvstore.spec import Exactness, ModelSpec
from kvstore_client.prompt import Prompt
from kvstore_client.recompute.fetching import Fetching
from kvstore_client.recompute.fused import recompute
from kvstore_client.recompute.gate import Permit
from kvstore_client.recompute.plan import Plan
from kvstore_client.recompute.result import PartialPrefill, Recomputed
from kvstore_client.recompute.runner import ModelRunner
from kvstore_client.recompute.runs import Run, check_sender
from kvstore_client.segments.runs import runs_of
from kvstore_client.setting import Recompute
from kvstore_client.transfer import without_frames

if TYPE_CHECKING:
    from kvstore_client.client import Client

_log = logging.getLogger("kvstore.client")
LOST = (DataLoss, DeadlineExceeded, Exhausted, Unavailable)


@dataclass(frozen=True)
class Request:
    """A call's arguments, checked."""

    runner: ModelRunner
    tokens: Tokens
    segments: Sequence[Any] | None
    senders: tuple[ModelSpec, ...]
    setting: Recompute | None
    extras: tuple[Extra, ...]
    logit_count: int

    @staticmethod
    def of(
        runner: ModelRunner, tokens: Any, segments: Sequence[Any] | None, senders: Sequence[ModelSpec],
        setting: Recompute | None, extras: Sequence[Extra], logit_count: int,
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
        if segments is not None:
            runs_of(segments, int(known.size))
        if setting is not None:
            setting.check(runner.spec.layer_count)
        # The model's own cache is no sender's: what comes of it is looked up, and fetched, once.
        others = tuple(sender for sender in dict.fromkeys(senders) if sender != runner.spec)
        return Request(runner, known, segments, others, setting, tuple(extras), logit_count)

    @property
    def reusable_token_count(self) -> int:
        """What lies before the tokens whose logits are wanted."""
        return int(self.tokens.size) - self.logit_count

    def computed(self, runs: Sequence[Run], kv: Any, clock: Clock, chosen: Recompute | None = None) -> Recomputed:
        """``chosen``: the setting that a profile decided."""
        setting = self.setting or chosen or Recompute.reuse()
        tokens = self.tokens.astype("int64")
        return recompute(self.runner, tokens, runs, setting, logit_count=self.logit_count, kv=kv, clock=clock)


def partial_prefill(client: Client, request: Request, timeout_s: float, clock: Clock) -> PartialPrefill:
    """See ``Client.partial_prefill``."""
    started_s = clock.monotonic()
    plan, result, permits, prepared_s = _reused(client, request, timeout_s, clock)
    lossy_by = () if result.exactness is Exactness.EXACT else permits
    due = [client.gate.is_due(permit) for permit in lossy_by]  # each is asked once per request
    if any(due):
        lossy = result.logits[-1].clone()
        del result  # one cache at a time
        result = request.computed((), None, clock)
        told = [client.gate.checked(permit, result.logits[-1], lossy) for permit in permits]
        plan = Plan(len(request.tokens), reason="; ".join(dict.fromkeys(told)))
    timeline = replace(result.timeline, total_s=clock.monotonic() - started_s, prepare_s=prepared_s - started_s)
    return PartialPrefill(plan=plan, **{**vars(result), "timeline": timeline})


def _reused(
    client: Client, request: Request, timeout_s: float, clock: Clock
) -> tuple[Plan, Recomputed, tuple[Permit, ...], float]:
    """The prompt with what is there of it; by which permits, if the gate was asked; and when computing began."""
    try:
        return _attempted(client, request, timeout_s, clock)
    except LOST as error:
        _log.warning("kvstore: %s; computing the prompt in full", error.message)
        reason = f"{error.message}: the prompt was computed in full"
        without_frames(error)
    # Only now: the spoiled cache is gone with the error's frames, and there is one at a time.
    prepared_s = clock.monotonic()
    return Plan(len(request.tokens), reason=reason), request.computed((), None, clock), (), prepared_s


def _attempted(
    client: Client, request: Request, timeout_s: float, clock: Clock
) -> tuple[Plan, Recomputed, tuple[Permit, ...], float]:
    fetching = Fetching(
        client, request.runner, request.tokens, request.extras, request.reusable_token_count, timeout_s
    )  # fmt: skip
    try:
        plan, runs, planes = fetching.begin(request.setting, request.senders, request.segments)
        prepared_s = clock.monotonic()
        result = request.computed(runs, planes, clock, plan.recompute)
    except BaseException:
        fetching.close()
        raise
    return plan, result, fetching.permits, prepared_s
