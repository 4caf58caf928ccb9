"""Connects a client to its sidecar."""

from __future__ import annotations

from kvstore.errors import InvalidRequest
from kvstore_client.client import DEFAULT_TIMEOUT_S, Client
from kvstore_client.planes.place import TLS, place_of

TIMEOUT_S_MAX = 86400.0


def connect(
    address: str | None = None, *, token: str | None = None, tls: TLS | bool | None = None, required: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S, planning: str = "off",
) -> Client:  # fmt: skip
    """Return a client of the sidecar at ``address``. ``unix:///path/kvstore.sock`` (default: the user's own) moves
    bytes through shared memory. ``HOST:PORT`` sends them with the calls; it needs a ``token`` (default:
    $KVSTORE_TOKEN), and ``tls`` unless it is this host (True: trust the system's certificate authorities).
    ``client.plane`` says which is used.

    ``planning``: load stored chunks only where that is faster than computing them: "off", "observe" or "on"
    (docs/controller.md). ``required=False``: for an engine that must start without its sidecar; the client misses until
    the sidecar appears. ``timeout_s``: the longest wait for an answer of the sidecar, before a call misses or fails.
    Raises: Unavailable naming the address when nobody answers; Unauthenticated for a wrong token; InvalidRequest for
    another kind of address, and for a timeout that is no wait.
    """
    if not 0.0 < timeout_s <= TIMEOUT_S_MAX:
        raise InvalidRequest(f"timeout_s {timeout_s}: use more than 0 s, and {TIMEOUT_S_MAX:,.0f} s at most")
    client = Client(place_of(address, token, tls), timeout_s=timeout_s)
    try:
        client.planner.mode = planning
        if required:
            client.connect_now()
    except BaseException:
        client.close()
        raise
    return client
