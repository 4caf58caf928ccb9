"""The caller's tensors as a destination of a fetch, checked before anything is sent.

The tensors of a model are alike. They are checked together in a few steps, because a step for each of them costs more
than the bytes of a small fetch. Where that does not prove them right, each is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore_client.arrays import Layer, Tensor, is_tensor, settle_device, torch_module
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.halves import checked_layers, checked_planes
from kvstore_client.overlap import ByteGeometry, check_targets

_looks = attrgetter("shape", "dtype", "layout", "is_cpu")


class Given(NamedTuple):
    """Checked planes, per requested layer. ``rooms``: per layer, the number of tokens that it has room for.
    ``are_tensors``: True when no plane is a numpy array."""

    layers: Sequence[Sequence[Tensor]]
    rooms: Sequence[int]
    are_tensors: bool

    def check_room(self, token_count: int) -> None:
        """Raise InvalidRequest where a layer has no room for so many tokens."""
        if token_count > min(self.rooms, default=token_count):
            number, room = next(each for each in enumerate(self.rooms) if each[1] < token_count)
            raise InvalidRequest(f"into[{number}] has room for {room} tokens, {token_count} are stored")


def given_planes(wanted: Wanted, into: Sequence[Layer] | None) -> Given | None:
    """Return the planes of ``into``, per requested layer; None for None. Raises InvalidRequest naming the plane that is
    wrong."""
    if into is None:
        return None
    if not isinstance(into, Sequence) or len(into) != len(wanted.layers):
        found = len(into) if isinstance(into, Sequence) else type(into).__name__
        entry = "E" if wanted.spec.keeps_e else "(K, V)"
        raise InvalidRequest(f"into must be one {entry} per layer, {len(wanted.layers)} of them, not {found}")
    return _alike(wanted, into) or _each(wanted, into)


def _each(wanted: Wanted, into: Sequence[Layer]) -> Given:
    layers = checked_layers(wanted.spec, wanted.layers, into, "into", wanted.head_count)
    check_targets(layers, "into")
    flat = list(chain.from_iterable(layers))
    settle_device(flat)
    rooms = [min(plane.shape[1] for plane in planes) for planes in layers]
    return Given(layers, rooms, all(map(is_tensor, flat)))


def _alike(wanted: Wanted, into: Sequence[Layer]) -> Given | None:
    """Return the planes where all K, and all V, are plain CPU tensors of one shape, dtype and stride, and no two of
    them meet. None where this does not tell that they are right. The first layer is checked for all."""
    torch = torch_module()
    if torch is None or wanted.spec.keeps_e or len(wanted.kept) != 1:
        return None
    if not set(map(type, into)) <= {tuple, list} or set(map(len, into)) != {2}:
        return None
    flat = list(chain.from_iterable(into))
    if set(map(type, flat)) != {torch.Tensor}:
        return None
    sides = flat[::2], flat[1::2]
    if any(len(set(map(_looks, side))) != 1 for side in sides) or not flat[0].is_cpu or not flat[1].is_cpu:
        return None
    if any(map(torch.Tensor.is_neg, flat)):  # conjugates have complex items, which the check of the first layer finds
        return None
    checked_planes(wanted.spec, wanted.layers[0], into[0], "into[0]", None, wanted.head_count)
    return Given(into, [flat[0].shape[1]] * len(into), True) if _are_apart(sides) else None


def _are_apart(sides: tuple[Sequence[Tensor], ...]) -> bool:
    """Return True when each of these tensors ends before the next one begins, and none has items that share memory.
    The tensors of one side have one shape and dtype."""
    spans: list[tuple[int, int]] = []
    for side in sides:
        strides = set(map(type(side[0]).stride, side))
        first = side[0]
        geometry = ByteGeometry.of(first.shape, first.stride(), first.element_size())
        if len(strides) != 1 or geometry.repeats:
            return False
        count = geometry.byte_count
        spans += [(start, start + count) for start in map(type(first).data_ptr, side)]
    spans.sort()
    return all(one[1] <= other[0] for one, other in pairwise(spans))
