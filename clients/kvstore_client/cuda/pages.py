"""The places of a prompt's tokens in pages on a GPU."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import PartPlace
from kvstore_client.arrays import Tensor, torch_module


class GpuSlots:
    """The page of each token, and its place in the page, on the GPU. Tokens without a slot are left out."""

    def __init__(self, slots: NDArray[np.int64], page_size: int, device: Any) -> None:
        """``slots``: [tokens], negative where a token has none."""
        self._slots, self._page_size, self._device = slots, page_size, device
        self.flat = self._brought(slots)
        """[tokens], as they were given."""
        self._found: dict[tuple[int, int, int, int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        """The answers of ``_of``, which are the same for each layer."""

    @cached_property
    def _here(self) -> NDArray[np.int64]:
        """The page of each token, and its row there: [2, tokens]. One launch for all parts needs neither."""
        return np.stack(np.divmod(self._slots, self._page_size))

    @cached_property
    def _there(self) -> Tensor:
        """The same on the GPU."""
        return self._brought(self._here)

    def _brought(self, numbers: NDArray[np.int64]) -> Tensor:
        """Return numbers on the GPU. They are there on return: any stream may use them."""
        return torch_module().from_numpy(np.ascontiguousarray(numbers)).to(self._device)

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
        pages, rows = self._there[:, start:stop]
        return plane[pages, rows].permute(1, 0, 2)

    def _of(self, token: int, step: int, count: int, part: PartPlace) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return pages, rows in them, and the numbers of the tokens that have a slot; None: all have."""
        key = token, step, count, part.token_start, part.token_stop
        if key not in self._found:
            self._found[key] = self._looked_up(*key)
        return self._found[key]

    def _looked_up(
        self, token: int, step: int, count: int, token_start: int, token_stop: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        where, tokens = slice(token, token + step * count), slice(token_start, token_stop)
        there = np.flatnonzero(self._slots[where].reshape(count, step)[:, tokens] >= 0)
        if len(there) == count * (token_stop - token_start):
            pages, rows = (each[where].view(count, step)[:, tokens] for each in self._there)
            return pages, rows, None
        some = self._here[:, where].reshape(2, count, step)[:, :, tokens].reshape(2, -1)[:, there]
        pages, rows, numbers = self._brought(np.stack([*some, there]))
        return pages, rows, numbers
