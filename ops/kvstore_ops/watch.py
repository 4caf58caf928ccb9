"""``kvstore watch``: events as lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

from kvstore_client import ChunkEvent, EventKind

from kvstore_ops.operators.harmless import plain
from kvstore_ops.tier_words import tier_words


def follow(events: Iterable[ChunkEvent], count: int, *, as_json: bool) -> None:
    """Print each event as it comes, ``count`` of them (0: all). An interrupt ends it, and is raised where events of
    ``count`` have not come."""
    try:
        for event in islice(events, count or None):
            print(json.dumps(as_dict(event)) if as_json else as_line(event), flush=True)
    except KeyboardInterrupt:
        if count:
            raise


def as_dict(event: ChunkEvent) -> dict[str, Any]:
    """Return the event as plain values: names in lower case, digests in hex."""
    return {
        "sequence": event.sequence,
        "kind": event.kind.name.lower(),
        "model_id": event.model_id,
        "fingerprint": event.fingerprint.hex(),
        "digest": event.digest.hex(),
        "parent": event.parent.hex(),
        "token_count": event.token_count,
        "tier": event.tier.name.lower(),
        "reason": event.reason.name.lower(),
        "lost_count": event.lost_count,
    }


def as_line(event: ChunkEvent) -> str:
    """Return the event as a line for people: short digests, and the reason of a removal at the end."""
    if event.kind is EventKind.GAP:
        return f"{event.sequence:>8} gap      {event.lost_count} events were lost: this reader was too slow"
    tier = tier_words(event.tier.name.lower())
    what = f"{event.sequence:>8} {event.kind.name.lower():<8} {tier:<6} {event.token_count:>6} tokens"
    reason = f" ({event.reason.name.lower()})" if event.reason else ""
    return f"{what} {event.digest.hex()[:16]} after {event.parent.hex()[:16]} {plain(event.model_id) or '-'}{reason}"
