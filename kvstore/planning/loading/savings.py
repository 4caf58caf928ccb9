"""Estimates the compute time that the cache saved."""

from __future__ import annotations

from kvstore.planning.loading.compute import ComputeRate


def saved_seconds(token_count: float, rate: ComputeRate) -> float:
    """Return the seconds in which an engine would have computed a prefix of so many tokens that it fetched; 0 while no
    prefill of the model was measured. Forward passes are not counted: what stands behind the prefix takes one all the
    same. What the fetch took is not taken off."""
    pair_count = token_count * token_count / 2
    return rate.load * (rate.token_s * token_count + rate.pair_s * pair_count)
