"""An engine's pages as a place to fetch into and to store from: any page size, any order of axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import slab_parts
from kvstore.errors import InvalidRequest
from kvstore.seams import FaultPoints
from kvstore_client.arrays import Layer, Tensor, check_memory, is_array, is_tensor, settle_device, tell_graphs
from kvstore_client.copying import copy, raw
from kvstore_client.cuda.fetching import copy_checked_on, fetch_in_turn, fetched_on, with_slots
from kvstore_client.cuda.pages import GpuSlots
from kvstore_client.cuda.planes import GpuPlanes
from kvstore_client.fetch.axes import PageViews
from kvstore_client.fetch.fused import Fused, in_calls, in_pages, pieces_of, sources_of
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.fetch.whole_pages import PageRows, WholePages, copy_pages, page_batch, page_copies
from kvstore_client.planes.prefix import LandedRange
from kvstore_client.planes.shared_memory.chunk import MappedRun
from kvstore_client.planes.stream.strips import Strips

SLOT_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Paged:
    """Pages of a paged KV cache.

    ``layers``: per wanted layer one tensor that holds K and V, or a pair (K, V) of tensors.
    ``slots``: [tokens], the slot of each token of the prompt: page * page_size + its place in the page; negative: the
    token is not wanted (or not there).
    ``layout``: the names of the tensors' axes, in order, of kv, page, slot, head, dim. Without ``kv`` one tensor holds
    K and then V along ``dim``; without ``head`` there is one head.

        "kv page slot head dim"    FlashAttention, [2, pages, page_size, heads, dim]
        "page kv head slot dim"    FlashInfer with HND pages
        "page head slot dim"       vLLM 0.32 on GPUs, [pages, heads, page_size, 2 * dim]
        "page slot dim"            MLA, latent and then rope part
    """

    layers: Sequence[Tensor]
    slots: Tensor
    layout: str = "kv page slot head dim"


class Piece(NamedTuple):
    """Consecutive tokens that lie together: ``page_count`` whole pages, or slots of one page (``page_count`` 0)."""

    token: int
    token_count: int
    page: int
    page_count: int
    slot: int


Cut = tuple[list[tuple[int, NDArray[np.intp]]], list[Piece]]
"""Runs of whole pages in any order, (first token, pages), and the other tokens as pieces."""


class Pages:
    """Checked pages. ``views[position]``: K and V as strided views [pages, page_size, heads, dim]; ``arrays``: the same
    as plain integers, or None for a GPU's.

    Raises: InvalidRequest naming what does not fit the model.
    """

    def __init__(self, wanted: Wanted, paged: Paged) -> None:
        if wanted.spec.keeps_e:
            raise InvalidRequest("pages hold K and V, this spec keeps E (keeps_e): fetch_projected writes into tensors")
        if len(paged.layers) != len(wanted.layers):
            raise InvalidRequest(f"layers has {len(paged.layers)} entries, {len(wanted.layers)} layers are wanted")
        self._checked = PageViews.of(wanted, paged.layers, paged.layout)
        self.views, self.arrays = self._checked.layers, self._checked.arrays
        self.slots = _slots(paged.slots)
        sizes = {(plane.shape[0], plane.shape[1]) for pair in self.views for plane in pair}
        if len(sizes) != 1:
            raise InvalidRequest(f"the layers' pages differ in number or size: {sorted(sizes)}")
        page_count, self.page_size = sizes.pop()
        if self.slots.size and int(self.slots.max()) >= page_count * self.page_size:
            raise InvalidRequest(f"slot {int(self.slots.max())} lies outside {page_count} pages of {self.page_size}")
        settle_device(self._checked.given)
        self.gpu = self._checked.gpu
        self._cut: dict[tuple[int, int], Cut] = {}

    def plane(self, position: int, which: int) -> Tensor:
        """Return K or V of one wanted layer as plain integers."""
        return raw(self.views[position][which])

    def array(self, position: int, which: int) -> NDArray[np.generic] | None:
        """Return the same as a numpy array; None for a GPU's."""
        arrays = self.arrays[position]
        return None if arrays is None else arrays[which]

    @cached_property
    def slots_on_gpu(self) -> GpuSlots:
        """The tokens' slots on the GPU that all pages are on."""
        return GpuSlots(self.slots, self.page_size, self.gpu)

    @cached_property
    def on_gpu(self) -> GpuPlanes:
        """All pages, by wanted layer and half, on the GPU."""
        return GpuPlanes(self.gpu, [list(map(raw, pair)) for pair in self.views], self.slots_on_gpu)

    def check_writable(self) -> None:
        """Raise InvalidRequest for pages that cannot be fetched into."""
        self._checked.check_writable()
        self._check_slots()

    def are_written(self) -> None:
        """Tell torch that others than torch write the tensors."""
        if told := [each for each in self._checked.given if is_tensor(each)]:
            tell_graphs(told)

    def _check_slots(self) -> None:
        """Raise InvalidRequest where two tokens would lie in one slot."""
        slots = self.slots[self.slots >= 0]
        if not slots.size:
            return
        # Sorting runs costs a tenth of sorting slots.
        begins = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
        firsts, lasts = slots[begins], slots[np.append(begins[1:], slots.size) - 1]
        order = np.argsort(firsts)
        again = firsts[order][1:][firsts[order][1:] <= lasts[order][:-1]]
        if again.size:
            raise InvalidRequest(f"slots names slot {int(again[0])} for two tokens")

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the tokens ``start .. stop`` in as few pieces as their slots allow."""
        slots = self.slots[start:stop]
        breaks = np.flatnonzero((np.diff(slots) != 1) | (slots[:-1] < 0)) + 1
        bounds = [0, *breaks.tolist(), len(slots)]
        size = self.page_size
        for first, last in pairwise(bounds):
            if first == last or slots[first] < 0:
                continue
            token, slot, end = start + first, int(slots[first]), int(slots[first]) + last - first
            while slot < end:
                page, place = divmod(slot, size)
                whole = (end - slot) // size if place == 0 else 0
                count = whole * size if whole else min(size - place, end - slot)
                yield Piece(token, count, page, whole, place)
                token, slot = token + count, slot + count

    def whole_pages(self, start: int, stop: int) -> Cut:
        """Return the tokens ``start .. stop`` as runs of whole pages in any order, (first token, pages), and the rest
        as pieces."""
        known = self._cut.get((start, stop))
        if known is None:
            known = self._cut[start, stop] = self._cut_up(start, stop)
        return known

    def _cut_up(self, start: int, stop: int) -> Cut:
        size, slots = self.page_size, self.slots
        with_slot = np.flatnonzero(slots[start:stop] >= 0)
        if not len(with_slot):
            return [], []
        start += int(with_slot[0])
        aligned = np.flatnonzero(slots[start : min(stop, start + size)] % size == 0)
        if not len(aligned) or slots[start + aligned[0]] < 0:
            return [], list(self.pieces(start, stop))
        first = start + int(aligned[0])
        count = (stop - first) // size
        blocks = slots[first : first + count * size].reshape(count, size)
        whole = (blocks[:, 0] >= 0) & (blocks[:, 0] % size == 0) & (np.diff(blocks) == 1).all(axis=1)
        runs, rest = [], list(self.pieces(start, first))
        bounds = [0, *(np.flatnonzero(np.diff(whole)) + 1).tolist(), count]
        for begin, end in pairwise(bounds):
            if begin < end and whole[begin]:
                runs.append((first + begin * size, blocks[begin:end, 0] // size))
            else:
                rest += self.pieces(first + begin * size, first + end * size)
        return runs, [*rest, *self.pieces(first + count * size, stop)]

    def places_of(self, begin: int, chunk_tokens: int, count: int) -> list[tuple[PageRows, NDArray[np.intp]]] | None:
        """Return the places of ``count`` chunks of whole pages from token ``begin`` on, as (some of their pages, the
        numbers), their pages being [chunks, pages of a chunk]. None where a token lies in a part of a page."""
        each, rest = divmod(chunk_tokens, self.page_size)
        stop = begin + chunk_tokens * count
        if rest or stop > len(self.slots):
            return None
        runs, pieces = self.whole_pages(begin, stop)
        if pieces or any((token - begin) % self.page_size for token, _ in runs):
            return None
        places: list[tuple[PageRows, NDArray[np.intp]]] = []
        for token, numbers in runs:
            page = (token - begin) // self.page_size
            if (page, len(numbers)) == (0, count * each):
                return [((slice(None), slice(None)), numbers.reshape(count, each))]
            for chunk in range(page // each, -(-(page + len(numbers)) // each)):
                start, end = max(page, chunk * each), min(page + len(numbers), (chunk + 1) * each)
                rows = (chunk, slice(start - chunk * each, end - chunk * each))
                places.append((rows, numbers[start - page : end - page]))
        return places

    def exchange(
        self, position: int, which: int, strips: NDArray[np.generic], token: int, heads: slice, *, are_targets: bool
    ) -> None:  # fmt: skip
        """Copy ``strips``, [heads, tokens, dim], from ``token`` on, into these heads of K or V of a wanted layer, or,
        where the pages are no targets, from there. Whole pages go in one call: numpy's index is three times as fast as
        a call per page, and lets other threads run."""
        array, (head_count, count, dim), size = self.array(position, which), strips.shape, self.page_size
        if array is None:
            rest = list(self.pieces(token, token + count))
        else:
            runs, rest = self.whole_pages(token, token + count)
            pages = array[:, :, heads]
            for first, numbers in runs:
                some = strips[:, first - token : first - token + len(numbers) * size].view(array.dtype)
                content = some.reshape(head_count, len(numbers), size, dim).transpose(1, 2, 0, 3)
                if are_targets:
                    pages[numbers] = content
                else:
                    content[...] = pages[numbers]
        if rest:
            plane, tensor = self.plane(position, which)[:, :, heads], raw(strips)
            for piece in rest:
                some = tensor[:, piece.token - token : piece.token - token + piece.token_count]
                both = self.place(plane, piece), self.shaped(some, piece)
                copy(*both if are_targets else both[::-1])

    def place(self, plane: Tensor, piece: Piece) -> Tensor:
        """Return the memory of a piece: [pages, page_size, heads, dim], or [tokens, heads, dim] inside one page."""
        if piece.page_count:
            return plane[piece.page : piece.page + piece.page_count]
        return plane[piece.page, piece.slot : piece.slot + piece.token_count]

    def shaped(self, strip: Tensor, piece: Piece) -> Tensor:
        """Return strips of a piece's tokens, [heads, tokens, dim], in the order of axes of ``place``. A view."""
        if not piece.page_count:
            return strip.permute(1, 0, 2) if is_tensor(strip) else strip.transpose(1, 0, 2)
        if is_tensor(strip):
            return strip.unflatten(1, (piece.page_count, self.page_size)).permute(1, 2, 0, 3)
        heads, _, dim = strip.shape
        return strip.reshape(heads, piece.page_count, self.page_size, dim).transpose(1, 2, 0, 3)


class PagedTarget:
    """Pages as the destination of a prefix (``planes.prefix.Target``). Tokens whose slot is negative are left out."""

    is_callers = True

    def __init__(self, wanted: Wanted, pages: Pages, token_count: int) -> None:
        if len(pages.slots) < token_count:
            raise InvalidRequest(f"slots names {len(pages.slots)} tokens, {token_count} are stored")
        pages.check_writable()
        if wanted.hidden_layers:
            raise InvalidRequest("hidden states do not go into pages: fetch them apart")
        self._wanted = wanted
        self._pages = pages
        if token_count:
            pages.are_written()

    def layer(self, position: int, token_count: int) -> Layer:
        return self._pages.views[position]

    def layers(self, token_count: int) -> list[Layer]:
        return list(self._pages.views)

    def places(self, token_count: int) -> tuple[Iterator[Tensor], NDArray[np.int64]]:
        slots = self._pages.slots[:token_count]
        return (plane for pair in self._pages.views for plane in pair), slots[slots >= 0]

    def rows(self, layer: int, token_count: int) -> Tensor:
        raise AssertionError("no hidden states go into pages")

    def fused(self, runs: Sequence[MappedRun], positions: range | None = None) -> Fused | None:
        """Return all copies of the wanted layers, or those at ``positions``, at once. None where tokens lie in parts of
        pages, or a layer has work of its own."""
        wanted, gpu = self._wanted, self._pages.gpu
        positions = positions or range(len(wanted.layers))
        if wanted.verify:
            return None
        if gpu is not None:
            return fetched_on(self._pages.on_gpu, wanted, with_slots(runs, self._pages.slots), positions)
        parts = self._whole_pages(runs, positions)
        if parts is None:
            return None
        batch = page_batch(parts, are_targets=True)
        return Fused(partial(pieces_of, page_copies(parts), copy_pages)) if batch is None else in_calls(batch)

    def in_turn(
        self, runs: Sequence[MappedRun], positions: Sequence[range], faults: FaultPoints, landed: LandedRange
    ) -> Callable[[], None] | None:
        """Return a call for a GPU's pages: its copies need no second thread."""
        if self._pages.gpu is None or self._wanted.verify:
            return None
        some = with_slots(runs, self._pages.slots)
        return partial(fetch_in_turn, self._pages.on_gpu, self._wanted, some, positions, faults, landed)

    def copy_layer(self, position: int, runs: Sequence[MappedRun], bad: set[int], faults: FaultPoints) -> None:
        wanted = self._wanted
        if self._pages.gpu is not None:
            some = with_slots(runs, self._pages.slots)
            copy_checked_on(self._pages.on_gpu, wanted, some, position, bad, faults)
            return
        for run in runs:
            faults.reach("fetch.copy.middle")
            parts = self._whole_pages([run], range(position, position + 1))
            if parts is not None:
                copy_pages(page_copies(parts))
                continue
            for chunk in run.chunks:
                layout = chunk.layout
                index = layout.slab_of_layer[wanted.layers[position]]
                if wanted.verify and not chunk.is_intact(index, wanted.head_start, wanted.head_stop):
                    bad.add(id(chunk))
                    continue
                heads = slice(None) if layout.blocked else slice(wanted.head_start, wanted.head_stop)
                for part in slab_parts(layout, index, chunk.slab(index)):
                    self._put(position, part.which, part.array[0, heads], chunk.token_start + part.token_start)

    def _whole_pages(self, runs: Sequence[MappedRun], positions: range) -> list[WholePages] | None:
        """Return the pages of these layers and their content, by halves of chunks at a constant distance. None where
        copies must be made chunk by chunk."""
        wanted, pages = self._wanted, self._pages
        arrays = pages.arrays[positions.start : positions.stop]
        if wanted.verify or not arrays or any(each is None for each in arrays):
            return None
        layers = wanted.layers[positions.start : positions.stop]
        heads = range(wanted.head_start, wanted.head_start + wanted.heads_of(layers[0]))
        parts: list[WholePages] = []
        for run in runs:
            first = run.chunks[0]
            places = pages.places_of(first.token_start, first.layout.token_count, len(run.chunks))
            sources = None if places is None else sources_of(run, layers, heads)
            if places is None or sources is None:
                return None
            for which, source in enumerate(sources):
                of_layers = [halves[which] for halves in arrays if halves is not None]
                content = in_pages(source, pages.page_size)
                parts += [WholePages(of_layers, numbers, content[:, *some]) for some, numbers in places]
        return parts

    def copy_strips(self, position: int, strips: Strips) -> None:
        chunk, extent = strips.chunk, strips.extent
        layout = chunk.layout
        head = 0 if layout.blocked else extent.first - self._wanted.head_start
        for part in slab_parts(layout, extent.slab, strips.memory, first=extent.first, stop=extent.stop):
            self._put(position, part.which, part.array[0], chunk.token_start + part.token_start, head)

    def copy_hidden_strips(self, layer: int, strips: Strips) -> None:
        raise AssertionError("no hidden states go into pages")

    def copy_hidden(self, layer: int, runs: Sequence[MappedRun], bad: set[int]) -> None:
        raise AssertionError("no hidden states go into pages")

    def _put(self, position: int, which: int, strips: NDArray[np.generic], token: int, head: int = 0) -> None:
        """Copy tokens from ``token`` on, [heads, tokens, dim], into one plane, from its ``head`` on."""
        heads = slice(head, head + strips.shape[0])
        self._pages.exchange(position, which, strips, token, heads, are_targets=True)


def _slots(slots: Tensor) -> NDArray[np.int64]:
    if is_array(slots):
        check_memory(slots, "slots")
    if is_tensor(slots):
        slots = slots.detach().cpu()
    try:
        array = np.asarray(slots)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"slots must be one run of whole numbers: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(f"slots must be one run of whole numbers, not {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > SLOT_MAX:
        raise InvalidRequest(f"slot {int(array.max())} is larger than any: slots go up to {SLOT_MAX}")
    return array.astype(np.int64)
