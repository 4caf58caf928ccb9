"""One layer of a cache, as callers pass it: (K, V), or E where a spec keeps E in the place of KV."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore_client.arrays import Layer, Tensor, checked, kind_of


def plane_shapes(spec: ModelSpec, layer: int, token_count: int, heads: int | None = None) -> list[tuple[int, int, int]]:
    """Return [heads, tokens, dim] of each plane of a layer: K and V, or E. ``heads``: number of kv heads (None:
    all)."""
    kept, dims = spec.kept(layer)
    count = kept if heads is None or spec.keeps_e else heads
    return [(count, token_count, dim) for dim in dims]


def checked_planes(
    spec: ModelSpec, layer: int, given: Layer, name: str, token_count: int | None = None, heads: int | None = None
) -> list[Tensor]:
    """Return a layer's planes, each [heads, tokens, dim]. ``token_count`` None: take the layer's own. Raises
    InvalidRequest naming the plane whose type, shape or dtype is wrong."""
    if spec.keeps_e:
        count = _token_count(given, 2, 0) if token_count is None else token_count
        e = checked(given, (count, spec.hidden_size), spec.hidden_dtype, f"{name} (E)")
        return [e[None]]
    if not isinstance(given, Sequence) or len(given) != 2:
        raise InvalidRequest(f"{name} must be a pair (K, V), not {type(given).__name__}")
    count = _token_count(given[0], 3, 1) if token_count is None else token_count
    shapes = plane_shapes(spec, layer, count, heads)
    return [
        checked(plane, shape, spec.cache_dtype, f"{name}[{number}] ({what})")
        for number, (plane, shape, what) in enumerate(zip(given, shapes, "KV", strict=True))
    ]


def checked_layers(
    spec: ModelSpec, layers: Sequence[int], given: Sequence[Layer], name: str, *, places: Sequence[int],
    heads: int | None = None, token_count: int | None = None,
) -> list[list[Tensor]]:  # fmt: skip
    """Return the planes of each layer, as ``checked_planes`` does; ``places``: where in ``given`` each layer is. The
    planes of a model are alike: after one correct layer, the next layers of the same kind need no check."""
    right: object = None
    planes: list[list[Tensor]] = []
    for place, layer in zip(places, layers, strict=True):
        entry = given[place]
        kind = _kind(spec, layer, entry)
        if kind is not None and kind == right:
            planes.append(list(entry))
            continue
        planes.append(checked_planes(spec, layer, entry, f"{name}[{place}]", token_count, heads))
        right = kind
    return planes


def _kind(spec: ModelSpec, layer: int, given: Layer) -> object:
    """Return everything that decides whether a layer is correct; None where only a full check tells."""
    if spec.keeps_e or type(given) not in (tuple, list) or len(given) != 2:
        return None
    first, second = kind_of(given[0]), kind_of(given[1])
    return None if first is None or second is None else (spec.kept(layer), first, second)


def shown(spec: ModelSpec, planes: Sequence[Tensor]) -> Layer:
    """Return a layer's planes in the caller's form: (K, V), or E."""
    return planes[0][0] if spec.keeps_e else tuple(planes)


def _token_count(plane: Tensor, axes: int, axis: int) -> int:
    shape = getattr(plane, "shape", ())
    return int(shape[axis]) if len(shape) == axes else 0
