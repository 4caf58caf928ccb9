"""The gate: allows lossy reuse by this user's profiles, and checks its answers while it is in use.

`gate` permits and counts, `profiles` is the store of profiles, `exchange` shares them by the service, `drift` notices
when answers get worse than when they were profiled. `kvstore.planning` decides what a profile means. Needs no torch:
logits come in the caller's type.
"""

from kvstore_client.context import Context
from kvstore_client.gate.exchange import ProfileExchange
from kvstore_client.gate.gate import DRIFT_COUNTERS, Gate

__all__ = ["DRIFT_COUNTERS", "Gate", "connected"]


def connected(gate: Gate, context: Context) -> Gate:
    """Have a gate count in a client's counters, and exchange profiles with its service. A gate that a second client
    gets, too, exchanges none from then on: the clients may be of two tenants. Returns the gate."""
    counters = context.connection.counters
    is_others = gate.counters is not counters and gate.is_connected
    gate.counters, gate.is_connected = counters, True
    gate.exchange = None if is_others else ProfileExchange(context)
    return gate
