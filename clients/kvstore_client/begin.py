"""How a client begins."""

from __future__ import annotations

from kvstore_client.client import DEFAULT_TIMEOUT_S, Client
from kvstore_client.planes.place import TLS, place_of


def connect(
    address: str | None = None, *, token: str | None = None, tls: TLS | bool | None = None, required: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S, planning: str = "off",
) -> Client:  # fmt: skip
    """A client of the sidecar at ``address``: ``unix:///path/kvstore.sock`` (default: the user's own), whose bytes go
    through shared memory, or ``HOST:PORT``, whose bytes travel with the calls; that needs a ``token`` (default:
    $KVSTORE_TOKEN), and ``tls`` unless it is this host (True: signed by whom the system trusts). ``client.plane``
    says which.

    ``planning``: whether what is stored is loaded only where that is faster than computing it: "off", "observe" or
    "on" (docs/controller.md).
    ``required=False``: an engine that must start without its sidecar gets a client that misses until it appears.
    Raises: Unavailable naming the address when nobody answers; Unauthenticated for a wrong token; InvalidRequest for
    another kind of address.
    """
    client = Client(place_of(address, token, tls), timeout_s=timeout_s)
    client.planner.mode = planning
    if required:
        try:
            client.connect_now()
        except BaseException:
            client.close()
            raise
    return client
