"""The caller's tensors as a destination of a fetch, checked before anything is sent.

The tensors of a model are alike. They are checked together in a few steps, because a step for each of them costs more
than the bytes of a small fetch. Where that does not prove them right, each is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, sub
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore_client.arrays import Layer, Tensor, dtype_of, is_tensor, settle_device, torch_module
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.halves import checked_layers, plane_shapes
from kvstore_client.overlap import ByteGeometry, check_targets

_shape, _dtype, _is_cpu = map(attrgetter, ("shape", "dtype", "is_cpu"))


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
    places = range(len(into))
    layers = checked_layers(wanted.spec, wanted.layers, into, "into", places=places, heads=wanted.head_count)
    check_targets(layers, "into")
    flat = list(chain.from_iterable(layers))
    settle_device(flat)
    rooms = [min(plane.shape[1] for plane in planes) for planes in layers]
    return Given(layers, rooms, all(map(is_tensor, flat)))


def _alike(wanted: Wanted, into: Sequence[Layer]) -> Given | None:
    """Return the planes where all K, and all V, are plain CPU tensors of the right shape and dtype and of one stride,
    and no two of them meet. None where this does not tell that they are right."""
    torch = torch_module()
    if torch is None or wanted.spec.keeps_e or len(wanted.kept) != 1:
        return None
    if not set(map(type, into)) <= {tuple, list} or set(map(len, into)) != {2}:
        return None
    flat = list(chain.from_iterable(into))
    if set(map(type, flat)) != {torch.Tensor} or not all(map(_is_cpu, flat)):
        return None
    dtypes = list(map(_dtype, flat))
    if dtypes.count(dtype_of(wanted.spec.cache_dtype)) != len(flat) or any(map(torch.Tensor.is_neg, flat)):
        return None  # conjugates have complex items
    sides = flat[::2], flat[1::2]
    try:
        room = flat[0].shape[1]
        shapes = plane_shapes(wanted.spec, wanted.layers[0], room, wanted.head_count)
        if not all(_are(side, shape) for side, shape in zip(sides, shapes, strict=True)) or not _are_apart(flat):
            return None
    except (RuntimeError, IndexError):  # one has no strides, no memory of its own, or one axis only
        return None
    return Given(into, [room] * len(into), True, sides)


def _are(planes: Sequence[Tensor], shape: tuple[int, ...]) -> bool:
    """Return True when all planes have this shape, and all the stride of the first."""
    strides = list(map(type(planes[0]).stride, planes))
    return list(map(_shape, planes)).count(shape) == len(planes) == strides.count(strides[0])


def _are_apart(flat: Sequence[Tensor]) -> bool:
    """Return True when none of these tensors has items that share memory, and each begins at least as many bytes behind
    the one before as the larger of K and V takes. K and V in turn; those of each side have one shape, dtype and
    stride."""
    geometries = [ByteGeometry.of(each.shape, each.stride(), each.element_size()) for each in flat[:2]]
    if any(geometry.repeats for geometry in geometries):
        return False
    starts = sorted(map(type(flat[0]).data_ptr, flat))
    if not starts[0]:
        return False  # it has no memory
    return bool(min(map(sub, starts[1:], starts)) >= max(geometry.byte_count for geometry in geometries))
