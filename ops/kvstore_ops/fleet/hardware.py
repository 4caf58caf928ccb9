"""Hardware: how fast everything in a simulated fleet is, and how much fits."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.planning.loading import ComputeRate, TierRate
from kvstore.spec import Tier

GIB = 1 << 30


def _rate(bytes_per_s: float, latency_s: float = 0.0) -> TierRate:
    return TierRate(latency_s, 1 / bytes_per_s, 1.0, 1)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """``engines`` on ``nodes``, as evenly as it goes. ``compute``: of one engine; ``link``: from a node's memory to one
    engine; ``device``: of a node, shared by its engines; ``shared``: of the tier that all nodes share. ``token_bytes``:
    of one token's cache in all ``layers``. The shared tier is as large as it needs to be.

    By default a model of 8 B parameters in bf16, on engines that compute 8,000 tokens a second at the beginning of a
    prompt; attention's share is that of its operations."""

    engines: int = 8
    nodes: int = 2
    compute: ComputeRate = field(default_factory=lambda: ComputeRate(0.01, 1 / 8000, 3.3e-5 / 8000, 1.0, 1.0, 1))
    link: TierRate = field(default_factory=lambda: _rate(12e9, 0.0005))
    device: TierRate = field(default_factory=lambda: _rate(3e9, 0.0005))
    shared: TierRate = field(default_factory=lambda: _rate(1.25e9, 0.01))
    memory_bytes: int = 64 * GIB
    device_bytes: int = 1024 * GIB
    token_bytes: int = 131072
    layers: int = 32
    block_tokens: int = 512

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    def rate_of(self, tier: Tier) -> TierRate:
        """What a tier below memory can do."""
        return self.device if tier is Tier.NVME else self.shared
