"""The compute time that tokens from the cache saved."""

from __future__ import annotations

from dataclasses import replace

from kvstore.planning.loading.compute import ComputeRate


def saved_seconds(token_count: float, rate: ComputeRate) -> float:
    """Return the seconds that computing a fetched prefix of ``token_count`` tokens would have taken; 0 while no prefill
    of the model was measured. The cost per forward pass is left out: the tokens behind the prefix need a pass in any
    case. The time of the fetch is not subtracted."""
    return replace(rate, pass_s=0.0).seconds(token_count)
