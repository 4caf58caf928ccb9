"""Copies of whole pages: by compiled code, or by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from kvstore_copies import Batch, Blocks, batch_of, is_compiled
from numpy.typing import NDArray

PageRows = tuple[int | slice, slice]


class WholePages(NamedTuple):
    """Pages of one half of a cache. ``arrays``: per layer all pages, [pages, page_size, heads, dim]; ``numbers``: those
    that are meant, in one or two axes; ``content``: theirs, with a first axis of layers."""

    arrays: list[NDArray[np.generic]]
    numbers: NDArray[np.intp]
    content: NDArray[np.generic]


PageCopy = tuple[NDArray[np.generic], NDArray[np.intp], NDArray[np.generic]]
"""(all pages, the numbers of those to write, their new content)."""


def page_batch(parts: Sequence[WholePages], *, are_targets: bool) -> Batch | None:
    """Return the copies into pages, or out of them, in compiled code; None where there is none, or the pages do not
    suit it."""
    if not is_compiled():
        return None
    pairs: list[tuple[Blocks, Blocks]] = []
    for part in parts:
        pages = Blocks.at(part.numbers, part.arrays)
        if pages is None:
            return None
        content = Blocks.of(part.content, 1 + part.numbers.ndim)
        pairs.append((pages, content) if are_targets else (content, pages))
    return batch_of(pairs, parts[0].content.itemsize) if parts else None


def page_copies(parts: Sequence[WholePages]) -> list[PageCopy]:
    """Return copies by numpy, one per layer and half of chunks at a constant distance."""
    return [
        (array, part.numbers, content.view(array.dtype))
        for part in parts
        for array, content in zip(part.arrays, part.content, strict=True)
    ]


def copy_pages(copies: Sequence[PageCopy]) -> None:
    """Run copies into pages: numpy's indexed assignment, one call for many pages, lets other threads run."""
    for pages, numbers, content in copies:
        pages[numbers] = content
