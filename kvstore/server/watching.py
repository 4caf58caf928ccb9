"""Events as messages."""

from __future__ import annotations

from kvstore.catalog import Event, EventBatch
from kvstore.spec import EventKind
from kvstore.v1 import cache_pb2 as pb


def render_news(news: EventBatch) -> pb.WatchResponse:
    """What happened, and after it the gap if there is one."""
    events = [_event(each) for each in news.events]
    if news.lost_count:
        gap = pb.ChunkEvent(sequence=news.sequence, kind=EventKind.GAP, lost_count=news.lost_count)  # type: ignore[arg-type]
        events.append(gap)
    return pb.WatchResponse(events=events)


def _event(event: Event) -> pb.ChunkEvent:
    space = event.space
    return pb.ChunkEvent(
        sequence=event.sequence,
        kind=event.kind,  # type: ignore[arg-type]
        fingerprint=space.fingerprint,
        model_id=space.model_spec.model_id if space.model_spec is not None else "",
        digest=event.digest,
        parent=event.parent,
        token_count=event.token_count,
        tier=event.tier,  # type: ignore[arg-type]
        reason=event.reason,  # type: ignore[arg-type]
    )
