"""An engine's pages, as the source of a store of all layers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import slab_parts
from kvstore.errors import InvalidRequest
from kvstore.seams.memory import Bytes
from kvstore.spec import ModelSpec
from kvstore_client.arrays import Tensor
from kvstore_client.copying import calls_of
from kvstore_client.cuda.storing import stored_from
from kvstore_client.derived import check_exact
from kvstore_client.fetch.axes import Arrays
from kvstore_client.fetch.fused import in_pages, plane_geometry, strip_arrays
from kvstore_client.fetch.paged import Paged, Pages
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.fetch.whole_pages import PageRows, WholePages, page_batch
from kvstore_client.planes.store import Steps, Unit
from kvstore_client.prompt import EXACT, Prompt
from kvstore_client.store.gathering import FromPages


@dataclass(frozen=True)
class PagesSource:
    """A prompt's tokens in checked pages. ``slabs[slab]`` is one layer of them, in the order of the layout's slabs."""

    spec: ModelSpec
    token_count: int
    slabs: list[FromPages]
    hidden_layers: tuple[int, ...] = ()

    @staticmethod
    def of(prompt: Prompt, paged: Paged, hidden: Mapping[int, Tensor] | None) -> PagesSource:
        """Check the pages. Raises InvalidRequest naming what does not fit, for a token without a slot, and for a
        derived cache in an exact store."""
        if hidden:
            raise InvalidRequest("hidden: pages hold K and V; store hidden states from tensors")
        pages = Pages(Wanted.of(prompt.spec, None, None, (), False), paged)
        if len(pages.slots) != prompt.token_count:
            raise InvalidRequest(f"slots names {len(pages.slots)} tokens, the prompt has {prompt.token_count}")
        if prompt.exactness == EXACT and not prompt.is_claimed:
            check_exact([plane for pair in pages.views for plane in pair], "kv", pages.slots)
        slabs = [FromPages(pages, position) for position in range(len(pages.views))]
        return PagesSource(prompt.spec, prompt.token_count, slabs)

    def copy(
        self, unit: Unit, slab: int, memory: Bytes, *, first: int = 0, stop: int | None = None, count: int = 1,
        stride: int = 0,
    ) -> None:  # fmt: skip
        """Copy as ``planes.store.StoreSource.copy`` does: strips are heads, where there are heads."""
        layout = unit.layout
        heads = slice(None) if layout.blocked else slice(first, stop)
        for part in slab_parts(layout, slab, memory, count, stride, first=first, stop=stop):
            for number in range(count):
                token = unit.token_start + number * layout.token_count + part.token_start
                self.slabs[slab].copy(part.array[number], part.which, token, heads)

    def fused(self, unit: Unit, memory: Bytes, count: int, stride: int) -> Steps | None:
        """See ``planes.store.StoreSource.fused``: compiled calls; or one step per layer, half and chunk, whose pages
        the processor's cache holds between the two copies that numpy makes of pages which lie here and there."""
        layout, pages = unit.layout, self.slabs[0].pages
        if pages.gpu is not None:
            return stored_from(pages.on_gpu, unit, memory, count, stride)
        arrays = pages.arrays[unit.slab_first : unit.slab_stop]
        geometry = plane_geometry(layout, self.spec.slab_layers[unit.slab_first : unit.slab_stop])
        places = pages.places_of(unit.token_start, layout.token_count, count)
        if geometry is None or places is None or any(each is None for each in arrays):
            return None
        heads = range(self.spec.layers[self.spec.slab_layers[unit.slab_first]].kv_heads)
        base = layout.header_bytes + unit.base
        strips = strip_arrays(memory, layout, geometry, len(arrays), heads, count, stride, base)
        sides = [in_pages(each, pages.page_size) for each in strips]
        batch = page_batch(_parts(arrays, sides, places), are_targets=False)
        if batch is not None:
            return Steps(calls_of(batch), by_torch=False)
        rows = [(row, _in_a_row(each)) for some, numbers in places for row, each in _by_chunk(some, numbers)]
        return Steps([
            partial(_take_pages, target.view(array.dtype)[row], array, numbers)
            for halves, *targets in zip(arrays, *sides, strict=True)
            for array, target in zip(halves or (), targets, strict=True)
            for row, numbers in rows
        ])  # fmt: skip


def _parts(
    arrays: Sequence[Arrays], sides: Sequence[NDArray[np.generic]],
    places: Sequence[tuple[PageRows, NDArray[np.intp]]],
) -> list[WholePages]:  # fmt: skip
    """Return pages, and the places of their content in staging."""
    return [
        WholePages([halves[which] for halves in arrays if halves is not None], numbers, side[:, *some])
        for which, side in enumerate(sides)
        for some, numbers in places
    ]


def _by_chunk(some: PageRows, numbers: NDArray[np.intp]) -> list[tuple[PageRows, NDArray[np.intp]]]:
    """Cut the pages of several chunks, [chunks, pages of a chunk], where a chunk ends."""
    if numbers.ndim == 1:
        return [(some, numbers)]
    return [((chunk, slice(None)), each) for chunk, each in enumerate(numbers)]


def _in_a_row(numbers: NDArray[np.intp]) -> NDArray[np.intp] | slice:
    """Return pages that lie one behind another, in either order, as a slice: numpy copies these once, and listed pages
    twice. vLLM gives pages out in the order in which it got them back, last page first."""
    steps = set(np.diff(numbers).tolist())
    if not steps <= {1} and not steps <= {-1}:
        return numbers
    first, step = int(numbers[0]), steps.pop() if steps else 1
    end = first + step * len(numbers)
    return slice(first, end if end >= 0 else None, step)


def _take_pages(target: NDArray[np.generic], pages: NDArray[np.generic], numbers: NDArray[np.intp] | slice) -> None:
    target[...] = pages[numbers]
