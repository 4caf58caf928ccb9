"""Partial prefills as calls: the sidecar looks a prompt up, plans with its tiers' rates, and holds the chunks to load.
Afterwards the client tells how the plan went."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import grpc

from kvstore.errors import DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.keys import DIGEST_BYTES
from kvstore.planning import ANY_TERMS, Terms
from kvstore.planning.loading import ComputeRate, LoadPlan, Prefill, TierRate, Way
from kvstore.planning.loading.outcome import is_sound_plan
from kvstore.seams.scheduler import start_thread
from kvstore.v1alpha import prefill_pb2 as pb
from kvstore.wire.plans import (
    CLASS_NUMBERS,
    MODE_NUMBERS,
    WAY_NUMBERS,
    WAYS,
    compute_to_message,
    link_to_message,
    plan_from_message,
    prefill_to_message,
)
from kvstore_client.context import Context
from kvstore_client.fetch.ticket import pack_ticket
from kvstore_client.lookup.calls import with_tail
from kvstore_client.lookup.match import Match, chunk_matches
from kvstore_client.planes.session import ClientSession, PendingCall, cancel, translated
from kvstore_client.prompt import Prompt

_log = logging.getLogger("kvstore.client")
CALL_S_MAX = 3600.0
"""Seconds after which a prefill's outcome is not reported any more."""


class Asked(NamedTuple):
    """The request for a partial prefill. ``reusable_tokens``: tokens from there on are computed in any case; ``ways``:
    the plans that the engine can carry out; ``readers``: number of fetches by the plan's ticket; ``terms``: the
    caller's deadline, from now on, and class."""

    reusable_tokens: int
    step_tokens: int
    ways: Iterable[Way]
    mode: str
    readers: int = 1
    terms: Terms = ANY_TERMS


class PrefillCall:
    """One partial prefill, from the plan on. ``answer``: the stored chunks, and a ticket for those to load:
    ``answer.chunk_count`` chunks from ``answer.chunk_first`` on. ``end`` reports the outcome; closing without it takes
    the call back. Close it in any case."""

    def __init__(self, session: ClientSession, begin: pb.BeginPrefill, timeout_s: float) -> None:
        """Raises the typed error of a call that fails; DeadlineExceeded when no answer comes in time; _Unplanned for an
        answer that contradicts itself."""
        self._timeout_s = timeout_s
        self._said: SimpleQueue[pb.PartialPrefillRequest | None] = SimpleQueue()
        self._said.put(pb.PartialPrefillRequest(begin=begin))
        answers: SimpleQueue[pb.PartialPrefillResponse | grpc.RpcError | None] = SimpleQueue()
        self._is_over = threading.Event()
        self._returns = session.returns
        try:
            self._begin(session, partial(_read, answers, self._is_over))
            answer = answers.get(timeout=timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, Empty):
                raise DeadlineExceeded(f"the sidecar planned nothing within {timeout_s} s") from None
            raise
        if not isinstance(answer, pb.PartialPrefillResponse):
            self.close()
            raise Unavailable("the sidecar is gone") if answer is None else _failure(answer)
        self.answer = answer
        ways = {Way.PREFILL, *(WAYS[each] for each in begin.ways)}
        self.plan = plan_from_message(answer.plan, ways) if answer.HasField("plan") else None
        wrong = _contradiction(begin, answer, self.plan)
        if wrong:
            self.close()
            _log.warning("kvstore: the sidecar %s: the prompt is looked up without its plan", wrong)
            raise _Unplanned(f"the sidecar {wrong}")

    def _begin(self, session: ClientSession, read: Callable[[Any], None]) -> None:
        """Begin the call, and the thread that reads it. Raises _Unplanned where a thread cannot be had, or the session
        is gone: a lookup takes no thread, and connects again."""
        try:
            self._stream = session.begun(
                lambda: session.prefills.PartialPrefill(
                    iter(self._said.get, None), timeout=CALL_S_MAX, metadata=session.carried
                )
            )
            start_thread(partial(read, self._stream), "kvstore-prefill")
        except Unavailable as error:
            raise _Unplanned(error.message) from error

    def end(self, ttft_s: float, wait_s: float, *, is_given_up: bool, computed: Prefill | None) -> None:
        """Report the outcome. Does not wait: a sidecar that does not listen learns nothing."""
        told = pb.EndPrefill(ttft_seconds=ttft_s, wait_seconds=wait_s, is_given_up=is_given_up)
        if computed is not None:
            told.computed.MergeFrom(prefill_to_message(computed))
        self._said.put(pb.PartialPrefillRequest(end=told))
        self._said.put(None)
        self._returns.soon(partial(_ended, self._is_over, self._stream, self._timeout_s))

    def close(self) -> None:
        """Take the call back, unless it has ended: the sidecar then holds nothing for it. Idempotent. A forked child
        leaves it to its parent."""
        self._said.put(None)
        stream = getattr(self, "_stream", None)
        if stream is not None:
            cancel(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Unplanned(Internal):
    """This prompt gets no plan: it is looked up like any other."""


class _Unknown(_Unplanned):
    """The sidecar is of a release without partial prefills."""


def _failure(error: grpc.RpcError) -> KVStoreError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return _Unknown("this sidecar knows no partial prefills")
    return translated(error)


def _contradiction(begin: pb.BeginPrefill, answer: pb.PartialPrefillResponse, plan: LoadPlan | None) -> str:
    """Return what no sidecar can say in answer to this beginning; empty: it said nothing of the kind."""
    found, first, count = answer.found, answer.chunk_first, answer.chunk_count
    asked = len(begin.query.digests) // DIGEST_BYTES
    if not first + count <= found.hit_count <= asked or (found.ticket and not count):
        return f"holds {count} chunks from {first} on of {found.hit_count} that it found of {asked}"
    if plan is None:
        return ""
    if not is_sound_plan(plan) or plan.token_count != begin.token_count:
        return f"planned {plan.token_count} tokens of {begin.token_count}, or has times that no plan has"
    return ""


def _read(answers: SimpleQueue[Any], is_over: threading.Event, stream: Any) -> None:
    """Read the sidecar's answers until the stream ends."""
    try:
        for message in stream:
            answers.put(message)
        answers.put(None)
    except grpc.RpcError as error:
        answers.put(error)
    except ValueError:  # the channel was closed before the stream began
        answers.put(None)
    finally:
        is_over.set()


def _ended(is_over: threading.Event, stream: PendingCall, timeout_s: float) -> None:
    """Wait until the sidecar has received the outcome; after ``timeout_s`` cancel the call."""
    if not is_over.wait(timeout_s):
        stream.cancel()


def begin(
    context: Context, prompt: Prompt, asked: Asked, rate: ComputeRate, link: TierRate | None
) -> PrefillCall | None:
    """Begin a partial prefill of a prompt's whole chunks; None: this sidecar's release has none, it contradicts itself,
    or no thread can be had. ``rate`` and ``link``: the client's measurements. Raises as ``PrefillCall``."""
    session, name = context.ready(prompt.spec)
    if not session.has_prefills:
        return None
    whole = prompt.token_count // prompt.spec.chunk_tokens
    message = pb.BeginPrefill(
        query=prompt.query(name, prompt.digests[:whole]), token_count=prompt.token_count,
        reusable_token_count=asked.reusable_tokens, step_tokens=asked.step_tokens,
        ways=[WAY_NUMBERS[way] for way in asked.ways],
        mode=MODE_NUMBERS[asked.mode], readers=asked.readers, with_places=session.maps_chunks,
    )  # fmt: skip
    message.request_class = CLASS_NUMBERS[asked.terms.request_class]
    if math.isfinite(asked.terms.deadline_s):
        message.deadline_seconds = asked.terms.deadline_s
    if rate.is_known:
        message.compute.MergeFrom(compute_to_message(rate))
    if link is not None:
        message.link.MergeFrom(link_to_message(link))
    try:
        return session.with_model(partial(PrefillCall, session, message, context.timeout_s), context.timeout_s)
    except _Unplanned as error:
        session.has_prefills = not isinstance(error, _Unknown)
        return None


def match_of_call(context: Context, prompt: Prompt, call: PrefillCall) -> Match:
    """Return the call's stored chunks as a lookup's match, with a ticket for those to load. Where all of them are
    loaded, the match includes the partial chunk behind them. Raises the error of the lookup for that chunk."""
    step, found = prompt.spec.chunk_tokens, call.answer.found
    first, count = call.answer.chunk_first, call.answer.chunk_count
    chunks = chunk_matches(found.runs, step, 0, prompt.token_count)
    if count == found.hit_count:
        prefix, ticket = with_tail(context, prompt, found, 1)
        return Match(prefix, chunks, ticket)
    digests = prompt.digests[first : first + count]
    ticket = None
    if found.ticket:
        ticket = pack_ticket(found.ticket, prompt.spec, digests, prompt.exactness, count * step, found.places)
    return Match(found.hit_count * step, chunks, ticket)
