"""An engine's planes on one GPU: what has come is put in its places, and what is to be stored is taken from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvstore.chunk import PartPlace
from kvstore.errors import Internal
from kvstore_client.arrays import Tensor
from kvstore_client.cuda.launches import Launches
from kvstore_client.cuda.pages import GpuSlots


class GpuPlanes:
    """Planes of plain integers, per layer K and V, or E: [heads, tokens, dim]; or, with ``slots``, pages of one half of
    a layer, [pages, page_size, heads, dim]."""

    def __init__(self, gpu: Any, planes: Sequence[Sequence[Tensor]], slots: GpuSlots | None = None) -> None:
        self.gpu = gpu
        self._planes = planes
        self._slots = slots
        self.launches = Launches(gpu, planes, slots)

    @cached_property
    def _room(self) -> int:
        """The tokens that have places."""
        if self._slots is not None:
            return len(self._slots.flat)
        return min(int(plane.shape[1]) for planes in self._planes for plane in planes)

    def check_room(self, stop: int) -> None:
        """Raise Internal where tokens before ``stop`` have no place, as a confused sidecar may say. No bounds are
        checked behind this: the copies would reach beyond their plane."""
        if stop > self._room:
            raise Internal(f"a chunk ends at token {stop}, its destination at {self._room}")

    def put(self, position: int, part: PartPlace, content: Tensor, token: int, chunk_tokens: int) -> None:
        """Write a part of one layer, of chunks of which the first begins at ``token``: [chunks, heads, tokens, dim]."""
        plane = self._planes[position][part.which]
        if self._slots is not None:
            self._slots.put(plane, content, token, chunk_tokens, part)
        else:
            _rows(plane, part, content, token, chunk_tokens).copy_(content)

    def take(self, position: int, part: PartPlace, content: Tensor, token: int, chunk_tokens: int) -> None:
        """Read what ``put`` writes."""
        plane = self._planes[position][part.which]
        if self._slots is not None:
            self._slots.take(plane, content, token, chunk_tokens, part)
        else:
            content.copy_(_rows(plane, part, content, token, chunk_tokens))


def _rows(plane: Tensor, part: PartPlace, content: Tensor, token: int, chunk_tokens: int) -> Tensor:
    """Return the rows of a dense plane that are a part's, of ``content``'s shape: in one view, because each of several
    costs as much as a launch."""
    head, row, item = plane.stride()
    begin = plane.storage_offset() + (token + part.token_start) * row
    return plane.as_strided(content.shape, (chunk_tokens * row, head, row, item), begin)
