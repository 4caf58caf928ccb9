"""An engine's pages as a place to fetch into and to store from: any page size, any order of axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import slab_parts
from kvstore.errors import InvalidRequest
from kvstore.seams import FaultPoints
from kvstore_client.arrays import Layer, Tensor, check_dtype, check_memory, is_array, is_tensor, settle_device
from kvstore_client.copying import copy, raw
from kvstore_client.fetch.fused import KeptViews
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.overlap import check_targets
from kvstore_client.planes.shared_memory.chunk import MappedRun
from kvstore_client.planes.stream.strips import Strips

AXES = ("kv", "page", "slot", "head", "dim")
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


class Pages:
    """Checked pages. ``views[layer]``: K and V as strided views [pages, page_size, heads, dim]; ``planes``: the same as
    plain integers.

    Raises: InvalidRequest naming what does not fit the model.
    """

    def __init__(self, wanted: Wanted, paged: Paged) -> None:
        if wanted.spec.keeps_e:
            raise InvalidRequest("pages hold K and V, this spec keeps E (keeps_e): fetch_projected writes into tensors")
        if len(paged.layers) != len(wanted.layers):
            raise InvalidRequest(f"layers has {len(paged.layers)} entries, {len(wanted.layers)} layers are wanted")
        self.views = [
            _planes(wanted, layer, each, paged.layout) for layer, each in zip(wanted.layers, paged.layers, strict=True)
        ]
        self.planes = [(raw(k), raw(v)) for k, v in self.views]
        self.slots = _slots(paged.slots)
        sizes = {(plane.shape[0], plane.shape[1]) for pair in self.planes for plane in pair}
        if len(sizes) != 1:
            raise InvalidRequest(f"the layers' pages differ in number or size: {sorted(sizes)}")
        page_count, self.page_size = sizes.pop()
        if self.slots.size and int(self.slots.max()) >= page_count * self.page_size:
            raise InvalidRequest(f"slot {int(self.slots.max())} lies outside {page_count} pages of {self.page_size}")
        settle_device([plane for pair in self.planes for plane in pair])
        self.arrays = [(_array(k), _array(v)) for k, v in self.planes]
        """The planes as numpy arrays; None for a GPU's."""
        self._cut: dict[tuple[int, int], tuple[list[tuple[int, NDArray[np.intp]]], list[Piece]]] = {}

    def check_writable(self) -> None:
        """Raise InvalidRequest for pages that cannot be fetched into."""
        check_targets(self.views, "layers")
        self._check_slots()

    def _check_slots(self) -> None:
        """Raise InvalidRequest where two tokens would lie in one slot."""
        slots = self.slots[self.slots >= 0]
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1  # sorting runs costs a tenth of sorting slots
        firsts, lasts = slots[[0, *breaks] if slots.size else []], slots[[*(breaks - 1), -1] if slots.size else []]
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

    def pieces_only(self, start: int, stop: int) -> tuple[list[tuple[int, NDArray[np.intp]]], list[Piece]]:
        """Return as ``whole_pages`` does, but all of it as pieces."""
        return [], list(self.pieces(start, stop))

    def whole_pages(self, start: int, stop: int) -> tuple[list[tuple[int, NDArray[np.intp]]], list[Piece]]:
        """Return the tokens ``start .. stop`` as runs of whole pages in any order, (first token, pages), and the rest
        as pieces."""
        known = self._cut.get((start, stop))
        if known is None:
            known = self._cut[start, stop] = self._cut_up(start, stop)
        return known

    def _cut_up(self, start: int, stop: int) -> tuple[list[tuple[int, NDArray[np.intp]]], list[Piece]]:
        size, slots = self.page_size, self.slots
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
    """Pages as the destination of a prefix. Tokens whose slot is negative are left out."""

    is_callers = True

    def __init__(self, wanted: Wanted, pages: Pages, token_count: int) -> None:
        if len(pages.slots) < token_count:
            raise InvalidRequest(f"slots names {len(pages.slots)} tokens, {token_count} are stored")
        pages.check_writable()
        if wanted.hidden_layers:
            raise InvalidRequest("hidden states do not go into pages: fetch them apart")
        self._wanted = wanted
        self._pages = pages

    def layer(self, position: int, token_count: int) -> Layer:
        """Return a wanted layer in the caller's form: (K, V) of its pages."""
        return self._pages.views[position]

    def places(self, token_count: int) -> tuple[list[Tensor], NDArray[np.int64]]:
        """Return the memory of the first ``token_count`` tokens: the pages, and the slots in them."""
        slots = self._pages.slots[:token_count]
        return [plane for pair in self._pages.views for plane in pair], slots[slots >= 0]

    def rows(self, layer: int, token_count: int) -> Tensor:
        raise AssertionError("no hidden states go into pages")

    def pairs(self, runs: Sequence[MappedRun], kept: KeptViews | None) -> None:
        """Return None: pages are written layer by layer."""

    def copy_layer(self, position: int, runs: Sequence[MappedRun], bad: set[int], faults: FaultPoints) -> None:
        """Copy one wanted layer of each chunk. With verify, a chunk whose strips fail joins ``bad``."""
        wanted = self._wanted
        for run in runs:
            faults.reach("fetch.copy.middle")
            if self._put_run(position, run):
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

    def _put_run(self, position: int, run: MappedRun) -> bool:
        """Copy one wanted layer of chunks at a constant distance, all of them in one call for K and one for V. Returns
        False, and does nothing, where they must be copied one by one."""
        wanted, pages, first, count = self._wanted, self._pages, run.chunks[0], len(run.chunks)
        layout, arrays = first.layout, pages.arrays[position]
        tokens = layout.token_count
        if count == 1 or wanted.verify or layout.blocked or tokens % pages.page_size:
            return False
        runs, rest = pages.whole_pages(first.token_start, first.token_start + count * tokens)
        if rest or len(runs) != 1 or any(array is None for array in arrays):
            return False
        numbers = runs[0][1].reshape(count, -1)
        index = layout.slab_of_layer[wanted.layers[position]]
        for part in slab_parts(layout, index, run.memory(index), count, run.stride):
            array = arrays[part.which]
            strips = part.array[:, wanted.head_start : wanted.head_stop].view(array.dtype)  # type: ignore[union-attr]
            shaped = strips.reshape(count, strips.shape[1], -1, pages.page_size, strips.shape[3])
            array[numbers] = shaped.transpose(0, 2, 3, 1, 4)  # type: ignore[index]
        return True

    def copy_strips(self, position: int, strips: Strips) -> None:
        """Copy the strips of one wanted layer that a message brought."""
        chunk, extent = strips.chunk, strips.extent
        layout = chunk.layout
        head = 0 if layout.blocked else extent.first - self._wanted.head_start
        for part in slab_parts(layout, extent.slab, strips.memory, first=extent.first, stop=extent.stop):
            self._put(position, part.which, part.array[0], chunk.token_start + part.token_start, head)

    def copy_hidden_strips(self, layer: int, strips: Strips) -> None:
        raise AssertionError("no hidden states go into pages")

    def copy_hidden(self, layer: int, runs: Sequence[MappedRun], bad: set[int]) -> None:
        raise AssertionError("no hidden states go into pages")

    def _put(self, position: int, which: int, strips: NDArray[Any], token: int, head: int = 0) -> None:
        """Copy tokens from ``token`` on, [heads, tokens, dim], into one plane, from its ``head`` on. Whole pages go in
        one call: numpy's indexed assignment is three times as fast as a call per page, and lets other threads run."""
        pages, stop = self._pages, token + strips.shape[1]
        array = pages.arrays[position][which]
        cut = pages.whole_pages if array is not None else pages.pieces_only
        runs, rest = cut(token, stop)
        heads, _, dim = strips.shape
        for first, numbers in runs:
            count = len(numbers) * pages.page_size
            source = strips[:, first - token : first - token + count].view(array.dtype)  # type: ignore[union-attr]
            shaped = source.reshape(heads, len(numbers), pages.page_size, dim).transpose(1, 2, 0, 3)
            array[:, :, head : head + heads][numbers] = shaped  # type: ignore[index]
        plane = pages.planes[position][which][:, :, head : head + heads]
        tensor = raw(strips) if rest else None
        for piece in rest:
            source = tensor[:, piece.token - token : piece.token - token + piece.token_count]  # type: ignore[index]
            copy(pages.place(plane, piece), pages.shaped(source, piece))


def _array(plane: Tensor) -> NDArray[Any] | None:
    if not is_tensor(plane):
        array: NDArray[Any] = plane
        return array
    return None if plane.is_cuda else plane.numpy()


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


def _planes(wanted: Wanted, layer: int, given: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return K and V of one layer as views [pages, page_size, heads, dim]. Raises InvalidRequest."""
    names = tuple(layout.split())
    if len(set(names)) != len(names) or not set(names) <= set(AXES) or not {"page", "slot", "dim"} <= set(names):
        raise InvalidRequest(
            f"layout {layout!r}: name each axis once, of {', '.join(AXES)}; page, slot and dim must be there"
        )
    spec = wanted.spec.layers[layer]
    dims, heads = (spec.k_dim, spec.v_dim), wanted.heads_of(layer)
    is_pair = isinstance(given, Sequence)
    if is_pair and (len(given) != 2 or "kv" in names):
        raise InvalidRequest(f"layers[{layer}]: a pair (K, V) has two tensors and no axis kv")
    tensors = list(given) if is_pair else [given]
    views = [_ordered(tensor, names, f"layers of layer {layer}", wanted.spec.cache_dtype) for tensor in tensors]
    if is_pair:
        k, v = (view[0] for view in views)
    elif "kv" in names:
        if views[0].shape[0] != 2:
            raise InvalidRequest(f"layer {layer}: axis kv has {views[0].shape[0]} entries, K and V are two")
        k, v = views[0][0], views[0][1]
    else:
        k, v = views[0][0][..., : dims[0]], views[0][0][..., dims[0] :]
    for plane, dim, what in ((k, dims[0], "K"), (v, dims[1], "V")):
        if plane.shape[2:] != (heads, dim):
            raise InvalidRequest(
                f"layer {layer}: {what} has {tuple(plane.shape[2:])} as (heads, dim), the model and heads= say "
                f"{(heads, dim)}"
            )
    return k, v


def _ordered(tensor: Tensor, names: tuple[str, ...], what: str, dtype: str) -> Tensor:
    """Return a view with the axes kv, page, slot, head, dim; a missing axis has one entry."""
    check_memory(tensor, what)
    check_dtype(tensor, dtype, what)
    if len(tensor.shape) != len(names):
        raise InvalidRequest(f"{what} has {len(tensor.shape)} axes, its layout names {len(names)}")
    order = [names.index(name) for name in AXES if name in names]
    view = tensor.permute(*order) if is_tensor(tensor) else tensor.transpose(order)
    for position, name in enumerate(AXES):
        if name not in names:
            view = view[(slice(None),) * position + (None,)]
    return view
