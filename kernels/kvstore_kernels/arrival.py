"""Arrival: stored strips become rows of the engine's cache. They are decoded and rotated to their new position; no
other row of the destination is touched.

A source is one plane (K or V) of one layer, [kv_heads, tokens, dim]; V is not rotated.
"""

from __future__ import annotations

import torch

from kvstore.errors import InvalidRequest
from kvstore_kernels import gpu
from kvstore_kernels.gpu.strips import launch_arrival, takes
from kvstore_kernels.rotary import Rotation, check_turn, turn_into


def arrive(source: torch.Tensor, target: torch.Tensor, *, turn: Rotation | None = None, scale: float = 1.0) -> None:
    """Write a plane into rows of a dense cache.

    Shapes: ``source`` and ``target`` [kv_heads, tokens, dim]; ``target`` is a view of the rows to write, of any
    strides and dtype. ``scale``: the factor by which the values of a scaled (fp8) source are multiplied.
    Cost: one copy; with a turn, as ``rotate``; on a GPU one launch, in both cases.
    Raises: InvalidRequest for shapes that differ.
    """
    if source.shape != target.shape:
        raise InvalidRequest(f"source has shape {tuple(source.shape)}, target {tuple(target.shape)}")
    if turn is not None:
        check_turn(source, turn)
    given = (source, target, None if turn is None else turn.cos)
    if gpu.serves(*given) and takes(source.dtype, target.dtype, turned=turn is not None, scaled=scale != 1.0):
        if gpu.attempt("arrival", lambda: launch_arrival(source, target, turn, scale)):
            gpu.tell_graphs([target])
            return
    with torch.no_grad():
        if turn is not None:
            turn_into(target, source, turn, scale)
        else:
            target.copy_(source if scale == 1.0 else source.float() * scale)
