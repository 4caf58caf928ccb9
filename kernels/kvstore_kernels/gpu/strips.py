"""Launches of arrival and gather: strips of all planes of a fetch, or one plane, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from kvstore_kernels.gpu import alignment, on_device, power_of_two
from kvstore_kernels.rotary import Rotation

if TYPE_CHECKING:
    from kvstore_kernels.strips import Moves

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DECODED = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
PROGRAMS_MIN = 1024
"""Programs that fill a large GPU a few times over: with fewer, each takes fewer heads."""
HEADS_MAX = 8
SCALE_MIN = 2.0**-100
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TokenBlocks:
    """A program's tokens and warps."""

    tokens: int = 32
    warps: int = 4


ARRIVAL, GATHER, TABLED = TokenBlocks(), TokenBlocks(), TokenBlocks()
TABLED_HEADS = 2
"""Heads of a program of ``TableLaunch``: one number, so that one kernel serves tables of all sizes."""


def takes(strip: torch.dtype, plane: torch.dtype, *, turned: bool, scaled: bool) -> bool:
    """Return True for dtypes between which the arrival kernel converts: any, if they are copied as they are."""
    if strip == plane and not turned and not scaled:
        return strip.itemsize in _WHOLE
    return strip in DECODED and plane in FLOATS


def launch_arrival(
    source: torch.Tensor, target: torch.Tensor, turn: Rotation | None, scale: float, blocks: TokenBlocks = ARRIVAL
) -> bool:
    """See ``arrive``. Returns True."""
    raw = source.dtype == target.dtype and turn is None and scale == 1.0
    if raw:
        source, target = (each.view(_WHOLE[each.itemsize]) for each in (source, target))
    heads, tokens, dim = source.shape
    if not source.numel():
        return True
    programs, count, per, groups = _grid(1, tokens, heads, blocks)
    strides = source.stride(), target.stride()
    cos, sin, step = _angles(turn, source)
    with on_device(source):
        _programs().arrive_program[(programs,)](
            source, target, source, source, cos, sin, source, scale, tokens, heads, count, groups, 0, 0,
            strides[0][0], strides[0][1], strides[0][2], 0, strides[1][1], strides[1][0], strides[1][2], step,
            DIM=dim, PAIRS=0 if turn is None else turn.cos.shape[-1], PAGE_SIZE=0, TABLED=False, RAW=raw,
            SCALES=int(scale != 1.0), RUN=1,
            ALIGN_STRIP=alignment([source.data_ptr()], list(strides[0][:2]), source.itemsize),
            ALIGN_PLANE=alignment([target.data_ptr()], list(strides[1][:2]), target.itemsize),
            **_widths(dim, turn), BLOCK_T=blocks.tokens, HEADS=per, num_warps=blocks.warps,
        )  # fmt: skip
    return True


def launch_arrivals(
    moves: Moves, slots: torch.Tensor | None, turn: Rotation | None, scale: float, scales: torch.Tensor | None,
    run_tokens: int, blocks: TokenBlocks = ARRIVAL,
) -> bool:  # fmt: skip
    """See ``arrive_strips``. Returns True."""
    strip, plane, table = moves.strips[0], moves.planes[0], moves.table()
    heads, _, dim = strip.shape
    tokens = max(each.shape[1] for each in moves.strips)
    programs, count, per, groups = _grid(len(moves.strips), tokens, heads, blocks)
    page, row, plane_head, plane_dim = moves.plane_strides
    cos, sin, step = _angles(turn, table)
    with on_device(table):
        _programs().arrive_program[(programs,)](
            strip, plane, table, table if slots is None else slots, cos, sin, table if scales is None else scales,
            scale, 0, heads, count, groups, 0 if scales is None else scales.shape[2], moves.slot_stop,
            0, strip.stride(1), strip.stride(2), page, row, plane_head, plane_dim, step,
            DIM=dim, PAIRS=0 if turn is None else turn.cos.shape[-1], PAGE_SIZE=moves.page_size, TABLED=True,
            RAW=strip.dtype == plane.dtype and scales is None and scale == 1.0,
            SCALES=2 if scales is not None else int(scale != 1.0), RUN=run_tokens,
            ALIGN_STRIP=moves.strip_alignment, ALIGN_PLANE=moves.plane_alignment,
            **_widths(dim, turn), BLOCK_T=blocks.tokens, HEADS=per, num_warps=blocks.warps,
        )  # fmt: skip
    return True


def launch_gather(
    moves: Moves, slots: torch.Tensor | None, scales: torch.Tensor | None, run_tokens: int, limit: float,
    blocks: TokenBlocks = GATHER,
) -> bool:  # fmt: skip
    """See ``gather_strips``. Returns True."""
    strip, plane, table = moves.strips[0], moves.planes[0], moves.table()
    heads, _, dim = strip.shape
    tokens = max(each.shape[1] for each in moves.strips)
    if scales is not None:
        blocks = TokenBlocks(run_tokens, max(blocks.warps, min(16, run_tokens * power_of_two(dim) // 2048)))
    programs, count, per, groups = _grid(len(moves.strips), tokens, heads, blocks)
    page, row, plane_head, plane_dim = moves.plane_strides
    kind = 0 if scales is None else 1 if strip.dtype == torch.int8 else 2
    with on_device(table):
        _programs().gather_program[(programs,)](
            strip, plane, table, table if slots is None else slots, table if scales is None else scales, heads, count,
            groups, 0 if scales is None else scales.shape[2], moves.slot_stop, strip.stride(1), page, row, plane_head,
            plane_dim, limit,
            DIM=dim, PAGE_SIZE=moves.page_size, QUANTISED=kind, LEAST=SCALE_MIN, ALIGN_STRIP=moves.strip_alignment,
            ALIGN_PLANE=moves.plane_alignment, BLOCK_T=blocks.tokens, BLOCK_D=power_of_two(dim), HEADS=per,
            num_warps=blocks.warps,
        )  # fmt: skip
    return True


@dataclass(frozen=True)
class TableLaunch:
    """A launch over a table that the caller has made: strips and planes of plain integers, copied as they are.

    Shapes: the planes as those of ``Moves``; strips [heads, tokens, dim], whose dims lie one behind the other.
    """

    program: str
    """``arrive``: strips to planes; ``gather``: planes to strips."""
    item: torch.dtype
    heads: int
    dim: int
    tokens: int
    """The most that a strip has."""
    page_size: int
    slot_stop: int
    strides: tuple[int, int, int, int]
    """Of the planes: pages, rows, heads and dims, in items."""
    alignments: tuple[int, int]

    @staticmethod
    def of(program: str, plane: torch.Tensor, heads: int, tokens: int, strip_bits: int, plane_bits: int) -> TableLaunch:
        """Return the launch for planes like ``plane``. ``strip_bits``: the strips' addresses, and of their heads'
        distances in bytes, or-ed; ``plane_bits``: the planes' addresses."""
        size, strides = plane.element_size(), plane.stride()
        paged = plane.ndim == 4
        page, row, head, dim = strides if paged else (0, strides[1], strides[0], strides[2])
        aligned = (
            alignment([int(strip_bits)], [plane.shape[-1]], size),
            alignment([int(plane_bits)], [page, row, head], size),
        )
        page_size = plane.shape[1] if paged else 0
        return TableLaunch(
            program, _WHOLE[size], heads, plane.shape[-1], tokens, page_size, plane.shape[0] * page_size,
            (page, row, head, dim), aligned,
        )  # fmt: skip

    def run(self, table: torch.Tensor, slots: torch.Tensor | None) -> bool:
        """Queue the launch, and return True. ``table``: int64 [strips, 6] on the planes' device, as ``Moves.table``;
        ``slots``: as that of ``arrive_strips``, for pages."""
        blocks = TABLED
        count = -(-self.tokens // blocks.tokens)
        groups = -(-self.heads // TABLED_HEADS)
        page, row, plane_head, plane_dim = self.strides
        typed = table.view(torch.int64).view(self.item)
        grid = (len(table) * count * groups,)
        with on_device(table):
            if self.program == "gather":
                _programs().gather_program[grid](
                    typed, typed, table, table if slots is None else slots, table, self.heads, count, groups, 0,
                    self.slot_stop, self.dim, page, row, plane_head, plane_dim, 1.0,
                    DIM=self.dim, PAGE_SIZE=self.page_size, QUANTISED=0, LEAST=SCALE_MIN,
                    ALIGN_STRIP=self.alignments[0], ALIGN_PLANE=self.alignments[1], BLOCK_T=blocks.tokens,
                    BLOCK_D=power_of_two(self.dim), HEADS=TABLED_HEADS, num_warps=blocks.warps,
                )  # fmt: skip
                return True
            _programs().arrive_program[grid](
                typed, typed, table, table if slots is None else slots, table, table, table, 1.0, 0, self.heads, count,
                groups, 0, self.slot_stop, 0, self.dim, 1, page, row, plane_head, plane_dim, 0,
                DIM=self.dim, PAIRS=0, PAGE_SIZE=self.page_size, TABLED=True, RAW=True, SCALES=0, RUN=1,
                ALIGN_STRIP=self.alignments[0], ALIGN_PLANE=self.alignments[1], **_widths(self.dim, None),
                BLOCK_T=blocks.tokens, HEADS=TABLED_HEADS, num_warps=blocks.warps,
            )  # fmt: skip
        return True


def _programs() -> ModuleType:
    from kvstore_kernels.gpu.programs import strips

    return strips


def _grid(entries: int, tokens: int, heads: int, blocks: TokenBlocks) -> tuple[int, int, int, int]:
    """Return (programs, blocks of tokens, heads of a program, groups of heads)."""
    count = -(-tokens // blocks.tokens)
    per = min(HEADS_MAX, power_of_two(heads))
    while per > 1 and entries * count * -(-heads // per) < PROGRAMS_MIN:
        per //= 2
    groups = -(-heads // per)
    return entries * count * groups, count, per, groups


def _angles(turn: Rotation | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return cosines, sines and the distance of their rows, 0 where all turn alike; ``other`` stands for none."""
    if turn is None:
        return other, other, 0
    cos, sin = turn.cos.contiguous(), turn.sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.shape[1]


def _widths(dim: int, turn: Rotation | None) -> dict[str, int]:
    pairs = 0 if turn is None else turn.cos.shape[-1]
    return {
        "BLOCK_D": power_of_two(dim), "BLOCK_P": power_of_two(pairs), "BLOCK_R": power_of_two(dim - 2 * pairs)
    }  # fmt: skip
