"""The caller's tensors as a destination of a fetch, checked before anything is sent.

The tensors of a model are alike. They are checked together in a few steps, because a step for each of them costs more
than the bytes of a small fetch. Where that does not prove them right, each is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore_client.arrays import Layer, Tensor, dtype_of, is_tensor, settle_device, torch_module
from kvstore_client.fetch.fused import Planes
from kvstore_client.fetch.in_memory import alike, placed
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.halves import checked_layers
from kvstore_client.overlap import ByteGeometry, check_targets


class Given(NamedTuple):
    """Checked planes, per requested layer. ``rooms``: per layer, the number of tokens that it has room for.
    ``are_tensors``: True when no plane is a numpy array. ``alike``: all K, and all V, where those of each side have one
    shape and one stride; else None."""

    layers: Sequence[Sequence[Tensor]]
    rooms: Sequence[int]
    are_tensors: bool
    alike: Planes | None = None

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
    if (type(into) is not list and not isinstance(into, Sequence)) or len(into) != len(wanted.layers):
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
    torch, kept = torch_module(), wanted.kept_by_all
    found = alike(into, 2) if torch is not None and kept is not None else None
    if found is None:
        return None
    sides = found.columns
    k, v, dtype = sides[0][0], sides[1][0], dtype_of(wanted.spec.cache_dtype)
    if type(k) is not torch.Tensor or k.dtype != dtype or v.dtype != dtype:
        return None
    distance = _distance(kept, k.shape, v.shape, k.stride(), v.stride(), k.element_size())
    if distance is None or found.distance < distance:
        return None
    places = placed(found)
    return Given(into, [k.shape[1]] * len(into), True, Planes(sides, placed=places)) if places else None


@lru_cache(maxsize=256)
def _distance(
    kept: tuple[int, tuple[int, ...]], k_shape: Sequence[int], v_shape: Sequence[int], k_steps: tuple[int, ...],
    v_steps: tuple[int, ...], item_size: int,
) -> int | None:  # fmt: skip
    """Return how many bytes behind the one before each tensor must begin, so that no two of them meet: those of the
    larger of K and V. None where these do not have the shapes of what a layer keeps (``kept``: heads, and the dims of K
    and V), or have items that share memory. Cached: the planes of a model are alike."""
    heads, (k_dim, v_dim) = kept
    room = k_shape[1] if len(k_shape) > 1 else 0
    k, v = ByteGeometry.of(k_shape, k_steps, item_size), ByteGeometry.of(v_shape, v_steps, item_size)
    if (k_shape, v_shape) != ((heads, room, k_dim), (heads, room, v_dim)) or k.repeats or v.repeats:
        return None
    return max(k.byte_count, v.byte_count)
