"""CacheBlend's loading controller, unchanged. A benchmark compares with it; plans do not use it."""

from __future__ import annotations

RATIO_LEAST = 0.15
"""CacheBlend's r*: its authors saw quality fall below this share of recomputed tokens."""


def cacheblend_ratio(layer_prefill_s: float, layer_load_s: float) -> float:
    """Return the share of tokens that can be computed again while a layer loads. Both times are of one layer of the
    whole context.

    Source: CacheBlend (EuroSys '25), the loading controller. It never falls back to a plain prefill."""
    return min(1.0, max(RATIO_LEAST, layer_load_s / layer_prefill_s))
