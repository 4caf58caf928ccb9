"""The caller's tensors, as the source of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from kvstore_copies import Blocks, batch_of, is_compiled
from numpy.typing import NDArray

from kvstore.chunk import slab_parts
from kvstore.errors import InvalidRequest
from kvstore.seams.memory import Bytes
from kvstore.spec import Exactness, ModelSpec
from kvstore_client.arrays import Layer, Tensor, checked, settle_device, torch_module
from kvstore_client.copying import calls_of, copy, plainly, plane_run, raw
from kvstore_client.cuda import lanes
from kvstore_client.cuda.planes import GpuPlanes
from kvstore_client.cuda.storing import stored_from
from kvstore_client.derived import check_exact
from kvstore_client.fetch.fused import plane_geometry, strip_arrays, token_runs, views_of
from kvstore_client.fetch.in_memory import placed_planes
from kvstore_client.halves import checked_layers
from kvstore_client.planes.store import Steps, Unit
from kvstore_client.prompt import EXACT, Prompt


@dataclass(frozen=True)
class Tensors:
    """The caller's tensors, checked. ``planes[part]`` has per slab of the part's layout its (K, V) or (E,)."""

    spec: ModelSpec
    token_count: int
    hidden_layers: tuple[int, ...]
    planes: list[list[tuple[Tensor, ...]]]

    @staticmethod
    def of(prompt: Prompt, kv: Sequence[Layer], hidden: Mapping[int, Tensor] | None) -> Tensors:
        """Check the caller's tensors. Raises InvalidRequest naming the argument whose type, shape or dtype is wrong,
        and for a derived cache in an exact store."""
        spec, token_count = prompt.spec, prompt.token_count
        if prompt.exactness == EXACT and getattr(kv, "exactness", Exactness.EXACT) is not Exactness.EXACT:
            raise InvalidRequest(
                "kv was built on a cache that was not exact: store it with exactness=Exactness.DERIVED"
            )
        if not isinstance(kv, Sequence) or len(kv) != spec.layer_count:
            found = len(kv) if isinstance(kv, Sequence) else type(kv).__name__
            entry = "E" if spec.keeps_e else "(K, V)"
            raise InvalidRequest(f"kv must be one {entry} per layer, {spec.layer_count} of them, not {found}")
        if hidden and spec.keeps_e:
            raise InvalidRequest("hidden: this spec keeps E of every layer as its cache (keeps_e): leave it out")
        is_claimed = prompt.is_claimed or prompt.exactness != EXACT
        layers = spec.slab_layers
        given = checked_layers(spec, layers, kv, "kv", places=layers, token_count=token_count)
        if not is_claimed:
            for index, each in zip(layers, given, strict=True):
                check_exact(each, f"kv[{index}]")
        planes: list[list[tuple[Tensor, ...]]] = [[tuple(map(raw, each)) for each in given]]
        if hidden is not None and not isinstance(hidden, Mapping):
            raise InvalidRequest(f"hidden must be {{layer: [tokens, hidden]}}, not {type(hidden).__name__}")
        for layer_index in hidden or ():
            if not isinstance(layer_index, int) or not 0 <= layer_index < spec.layer_count:
                raise InvalidRequest(f"hidden[{layer_index}]: the model has layers 0..{spec.layer_count - 1}")
        hidden_layers = tuple(sorted(hidden or ()))
        for layer_index in hidden_layers:
            shape = (token_count, spec.hidden_size)
            x = checked((hidden or {})[layer_index], shape, spec.hidden_dtype, f"hidden[{layer_index}]")
            if not is_claimed:
                check_exact([x], f"hidden[{layer_index}]")
            planes.append([(raw(x.reshape(1, *shape)),)])
        settle_device([plane for part in planes for slab in part for plane in slab])
        return Tensors(spec, token_count, hidden_layers, planes)

    def copy(
        self, unit: Unit, slab: int, memory: Bytes, *, first: int = 0, stop: int | None = None, count: int = 1,
        stride: int = 0,
    ) -> None:  # fmt: skip
        """Copy as ``planes.store.StoreSource.copy`` does: strips are heads, where there are heads."""
        layout, planes = unit.layout, self.planes[unit.part][slab]
        heads = slice(None) if layout.blocked else slice(first, stop)
        for part in slab_parts(layout, slab, memory, count, stride, first=first, stop=stop):
            source = plane_run(planes[part.which], unit.token_start, layout.token_count, count, part)
            copy(raw(part.array), source[:, heads])

    def fused(self, unit: Unit, memory: Bytes, count: int, stride: int) -> Steps | None:
        """See ``planes.store.StoreSource.fused``: compiled calls, or one step per layer, K and V together."""
        layout = unit.layout
        devices = {lanes.gpu_of(plane) for both in self.planes[unit.part] for plane in both}
        gpu = devices.pop() if len(devices) == 1 else None
        if gpu is not None:
            return stored_from(GpuPlanes(gpu, self.planes[unit.part]), unit, memory, count, stride)
        layers = self.spec.slab_layers[unit.slab_first : unit.slab_stop]
        if unit.part or devices:  # tensors of several devices
            return None
        geometry = plane_geometry(layout, layers)
        if geometry is None or stride % layout.item_size or unit.base % layout.item_size:
            return None
        planes = self.planes[0][unit.slab_first : unit.slab_stop]
        heads = range(planes[0][0].shape[0])
        base = layout.header_bytes + unit.base
        targets = strip_arrays(memory, layout, geometry, len(planes), heads, count, stride, base)
        sides = list(zip(*planes, strict=True))
        return _calls(targets, sides, unit.token_start) or plainly(_steps, targets, sides, unit.token_start)


def _calls(
    targets: Sequence[NDArray[np.generic]], sides: Sequence[Sequence[Tensor]], start: int
) -> Steps | None:  # fmt: skip
    """Return the copies in compiled code; None where there is none, or the planes do not suit it."""
    if not is_compiled():
        return None
    pairs: list[tuple[Blocks, Blocks]] = []
    for side, array in zip(placed_planes(sides), targets, strict=False):
        source = side.blocks(array.shape[1:], start)
        if source is None:
            return None
        pairs.append((Blocks.of(array), source))
    batch = batch_of(pairs, targets[0].itemsize) if pairs else None
    return None if batch is None else Steps(calls_of(batch), by_torch=False)


def _steps(
    targets: Sequence[NDArray[np.generic]], sides: Sequence[Sequence[Tensor]], start: int
) -> Steps | None:  # fmt: skip
    """Return the copies by torch, a step per layer; None without torch."""
    torch = torch_module()
    if torch is None:
        return None
    views = [views_of(array, sides[0][0].dtype) for array in targets]
    sources = [token_runs(side, array.shape[1:], start) for side, array in zip(sides, targets, strict=True)]
    pairs = zip(zip(*views, strict=True), zip(*sources, strict=True), strict=True)
    return Steps([partial(torch._foreach_copy_, *both) for both in pairs])
