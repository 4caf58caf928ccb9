"""The client's call that computes a prompt with whatever is there of it. torch is imported when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kvstore.keys import Extra
from kvstore.planning import Recompute
from kvstore.seams import Clock
from kvstore.spec import ModelSpec
from kvstore_client.connection import Connection
from kvstore_client.fetching import FetchedKV
from kvstore_client.gate import Gate

if TYPE_CHECKING:
    from kvstore_client.client import Client
    from kvstore_client.recompute import ModelRunner, PartialPrefill

DRIFT_COUNTERS = ("drift_checks", "drift_misled", "lossy_switched_off")


class PartialPrefillCalls:
    """Fetch, merge, compute again what is wrong."""

    _timeout_s: float
    _clock: Clock
    _connection: Connection

    @property
    def gate(self) -> Gate:
        """What lets lossy reuse through when ``recompute`` is None, and watches it: a ``Gate`` over the profiles of
        this user. Set another for another floor, directory or check interval."""
        found: Gate | None = vars(self).get("_gate")
        # Of threads that come here at once, all get the first one's.
        return found or vars(self).setdefault("_gate", Gate(counters=self._connection.counters))

    @gate.setter
    def gate(self, gate: Gate) -> None:
        gate.counters = self._connection.counters
        vars(self)["_gate"] = gate

    def fetch_projected(
        self,
        runner: ModelRunner,
        tokens: Any,
        *,
        step_tokens: int | None = None,
        extras: Sequence[Extra] = (),
        verify: bool = False,
    ) -> FetchedKV:
        """The cache of the longest stored prefix of a model whose spec keeps E in the place of KV: each layer's K and V
        are projected by the runner as its E lands, while later layers' E is on its way.

        Shapes as in ``fetch``, on the runner's device; ``byte_count`` is what came. ``step_tokens``: rows projected at
        a time (None: a chunk): the same bits as a prefill in these steps, otherwise the same within rounding. What is
        lost on the way is a miss, of all of it. Needs torch. Raises: InvalidRequest for a spec that keeps KV, and a
        runner without ``project_kv``.
        """
        from kvstore_client.recompute.projecting import fetch_projected

        return fetch_projected(cast("Client", self), runner, tokens, step_tokens, extras, verify)

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
        (start, stop) of the prompt) that were stored with ``store_segment``, and where there are none of these, what a
        sibling model left of the same tokens, the one of those named in ``senders`` that has the most. None: decided
        for you: the cheapest setting that a profile of these weights has at the ``gate``'s floor; without one, exact
        reuse or a plain prefill. Segments and a sibling's cache are then mixed when one profile's setting computes all
        that the other's does. Some of these requests are checked: prefilled in full as well, which is then the answer.

        What the plan became, and why it is less than what was asked for, is in ``plan``; ``exactness`` says what the
        cache may be stored as. A sidecar that goes in the middle costs time: the prompt is then computed in full.
        Needs torch. Raises: InvalidRequest naming the argument, the setting, or the field in
        which a sender's model differs.
        """
        from kvstore_client.recompute.prefill import partial_prefill
        from kvstore_client.recompute.request import Request

        request = Request.of(runner, tokens, segments, senders, recompute, extras, logit_count)
        return partial_prefill(cast("Client", self), request, self._timeout_s, self._clock)
