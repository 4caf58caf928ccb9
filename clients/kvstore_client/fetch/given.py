"""The caller's tensors as a destination of a fetch, checked before anything is sent.

The tensors of a model are alike. They are checked together in a few steps, because a step for each of them costs more
than the bytes of a small fetch. Where that does not prove them right, each is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, cycle, pairwise
from operator import attrgetter
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore_client.arrays import Layer, Tensor, is_tensor, settle_device, torch_module
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.halves import checked_layers, checked_planes
from kvstore_client.overlap import ByteGeometry, check_targets

_shape, _dtype, _layout, _is_cpu = map(attrgetter, ("shape", "dtype", "layout", "is_cpu"))


class Given(NamedTuple):
    """Checked planes, per requested layer. ``rooms``: per layer, the number of tokens that it has room for.
    ``are_tensors``: True when no plane is a numpy array. ``sides``: all K, and all V, where those of each side have one
    shape and one stride; else empty."""

    layers: Sequence[Sequence[Tensor]]
    rooms: Sequence[int]
    are_tensors: bool
    sides: Sequence[Sequence[Tensor]] = ()

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
    if not all(map(_is_cpu, flat)) or not _is_one(map(_layout, flat)) or not _is_one(map(_dtype, flat)):
        return None
    if not all(_is_one(map(_shape, side)) for side in sides):
        return None
    if any(map(torch.Tensor.is_neg, flat)):  # conjugates have complex items, which the check of the first layer finds
        return None
    checked_planes(wanted.spec, wanted.layers[0], into[0], "into[0]", None, wanted.head_count)
    if not all(_is_one(map(torch.Tensor.stride, side)) for side in sides) or not _are_apart(flat):
        return None
    return Given(into, [flat[0].shape[1]] * len(into), True, sides)


def _is_one(values: Iterable[object]) -> bool:
    """Return True when all values, of which there is one at least, are the same. Faster than a set of them."""
    known = list(values)
    return known.count(known[0]) == len(known)


def _are_apart(flat: Sequence[Tensor]) -> bool:
    """Return True when each of these tensors ends before the next one begins, and none has items that share memory. K
    and V in turn; those of each side have one shape, dtype and stride."""
    geometries = [ByteGeometry.of(each.shape, each.stride(), each.element_size()) for each in flat[:2]]
    if any(geometry.repeats for geometry in geometries):
        return False
    starts = map(type(flat[0]).data_ptr, flat)
    spans = sorted(zip(starts, cycle(geometry.byte_count for geometry in geometries)))
    return all(start + count <= after for (start, count), (after, _) in pairwise(spans))
