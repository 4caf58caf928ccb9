"""The compute time that tokens from the cache saved."""

from __future__ import annotations

from kvstore.planning.loading.compute import ComputeRate


def saved_seconds(token_count: float, rate: ComputeRate) -> float:
    """Return the seconds that computing a fetched prefix of ``token_count`` tokens would have taken; 0 while no prefill
    of the model was measured. The cost per forward pass is left out: the tokens behind the prefix need a pass in any
    case. The time of the fetch is not subtracted."""
    pair_count = token_count * token_count / 2
    return rate.load * (rate.token_s * token_count + rate.pair_s * pair_count)
