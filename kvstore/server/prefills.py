"""PrefillService: one stream per partial prefill, and profiles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from kvstore.controller import Controller, Resident, Session
from kvstore.controller.prefills import PartialPrefills, PlannedPrefill, PlanRecord, PrefillEnd, PrefillRequest
from kvstore.controller.prefills.engines import EngineRate
from kvstore.controller.profiles import RegisteredProfiles
from kvstore.errors import InvalidRequest
from kvstore.planning import Pair, RequestClass, Terms
from kvstore.planning.profile import REUSES, Origin
from kvstore.server import render
from kvstore.server.rpc import Context
from kvstore.server.services import session_of
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire.plans import (
    CLASSES,
    MODE_NUMBERS,
    MODES,
    WAYS,
    compute_from_message,
    compute_to_message,
    deadline_of,
    link_from_message,
    plan_to_message,
    prefill_from_message,
    prefill_to_message,
)

PREFILL_S_MAX = 3600.0
"""Seconds that a stream is kept open at most."""


class PrefillService:
    """Begins, plans and ends the partial prefills of one tenant, and keeps its profiles."""

    def __init__(self, controller: Controller, prefills: PartialPrefills, profiles: RegisteredProfiles) -> None:
        self._controller = controller
        self._prefills = prefills
        self._profiles = profiles

    async def PartialPrefill(
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[prefill_pb2.PartialPrefillResponse]:
        """Give the plan, then wait until the client reports its measurements, or goes."""
        session, began = session_of(self._controller, context), requests.__aiter__()
        deadline = self._controller.deadline(context.time_remaining())
        with self._controller.stream(session):
            first = await _next(began, session, deadline.left_s)
            if first is None or first.WhichOneof("step") != "begin":
                raise InvalidRequest("a partial prefill begins with its begin step")
            planned = await self._prefills.begin(parse_begin(first.begin), deadline)
            try:
                ticket = planned.found.ticket if first.begin.with_places else b""
                yield _response(planned, self._controller.places(ticket) if ticket else ())
                last = await _next(began, session, PREFILL_S_MAX)
                if last is not None:
                    if last.WhichOneof("step") != "end":
                        raise InvalidRequest("a partial prefill that has begun can only end")
                    self._prefills.end(planned, _end(last.end))
            finally:
                self._prefills.drop(planned)

    async def RegisterProfile(
        self, request: prefill_pb2.RegisterProfileRequest, context: Context
    ) -> prefill_pb2.RegisterProfileResponse:
        """Keep a profile for the tenant's other clients."""
        session_of(self._controller, context)
        return prefill_pb2.RegisterProfileResponse(is_kept=self._profiles.register(request.profile))

    async def FindProfile(
        self, request: prefill_pb2.FindProfileRequest, context: Context
    ) -> prefill_pb2.FindProfileResponse:
        """Return a registered profile, or none."""
        session_of(self._controller, context)
        if request.reuse not in REUSES or request.provenance not in list(Origin):
            raise InvalidRequest(
                f"reuse {request.reuse!r:.40} or provenance {request.provenance!r:.40} is unknown here"
            )
        pair = Pair(request.receiver, request.sender or None, request.reuse, Origin(request.provenance))
        return prefill_pb2.FindProfileResponse(profile=self._profiles.find(pair))


async def _next(requests: AsyncIterator[Any], session: Session, timeout_s: float) -> Any:
    """Return the client's next message; None: it sends no more, sent none in time, or its session ended. Raises
    InvalidRequest for a message that could not be decoded."""
    if not session.is_open:
        return None
    try:
        async with asyncio.timeout(timeout_s) as limit:
            with session.with_its_end(partial(_expire, limit)):
                message = await anext(requests, None)
    except TimeoutError:
        return None
    if isinstance(message, InvalidRequest):
        raise message
    return message


def _expire(limit: asyncio.Timeout) -> None:
    """End a wait at once, as if its time were up; 0.0 has passed by every loop's clock."""
    if not limit.expired():
        limit.reschedule(0.0)


def parse_begin(message: prefill_pb2.BeginPrefill) -> PrefillRequest:
    """Return the message as a request. Ways that only a later release knows are left out. Raises InvalidRequest for a
    malformed message."""
    mode = MODES.get(message.mode)
    if mode is None:
        raise InvalidRequest(f"planning mode {message.mode} is unknown to this version")
    compute = compute_from_message(message.compute) if message.HasField("compute") else None
    link = link_from_message(message.link) if message.HasField("link") else None
    return PrefillRequest(
        query=render.parse_query(message.query),
        token_count=message.token_count,
        reusable_tokens=message.reusable_token_count,
        readers=message.readers or 1,
        step_tokens=message.step_tokens,
        ways=frozenset(WAYS[each] for each in message.ways if each in WAYS),
        mode=mode,
        compute=compute if compute is not None and compute.is_known and compute.is_sound else None,
        link=link if link is not None and link.is_sound else None,
        terms=Terms(
            deadline_s=deadline_of(message),
            request_class=CLASSES.get(message.request_class, RequestClass.INTERACTIVE),
        ),
    )


def _end(message: prefill_pb2.EndPrefill) -> PrefillEnd:
    computed = prefill_from_message(message.computed) if message.HasField("computed") else None
    return PrefillEnd(message.ttft_seconds, message.wait_seconds, message.is_given_up, computed)


def _response(planned: PlannedPrefill, places: Sequence[Resident]) -> prefill_pb2.PartialPrefillResponse:
    response = prefill_pb2.PartialPrefillResponse(
        found=render.render_lookup(planned.found, places=places), chunk_first=planned.chunk_first,
        chunk_count=planned.chunk_count,
    )  # fmt: skip
    if planned.plan is not None:
        response.plan.MergeFrom(plan_to_message(planned.plan))
    return response


def render_record(record: PlanRecord) -> admin_pb2.PlanEntry:
    """Return the message in which operators see a partial prefill."""
    message = admin_pb2.PlanEntry(
        number=record.number, began_seconds=record.began, fingerprint=record.fingerprint, model_id=record.model_id,
        step_tokens=record.step_tokens, mode=MODE_NUMBERS[record.mode], stored_token_count=record.stored_token_count,
        state=record.state,
    )  # fmt: skip
    if record.plan is not None:
        message.plan.MergeFrom(plan_to_message(record.plan))
    end = record.end
    if end is not None:
        told = prefill_pb2.EndPrefill(ttft_seconds=end.ttft_s, wait_seconds=end.wait_s, is_given_up=end.is_given_up)
        message.end.MergeFrom(told)
        if end.computed is not None:
            message.end.computed.MergeFrom(prefill_to_message(end.computed))
    return message


def render_engine(engine: EngineRate) -> admin_pb2.EngineRate:
    """Return the message in which all clients of a tenant may see an engine's rate."""
    rate = engine.rate
    return admin_pb2.EngineRate(
        fingerprint=engine.fingerprint, model_id=engine.model_id, step_tokens=engine.step_tokens,
        confidence=round(rate.confidence, 2),
        rate=compute_to_message(rate),
    )  # fmt: skip
