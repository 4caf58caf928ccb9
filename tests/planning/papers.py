"""The published loading controllers, unchanged. Tests compare plans with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_ops.fleet.papers import RATIO_LEAST, cacheblend_ratio


def cacheblend_ttft_s(layer_prefill_s: float, layer_load_s: float, layer_count: int, suffix_s: float) -> float:
    """Return CacheBlend's seconds to the first token: the first layer is computed for all tokens and loads nothing,
    then each layer's share is computed while the next layer loads. ``suffix_s``: the time of all layers over the tokens
    that are not reused."""
    ratio = cacheblend_ratio(layer_prefill_s, layer_load_s)
    behind = (layer_count - 1) * max(layer_load_s, ratio * layer_prefill_s)
    return layer_prefill_s + behind + suffix_s


@dataclass(frozen=True)
class Device:
    """A device that stores caches: the seconds that loading one layer of the context takes, and its price."""

    name: str
    layer_load_s: float
    price: float


def cacheblend_device(devices: Sequence[Device], layer_prefill_s: float, least: float = RATIO_LEAST) -> Device | None:
    """Return the cheapest device from which loading a layer takes no longer than computing the share ``least`` of it;
    None: there is no such device.

    Source: as ``cacheblend_ratio``."""
    fast = [device for device in devices if device.layer_load_s <= least * layer_prefill_s]
    return min(fast, key=lambda device: device.price, default=None)


@dataclass(frozen=True)
class Group:
    """A point of DroidSpeak's profile: the number of layers that are computed again, and the quality."""

    computed_layers: int
    quality: float


def droidspeak_ttft_s(
    group: Group, layer_count: int, layer_prefill_s: float, layer_load_s: float, hidden_s: float = 0.0
) -> float:
    """Return DroidSpeak's seconds to the first token, T = e + max(u load, g compute): E loads first, then the u reused
    layers load while the g layers of the group are computed.

    Source: DroidSpeak (NSDI '26)."""
    reused = layer_count - group.computed_layers
    return hidden_s + max(reused * layer_load_s, group.computed_layers * layer_prefill_s)


def droidspeak_group(
    groups: Sequence[Group], slo_s: float, layer_count: int, layer_prefill_s: float, layer_load_s: float,
    hidden_s: float = 0.0,
) -> Group | None:  # fmt: skip
    """Return the point of the best quality that meets the objective ``slo_s``; None: no point does.

    Source: as ``droidspeak_ttft_s``."""

    def takes_s(group: Group) -> float:
        return droidspeak_ttft_s(group, layer_count, layer_prefill_s, layer_load_s, hidden_s)

    meeting = [group for group in groups if takes_s(group) <= slo_s]
    return max(meeting, key=lambda group: group.quality, default=None)
