"""The places of a prompt's tokens in pages on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import PartPlace
from kvstore_client.arrays import Tensor, torch_module


class GpuSlots:
    """The page of each token, and its place in the page, on the GPU. Tokens without a slot are left out."""

    def __init__(self, slots: NDArray[np.int64], page_size: int, device: Any) -> None:
        """``slots``: [tokens], negative where a token has none."""
        self._slots = slots
        both = torch_module().from_numpy(np.stack(np.divmod(slots, page_size))).to(device)
        self._pages, self._rows = both[0], both[1]

    def put(self, plane: Tensor, content: Tensor, token: int, chunk_tokens: int, part: PartPlace) -> None:
        """Write ``content``, [chunks, heads, tokens, dim], the part of chunks from ``token`` on, into all pages of one
        half of a layer, [pages, page_size, heads, dim]."""
        pages, rows, there = self._of(token, chunk_tokens, content.shape[0], part)
        source = content.permute(0, 2, 1, 3)
        plane[pages, rows] = source if there is None else source.flatten(0, 1)[there]

    def take(self, plane: Tensor, content: Tensor, token: int, chunk_tokens: int, part: PartPlace) -> None:
        """Read what ``put`` writes. Every token must have a slot."""
        pages, rows, there = self._of(token, chunk_tokens, content.shape[0], part)
        assert there is None, "every token has a slot"
        content.copy_(plane[pages, rows].permute(0, 2, 1, 3))

    def tokens(self, plane: Tensor, start: int, stop: int) -> Tensor:
        """Return the tokens ``start .. stop`` of one half of a layer, [heads, tokens, dim]: a copy."""
        return plane[self._pages[start:stop], self._rows[start:stop]].permute(1, 0, 2)

    def _of(self, token: int, step: int, count: int, part: PartPlace) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return pages, rows in them, and the numbers of the tokens that have a slot; None: all have."""
        where = slice(token, token + step * count)
        tokens = slice(part.token_start, part.token_stop)
        pages, rows = (each[where].view(count, step)[:, tokens] for each in (self._pages, self._rows))
        there = np.flatnonzero(self._slots[where].reshape(count, step)[:, tokens] >= 0)
        if len(there) == count * (part.token_stop - part.token_start):
            return pages, rows, None
        numbers = torch_module().from_numpy(there).to(pages.device)
        return pages.flatten()[numbers], rows.flatten()[numbers], numbers
