"""The client's call that computes a prompt with whatever is there of it. torch is imported when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kvstore.keys import Extra
from kvstore.seams import Clock
from kvstore.spec import ModelSpec
from kvstore_client.setting import Recompute

if TYPE_CHECKING:
    from kvstore_client.client import Client
    from kvstore_client.recompute import ModelRunner, PartialPrefill


class PartialPrefillCalls:
    """Fetch, merge, compute again what is wrong."""

    _timeout_s: float
    _clock: Clock

    def partial_prefill(
        self,
        runner: ModelRunner,
        tokens: Any,
        *,
        segments: Sequence[Any] | None = None,
        senders: Sequence[ModelSpec] = (),
        recompute: Recompute | None = None,
        extras: Sequence[Extra] = (),
        logit_count: int = 1,
    ) -> PartialPrefill:
        """A prompt's cache and the logits of its last ``logit_count`` tokens, from what the sidecar has and what the
        runner computes: the model's own exact prefix, and behind it, as ``recompute`` says, its ``segments`` (runs
        (start, stop) of the prompt) that were stored with ``store_segment``, or what a sibling model left of the same
        tokens, of those named in ``senders``; whoever has the most. None: decided for you; without a valid profile that
        is exact reuse or a plain prefill.

        What the plan became, and why it is less than what was asked for, is in ``plan``; ``exactness`` says what the
        cache may be stored as. A sidecar that goes in the middle costs time: the prompt is then computed in full.
        Needs torch. Raises: InvalidRequest naming the argument, the setting, or the field in
        which a sender's model differs.
        """
        from kvstore_client.recompute.prefill import Request, partial_prefill

        request = Request.of(runner, tokens, segments, senders, recompute, extras, logit_count)
        return partial_prefill(cast("Client", self), request, self._timeout_s, self._clock)
