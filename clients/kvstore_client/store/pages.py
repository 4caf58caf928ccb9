"""An engine's pages, as the source of a store of all layers at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvstore.chunk import ChunkLayout, layout_of, slab_parts
from kvstore.errors import InvalidRequest
from kvstore.seams.memory import Bytes
from kvstore.spec import ModelSpec
from kvstore_client.arrays import Tensor
from kvstore_client.derived import check_exact
from kvstore_client.fetch.paged import Paged, Pages
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.store import Unit
from kvstore_client.prompt import EXACT, Prompt
from kvstore_client.store.gathering import FromPages


@dataclass(frozen=True)
class PagesSource:
    """A prompt's tokens in checked pages. ``slabs[slab]`` is one layer of them, in the order of the layout's slabs."""

    spec: ModelSpec
    token_count: int
    slabs: list[FromPages]
    part_count: int = 1
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

    def layout(self, part: int, token_count: int) -> ChunkLayout:
        return layout_of(self.spec, self.spec.kind, token_count)

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
                one = replace(part, array=part.array[number : number + 1])
                self.slabs[slab].copy(one, part.token_start, part.token_stop, token, heads)
