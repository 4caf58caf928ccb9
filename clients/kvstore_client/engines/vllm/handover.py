"""A prompt that one engine computes and another one answers: the second waits a while for what the first keeps.

The first engine's answer comes when it has begun to keep the prompt. A router passes what that answer says on to the
second engine, which then looks again, for a bounded time, until all of it can be loaded.
"""

from __future__ import annotations

from typing import Any

from kvstore_client.engines.vllm.objects import EngineRequest

ASKED = "do_remote_decode"
"""The key of a request's ``kv_transfer_params`` by which vLLM's own routers ask the engine that computes a prompt."""
PREFILLED = "kvstore_prefilled"
"""The key by which that engine answers: the number of leading tokens that it keeps, or is about to."""
WAIT_S_MAX = 2.0
"""The most seconds that a request waits for them, or as long as computing them takes, where that is known and less.
Then what there is is loaded, and the rest computed."""
PART_S_MAX = 0.05
"""The most seconds that it waits for a part of a chunk, once it has the chunks before: that stays on the node of the
first engine, where it comes at once."""
PAUSE_S, PAUSE_S_MAX = 0.01, WAIT_S_MAX / 2
"""Seconds from one look to the next, and where many requests with long prompts wait."""
LOOKS_SHARE = 0.1
"""The share of the engine's loop that looks may take, as long as that needs no longer pauses: to name a long prompt
takes milliseconds."""


def pause_s(look_s: float, waiting_count: int) -> float:
    """Return the seconds to the next look where each takes ``look_s`` of the engine's loop, and so many requests
    look."""
    return min(max(PAUSE_S, look_s * waiting_count / LOOKS_SHARE), PAUSE_S_MAX)


def handed_over(request: EngineRequest, kept: int) -> dict[str, object] | None:
    """Return what the engine's answer to a request says besides tokens; None where the request does not ask. The key is
    ours alone: a MultiConnector puts the answers of several connectors together."""
    return {PREFILLED: kept} if kept and _given(request).get(ASKED) else None


def prefilled_tokens(request: EngineRequest) -> int:
    """Return the number of leading tokens that another engine keeps, or is about to; 0 where nobody says so."""
    count = _given(request).get(PREFILLED, 0)
    return count if type(count) is int and count > 0 else 0


def _given(request: EngineRequest) -> dict[str, Any]:
    given: Any = getattr(request, "kv_transfer_params", None)
    return given if isinstance(given, dict) else {}
