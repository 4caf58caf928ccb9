"""The gate: what lets lossy reuse through, by the profiles of this user, and watches it while it is in use.

`gate` asks and counts, `profiles` is where profiles lie, `drift` notices that answers are no longer what they were when
they were profiled. What a profile means is decided in `kvstore.planning`. Needs no torch: logits come as they are.
"""

from kvstore_client.gate.gate import DRIFT_COUNTERS, Gate

__all__ = ["DRIFT_COUNTERS", "Gate"]
