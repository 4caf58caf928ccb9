"""The controllers that were published, as they were: to be measured against, not to be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RATIO_LEAST = 0.15
"""CacheBlend's r*: the share of tokens below which its authors saw quality fall."""


def cacheblend_ratio(layer_prefill_s: float, layer_load_s: float, least: float = RATIO_LEAST) -> float:
    """The share of tokens that can be computed again while a layer loads. Seconds of one layer of the whole context.

    Source: CacheBlend (EuroSys '25), the loading controller. It never falls back to a plain prefill."""
    return min(1.0, max(least, layer_load_s / layer_prefill_s))


def cacheblend_ttft_s(layer_prefill_s: float, layer_load_s: float, layer_count: int, suffix_s: float) -> float:
    """Its time to the first token: the first layer is computed for all tokens and loads nothing, then each layer's
    share is computed while the next loads. ``suffix_s``: all layers of what is not reused."""
    ratio = cacheblend_ratio(layer_prefill_s, layer_load_s)
    behind = (layer_count - 1) * max(layer_load_s, ratio * layer_prefill_s)
    return layer_prefill_s + behind + suffix_s


@dataclass(frozen=True)
class Device:
    """Somewhere to keep caches: what a layer of the context takes to load from it, and its price."""

    name: str
    layer_load_s: float
    price: float


def cacheblend_device(devices: Sequence[Device], layer_prefill_s: float, least: float = RATIO_LEAST) -> Device | None:
    """The cheapest device from which a layer loads no longer than r* of it is computed; None: none does.

    Source: as ``cacheblend_ratio``."""
    fast = [device for device in devices if device.layer_load_s <= least * layer_prefill_s]
    return min(fast, key=lambda device: device.price, default=None)


@dataclass(frozen=True)
class Group:
    """A point of DroidSpeak's profile: so many of the layers are computed again, with this quality."""

    computed_layers: int
    quality: float


def droidspeak_ttft_s(
    group: Group, layer_count: int, layer_prefill_s: float, layer_load_s: float, hidden_s: float = 0.0
) -> float:
    """E first, then the reused layers load while the group is computed: T = e + max(u load, g compute).

    Source: DroidSpeak (NSDI '26)."""
    reused = layer_count - group.computed_layers
    return hidden_s + max(reused * layer_load_s, group.computed_layers * layer_prefill_s)


def droidspeak_group(
    groups: Sequence[Group], slo_s: float, layer_count: int, layer_prefill_s: float, layer_load_s: float,
    hidden_s: float = 0.0,
) -> Group | None:  # fmt: skip
    """The best quality that meets the objective; None: no point does.

    Source: as ``droidspeak_ttft_s``."""

    def takes_s(group: Group) -> float:
        return droidspeak_ttft_s(group, layer_count, layer_prefill_s, layer_load_s, hidden_s)

    meeting = [group for group in groups if takes_s(group) <= slo_s]
    return max(meeting, key=lambda group: group.quality, default=None)
