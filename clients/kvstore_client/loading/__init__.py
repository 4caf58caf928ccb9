"""Loading: what a client knows of speeds, and the plans it makes of that.

``Planner`` learns how fast bytes come from memory (copies, or the network) and how fast engines compute, asks the
sidecar how fast its tiers are, and plans. ``probe`` measures what plans leave out, ``patience`` gives up loads that
plans were wrong about. Needs no torch.
"""

from kvstore_client.loading.planner import GIVEN_UP, MODES, Planner

__all__ = ["GIVEN_UP", "MODES", "Planner"]
