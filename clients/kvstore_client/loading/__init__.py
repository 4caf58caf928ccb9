"""Loading: what a client knows of speeds, and the plans it makes of that.

``Planner`` learns how fast bytes come from memory (copies, or the network) and how fast engines compute, asks the
sidecar how fast its tiers are, and plans. Needs no torch.
"""

from kvstore_client.loading.planner import MODES, Planner

__all__ = ["MODES", "Planner"]
