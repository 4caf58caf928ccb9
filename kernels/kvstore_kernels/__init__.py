"""Kernels of reuse and recompute on the engine's tensors: arrival, deviation and selection, attention of
selected rows. Each has a plain torch path, which is the reference and runs anywhere; on a GPU, `gpu` takes its place.

Planes are [heads, tokens, dim], one sequence; positions and rows int64. Arithmetic is fp32, rounded once to the
destination's dtype. No loop runs over tokens or heads; the docstrings give the size of temporary blocks.
"""

from kvstore_kernels.arrival import arrive
from kvstore_kernels.attention import attend, attend_with_mass
from kvstore_kernels.deviation import Metric, deviation_of
from kvstore_kernels.rotary import Rotary, Rotation, rotary_of, rotate, rotation
from kvstore_kernels.selection import Selector, gradual_ratios, highest, row_count, scores_of
from kvstore_kernels.strips import Moves, arrive_strips, gather_strips, slots_of

__all__ = [
    "Metric",
    "Moves",
    "Rotary",
    "Rotation",
    "Selector",
    "arrive",
    "arrive_strips",
    "attend",
    "attend_with_mass",
    "deviation_of",
    "gather_strips",
    "gradual_ratios",
    "highest",
    "rotary_of",
    "rotate",
    "rotation",
    "row_count",
    "scores_of",
    "slots_of",
]
