"""Loading: measures speeds, and plans whether to load a stored prefix or to compute it.

``Planner`` learns how fast bytes come from memory (copies, or the network) and how fast engines compute, asks the
sidecar how fast its tiers are, and plans. ``probe`` measures tiers that plans leave out, ``patience`` gives up loads
that turn out slower than planned. Needs no torch.
"""

from kvstore_client.loading.planner import GIVEN_UP, Planner

__all__ = ["GIVEN_UP", "Planner"]
