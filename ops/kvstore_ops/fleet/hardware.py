"""Hardware: the speeds and capacities of a simulated fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.planning.loading import ComputeRate, TierRate
from kvstore.units import GIB


def _rate(bytes_per_s: float, latency_s: float = 0.0) -> TierRate:
    return TierRate(latency_s, 1 / bytes_per_s, 1.0, 1)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The hardware of a fleet with ``engines`` spread evenly over ``nodes``. Rates: ``compute`` of one engine; ``link``
    from a node's memory to one engine; ``device`` of a node, shared by its engines; ``shared`` of the tier that all
    nodes share, whose size is unlimited. ``token_bytes``: one token's cache in all ``layers``.

    The defaults are a model of 8 B parameters in bf16, on engines that compute 8,000 tokens a second at the beginning
    of a prompt; attention's cost follows from its operations."""

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
