"""Arrival and gather of many strips at once: all planes of a fetch or a store, in one launch on a GPU.

A strip is a run of one layer's K or V, [heads, tokens, dim]. It belongs to rows of a dense plane, or to slots of an
engine's pages. Quantised strips are int8 or float8_e4m3fn, with an fp32 scale for each run of a head's tokens: the
run's largest value, over the dtype's. A run with a value that is not finite has the scale NaN: it decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvstore.errors import InvalidRequest
from kvstore_kernels import gpu
from kvstore_kernels.gpu.strips import SCALE_MIN, launch_arrivals, launch_gather, takes
from kvstore_kernels.rotary import Rotation, check_turn, turn_into

RUN_TOKENS = 64
"""Tokens of a head that share a scale, unless the caller says otherwise."""
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest value of each dtype that strips are quantised to."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Strips, and the planes of an engine's cache that they belong to.

    Shapes: ``strips`` [heads, tokens, dim] each, whose tokens and heads' distance may differ; ``planes``: for each
    strip a dense plane [heads, rows, dim], or pages [pages, page_size, heads, dim]: NHD as it lies, HND as a permuted
    view. All strips have one dtype and one distance of tokens and dims, all planes one dtype, shape and strides.
    ``starts``: the place of each strip's first token among the rows, slots and angles. ``turned``: the strips whose
    keys rotate.
    Raises: InvalidRequest for what does not fit.
    """

    strips: Sequence[torch.Tensor]
    planes: Sequence[torch.Tensor]
    starts: Sequence[int]
    turned: Sequence[bool]

    def __post_init__(self) -> None:
        counts = {len(self.strips), len(self.planes), len(self.starts), len(self.turned)}
        if len(counts) != 1 or not self.strips:
            raise InvalidRequest(f"strips, planes, starts and turned have {sorted(counts)} entries: give one of each")
        kinds = {(each.dtype, each.device, each.shape[0], each.shape[2], each.stride()[1:]) for each in self.strips}
        places = {(each.dtype, each.device, each.shape, each.stride()) for each in self.planes}
        if len(kinds) != 1 or len(places) != 1:
            raise InvalidRequest("the strips, or the planes, differ in dtype, shape or strides: move them apart")
        strip, plane = self.strips[0], self.planes[0]
        if plane.ndim not in (3, 4) or (strip.shape[0], strip.shape[2]) != (plane.shape[-2 if self.page_size else 0],
                                                                            plane.shape[-1]):  # fmt: skip
            raise InvalidRequest(f"a strip has shape {tuple(strip.shape)}, its plane {tuple(plane.shape)}")
        if min(self.starts) < 0 or (not self.page_size and self.stop > plane.shape[1]):
            raise InvalidRequest(f"the strips reach token {self.stop}, the planes have {plane.shape[1]} rows")

    @property
    def page_size(self) -> int:
        """Slots of a page; 0 for dense planes."""
        return self.planes[0].shape[1] if self.planes[0].ndim == 4 else 0

    @property
    def slot_stop(self) -> int:
        """The slot after the last; 0 for dense planes."""
        return self.planes[0].shape[0] * self.page_size

    @property
    def plane_strides(self) -> tuple[int, int, int, int]:
        """Distances of pages, rows, heads and dims, in items."""
        strides = self.planes[0].stride()
        page, row, head, dim = strides if self.page_size else (0, strides[1], strides[0], strides[2])
        return page, row, head, dim

    @cached_property
    def stop(self) -> int:
        """The place after the last token of all strips."""
        return max(start + strip.shape[1] for start, strip in zip(self.starts, self.strips, strict=True))

    @cached_property
    def strip_alignment(self) -> int:
        strides = [each.stride(0) for each in self.strips] + [self.strips[0].stride(1)]
        return gpu.alignment([each.data_ptr() for each in self.strips], strides, self.strips[0].itemsize)

    @cached_property
    def plane_alignment(self) -> int:
        strides = list(self.plane_strides[:3])
        return gpu.alignment([each.data_ptr() for each in self.planes], strides, self.planes[0].itemsize)

    def table(self) -> torch.Tensor:
        """Return a row per strip, as the kernels read it: int64 [strips, 6], on the planes' device, made once and ready
        for the current stream. It holds addresses: it serves as long as this object, which keeps their tensors."""
        rows, stream = self._made
        if stream is not None and stream != torch.cuda.current_stream(rows.device):
            torch.cuda.current_stream(rows.device).wait_stream(stream)
        return rows

    @cached_property
    def _made(self) -> tuple[torch.Tensor, torch.cuda.Stream | None]:
        """The table, and the stream that copies it to a GPU."""
        lines = zip(self.strips, self.planes, self.starts, self.turned, strict=True)
        rows = torch.tensor([
            (strip.data_ptr(), plane.data_ptr(), strip.stride(0), start, strip.shape[1], int(turned))
            for strip, plane, start, turned in lines
        ])  # fmt: skip
        device = self.planes[0].device
        if device.type != "cuda":
            return rows, None
        return rows.pin_memory().to(device, non_blocking=True), torch.cuda.current_stream(device)


def arrive_strips(
    moves: Moves, *, slots: torch.Tensor | None = None, turn: Rotation | None = None, scale: float = 1.0,
    scales: torch.Tensor | None = None, run_tokens: int = RUN_TOKENS,
) -> None:  # fmt: skip
    """Write strips to their places: decoded, and rotated where ``moves`` says so. Nothing else is touched.

    Shapes: ``slots`` int64 [tokens], for pages: the slot of each token, page * page_size + its place there; a token of
    a negative slot is left out. ``turn``: of all tokens, or one for all. ``scale``: of all values; ``scales``: fp32
    [strips, heads, runs], those of quantised strips, in runs of ``run_tokens``.
    Arithmetic: fp32, rounded once. On a GPU slots are not checked, since that would wait for it: what a slot outside
    the pages names is not written.
    Cost: bytes read and written once each, in one launch on a GPU; a copy or more per strip elsewhere.
    Raises: InvalidRequest for shapes that do not fit.
    """
    _check(moves, slots, scales, run_tokens)
    if scales is not None and scale != 1.0:
        raise InvalidRequest("give scale or scales, not both")
    if any(moves.turned):
        if turn is None or 1 < turn.cos.shape[0] < moves.stop:
            raise InvalidRequest(f"turn must be given, of one token or of at least {moves.stop}")
        check_turn(moves.strips[0][:, :1], turn if turn.cos.shape[0] == 1 else turn.of(0, 1))
    used = turn if any(moves.turned) else None
    strip, plane = moves.strips[0], moves.planes[0]
    given = (strip, plane, slots, scales, None if used is None else used.cos)
    scaled = scales is not None or scale != 1.0
    if gpu.serves(*given) and takes(strip.dtype, plane.dtype, turned=used is not None, scaled=scaled):
        if gpu.attempt("arrival", lambda: launch_arrivals(moves, slots, used, scale, scales, run_tokens)):
            gpu.tell_graphs(moves.planes)
            return
    with torch.no_grad():
        for number in range(len(moves.strips)):
            _arrive_one(moves, number, slots, used, scale, scales, run_tokens)


def gather_strips(
    moves: Moves, *, slots: torch.Tensor | None = None, scales: torch.Tensor | None = None, run_tokens: int = RUN_TOKENS
) -> None:
    """Fill strips from their places: the reverse of ``arrive_strips``, without rotation.

    Shapes: as there. With ``scales``, fp32 [strips, heads, runs], strips are int8 or float8_e4m3fn, and quantised: the
    scale of each run of ``run_tokens`` is written there. Without, strips and planes have one dtype. A token of a
    negative slot is left out, and counts in no scale.
    Cost: bytes read and written once each, in one launch on a GPU; a copy or more per strip elsewhere.
    Raises: InvalidRequest for shapes and dtypes that do not fit.
    """
    _check(moves, slots, scales, run_tokens)
    strip, plane = moves.strips[0], moves.planes[0]
    if scales is None and strip.dtype != plane.dtype:
        raise InvalidRequest(f"strips of {strip.dtype} need scales, to be quantised from {plane.dtype}")
    if scales is not None and (strip.dtype not in LIMITS or plane.dtype.itemsize < 2):
        raise InvalidRequest(f"strips of {strip.dtype} cannot be quantised from {plane.dtype}")
    if strip.stride(2) == 1 and gpu.serves(strip, plane, slots, scales):
        limit = LIMITS.get(strip.dtype, 1.0)
        if gpu.attempt("gather", lambda: launch_gather(moves, slots, scales, run_tokens, limit)):
            gpu.tell_graphs([*moves.strips, *(() if scales is None else (scales,))])
            return
    with torch.no_grad():
        for number in range(len(moves.strips)):
            _gather_one(moves, number, slots, scales, run_tokens)


def slots_of(block_table: torch.Tensor, page_size: int, token_count: int) -> torch.Tensor:
    """Return the slots of a sequence's first tokens: int64 [token_count]. ``block_table``: its pages in order."""
    tokens = torch.arange(token_count, device=block_table.device)
    return block_table.long()[tokens // page_size] * page_size + tokens % page_size


def dequantised(strip: torch.Tensor, scales: torch.Tensor, run_tokens: int = RUN_TOKENS) -> torch.Tensor:
    """Return a quantised strip's values, fp32 [heads, tokens, dim]. ``scales``: fp32 [heads, runs]."""
    tokens = strip.shape[1]
    return strip.float() * scales.repeat_interleave(run_tokens, dim=1)[:, :tokens, None]


def quantised(
    strip: torch.Tensor, dtype: torch.dtype, run_tokens: int = RUN_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a strip's values in ``dtype``, [heads, tokens, dim], and the scales of its runs, fp32 [heads, runs]."""
    heads, tokens, dim = strip.shape
    limit, runs = LIMITS[dtype], -(-tokens // run_tokens)
    wide = strip.new_zeros(heads, runs * run_tokens, dim, dtype=torch.float32)
    wide[:, :tokens] = strip
    wide = wide.view(heads, runs, -1)
    broken = ~wide.isfinite().all(-1)
    wide = wide.masked_fill(broken[..., None], 0)
    scales = wide.abs().amax(-1).clamp_min(SCALE_MIN) / limit
    wide = (wide / scales[..., None]).clamp(-limit, limit)
    if dtype == torch.int8:
        wide = wide.round()
    values = wide.view(heads, runs * run_tokens, dim)[:, :tokens].to(dtype)
    return values, scales.masked_fill(broken, torch.nan)


def _arrive_one(
    moves: Moves, number: int, slots: torch.Tensor | None, turn: Rotation | None, scale: float,
    scales: torch.Tensor | None, run_tokens: int,
) -> None:  # fmt: skip
    strip, plane, start = moves.strips[number], moves.planes[number], moves.starts[number]
    tokens = strip.shape[1]
    target = plane[:, start : start + tokens] if slots is None else torch.empty_like(strip, dtype=plane.dtype)
    if scales is not None:
        strip = dequantised(strip, scales[number], run_tokens)
    if turn is not None and moves.turned[number]:
        turn_into(target, strip, turn.of(start, start + tokens), scale)
    else:
        target.copy_(strip if scale == 1.0 else strip.float() * scale)
    if slots is not None:
        at = slots[start : start + tokens]
        kept = (at >= 0).nonzero().flatten()
        plane[at[kept] // moves.page_size, at[kept] % moves.page_size] = target[:, kept].transpose(0, 1)


def _gather_one(
    moves: Moves, number: int, slots: torch.Tensor | None, scales: torch.Tensor | None, run_tokens: int
) -> None:
    strip, plane, start = moves.strips[number], moves.planes[number], moves.starts[number]
    tokens = strip.shape[1]
    if slots is None:
        source, kept = plane[:, start : start + tokens], torch.arange(tokens, device=plane.device)
    else:
        at = slots[start : start + tokens]
        kept = (at >= 0).nonzero().flatten()
        source = plane.new_zeros(strip.shape)
        source[:, kept] = plane[at[kept] // moves.page_size, at[kept] % moves.page_size].transpose(0, 1)
    if scales is None:
        strip[:, kept] = source[:, kept]
        return
    values, found = quantised(source, strip.dtype, run_tokens)
    strip[:, kept] = values[:, kept]
    scales[number, :, : found.shape[1]] = found


def _check(moves: Moves, slots: torch.Tensor | None, scales: torch.Tensor | None, run_tokens: int) -> None:
    if (slots is None) == bool(moves.page_size):
        raise InvalidRequest("slots are for pages, and pages need slots")
    if slots is not None and (slots.dtype != torch.int64 or slots.ndim != 1 or len(slots) < moves.stop):
        raise InvalidRequest(f"slots must be int64 [{moves.stop}], not {slots.dtype} {list(slots.shape)}")
    if run_tokens < 16 or run_tokens & (run_tokens - 1):
        raise InvalidRequest(f"run_tokens {run_tokens} must be a power of two, from 16 up")
    if scales is not None:
        runs = -(-max(each.shape[1] for each in moves.strips) // run_tokens)
        expected = (len(moves.strips), moves.strips[0].shape[0], runs)
        if scales.dtype != torch.float32 or tuple(scales.shape) != expected or not scales.is_contiguous():
            raise InvalidRequest(f"scales must be fp32 {list(expected)}, contiguous, not {list(scales.shape)}")
