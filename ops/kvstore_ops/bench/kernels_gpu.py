"""gpu-kernels: the kernels of reuse and recompute on a GPU. Arrival, gather and quantisation of all planes of a fetch
over a copy on the device, bytes read and written counted alike; attention of selected rows over a large matmul.

Every kernel is checked against the torch path, or the formula, before it is timed. At the scale full the sizes of
blocks are tried as well: the table names the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvstore.errors import Unavailable
from kvstore.spec import RopeSpec
from kvstore_ops.bench.rates import GROUPS, RUNS_PER_GROUP, Case, Rates
from kvstore_ops.bench.result import Goal, Result, judged_by, show

HEADS, GROUP, DIM, CHUNK_TOKENS, PAGE_TOKENS = 8, 4, 128, 256, 16
LAYERS = {"full": 32, "quick": 32, "tiny": 1}
TOKENS = {"full": (2048, 8192), "quick": (2048, 8192), "tiny": (512,)}
"""256 MiB and 1 GiB of 32 layers."""
CONTEXT = {"full": (4096, 32768), "quick": (4096, 32768), "tiny": (64, 512)}
"""Selected rows, and the keys that they attend over."""
SUFFIX_ROWS = {"full": 512, "quick": 512, "tiny": 32}
MATMUL_ROWS = {"full": 8192, "quick": 8192, "tiny": 256}
COPY_TARGET, MATMUL_TARGET = 0.80, 0.50


class Slabs:
    """Strips as a fetch brings them, [layers, chunks, heads, K and V, 256 tokens, dim], and where they belong."""

    def __init__(self, bench: Rates, tokens: int) -> None:
        import torch
        from kvstore_kernels import rotary_of, rotation
        from kvstore_kernels.rotary import Rotation

        self.layers, self.chunks, self.tokens = LAYERS[bench.scale], tokens // CHUNK_TOKENS, tokens
        self.device = bench.device
        shape = (self.layers, self.chunks, HEADS, 2, CHUNK_TOKENS, DIM)
        self.memory = torch.randn(shape, device=bench.device, dtype=torch.float32).to(torch.bfloat16)
        positions = torch.arange(tokens, device=bench.device)
        turn = rotation(rotary_of(RopeSpec(theta=500000.0, rotary_dim=DIM)), positions + 64, positions % CHUNK_TOKENS)
        self.turn = Rotation(turn.cos.contiguous(), turn.sin.contiguous())
        order = torch.randperm(tokens // PAGE_TOKENS, device=bench.device)
        self.slots = (order[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=bench.device)).flatten()
        self.byte_count = self.memory.nbytes

    def strips(self, memory: Any) -> list[Any]:
        """Return the strips in the order of their planes."""
        return [
            memory[layer, chunk, :, half]
            for layer in range(self.layers) for half in range(2) for chunk in range(self.chunks)
        ]  # fmt: skip

    def planes(self, form: str) -> list[Any]:
        """Return a plane per layer and half, poisoned: dense, or pages as the kernels see them."""
        import torch

        pages = self.tokens // PAGE_TOKENS
        shapes = {
            "dense": (HEADS, self.tokens, DIM),
            "NHD": (pages, PAGE_TOKENS, HEADS, DIM),
            "HND": (pages, HEADS, PAGE_TOKENS, DIM),
        }
        found = [
            torch.full(shapes[form], torch.nan, dtype=torch.bfloat16, device=self.device)
            for _ in range(2 * self.layers)
        ]  # fmt: skip
        return [each.transpose(1, 2) for each in found] if form == "HND" else found

    def moves(self, memory: Any, planes: list[Any], turned: Callable[[int], bool]) -> Any:
        from kvstore_kernels.strips import Moves

        strips, each = self.strips(memory), self.chunks
        starts = [number % each * CHUNK_TOKENS for number in range(len(strips))]
        of_strip = [planes[number // each] for number in range(len(strips))]
        return Moves(strips, of_strip, starts, [turned(number // each) for number in range(len(strips))])

    def rows(self, plane: Any) -> Any:
        """Return a plane's rows in the order of tokens, [heads, tokens, dim]."""
        if plane.ndim == 3:
            return plane
        return plane[self.slots // PAGE_TOKENS, self.slots % PAGE_TOKENS].transpose(0, 1)

    def expected(self, number: int, turned: bool) -> Any:
        from kvstore_kernels.rotary import turn_into

        plane = self.memory[number // 2, :, :, number % 2].transpose(0, 1).reshape(HEADS, self.tokens, DIM)
        if turned:
            turn_into(plane, plane.clone(), self.turn)
        return plane


def _copy_cases(bench: Rates, tokens: int) -> None:
    import torch

    slabs = Slabs(bench, tokens)
    size = f"{slabs.byte_count >> 20} MiB"
    twin = torch.empty_like(slabs.memory)
    work = 2.0 * slabs.byte_count
    bench.add(f"copy, {size}", work, "B/s", 0.0, 0.0, lambda: twin.copy_(slabs.memory))
    limit = bench.cases[f"copy, {size}"].rate
    for form in ("dense", "NHD", "HND"):
        _arrivals(bench, slabs, form, size, limit)
    _gathers(bench, slabs, twin, size, limit)


def _arrivals(bench: Rates, slabs: Slabs, form: str, size: str, limit: float) -> None:
    """Time the arrival of raw planes, of K rotated with V raw, and in dense planes also of every plane rotated."""
    import torch
    from kvstore_kernels.gpu.strips import TokenBlocks, launch_arrivals
    from kvstore_kernels.strips import RUN_TOKENS, arrive_strips

    planes, slots = slabs.planes(form), None if form == "dense" else slabs.slots
    kinds = {"raw": lambda _: False, "K rotated": lambda number: number % 2 == 0, "all rotated": lambda _: True}
    for kind, turned in kinds.items():
        if kind == "all rotated" and form != "dense":
            continue
        moves, turn = slabs.moves(slabs.memory, planes, turned), slabs.turn if kind != "raw" else None
        name = f"arrival {form} {kind}, {size}"

        def check(moves: Any = moves, turn: Any = turn, turned: Any = turned) -> None:
            for plane in planes:
                plane.fill_(torch.nan)
            arrive_strips(moves, slots=slots, turn=turn)
            for number in (0, 1, len(planes) - 1):
                found, right = slabs.rows(planes[number]), slabs.expected(number, turned(number))
                assert not bool(found.isnan().any())
                torch.testing.assert_close(
                    found, right, rtol=2**-7 if turned(number) else 0, atol=1e-2 * turned(number)
                )

        if bench.check(name, check):
            act = partial(arrive_strips, moves, slots=slots, turn=turn)
            bench.add(name, 2.0 * slabs.byte_count, "B/s", limit, COPY_TARGET, act)
        if bench.tries and form == "NHD" and slabs.tokens == TOKENS["full"][-1]:
            ways = {
                f"{blocks.tokens} tokens, {blocks.warps} warps": partial(
                    launch_arrivals, moves, slots, turn, 1.0, None, RUN_TOKENS, blocks
                )
                for blocks in (TokenBlocks(*each) for each in ((16, 4), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8)))
            }
            bench.best(f"arrival {form} {kind}", 2.0 * slabs.byte_count, ways)


def _gathers(bench: Rates, slabs: Slabs, twin: Any, size: str, limit: float) -> None:
    """Time gather of raw strips from pages, quantisation to both dtypes, and the arrival of what was quantised."""
    import torch
    from kvstore_kernels.strips import LIMITS, RUN_TOKENS, arrive_strips, dequantised, gather_strips

    planes, slots = slabs.planes("NHD"), slabs.slots
    arrive_strips(slabs.moves(slabs.memory, planes, lambda _: False), slots=slots)
    moves = slabs.moves(twin, planes, lambda _: False)

    def check() -> None:
        twin.fill_(torch.nan)
        gather_strips(moves, slots=slots)
        assert torch.equal(twin, slabs.memory)

    if bench.check(f"gather, {size}", check):
        bench.add(
            f"gather, {size}", 2.0 * slabs.byte_count, "B/s", limit, COPY_TARGET,
            lambda: gather_strips(moves, slots=slots),
        )  # fmt: skip
    for dtype in LIMITS:
        small = torch.zeros_like(slabs.memory, dtype=dtype)
        to_small, back = slabs.moves(small, planes, lambda _: False), slabs.planes("NHD")
        from_small = slabs.moves(small, back, lambda _: False)
        runs = CHUNK_TOKENS // RUN_TOKENS
        scales = torch.full((len(to_small.strips), HEADS, runs), torch.nan, device=slabs.device)
        name, work = str(dtype).removeprefix("torch."), 1.5 * slabs.byte_count

        def quantise(moves: Any = to_small, scales: Any = scales) -> None:
            gather_strips(moves, slots=slots, scales=scales)

        def decode(moves: Any = from_small, scales: Any = scales) -> None:
            arrive_strips(moves, slots=slots, scales=scales)

        def check_small(
            dtype: Any = dtype, moves: Any = to_small, scales: Any = scales, back: Any = back, decode: Any = decode
        ) -> None:
            quantise(moves, scales)
            decode()
            strip = moves.strips[-1]
            there = slabs.strips(slabs.memory)[-1].float()
            decoded = dequantised(strip, scales[-1])
            assert float((decoded - there).abs().max() / there.abs().max()) < (0.005 if dtype == torch.int8 else 0.04)
            torch.testing.assert_close(slabs.rows(back[-1])[:, -CHUNK_TOKENS:], decoded.to(torch.bfloat16))

        if bench.check(f"quantise {name}, {size}", check_small):
            bench.add(f"quantise to {name}, {size}", work, "B/s", limit, COPY_TARGET, quantise)
            bench.add(f"arrival NHD of {name}, {size}", work, "B/s", limit, COPY_TARGET, decode)


def _rows_cases(bench: Rates) -> None:
    """Time attention, its mass, deviation and the choice of rows."""
    import torch

    count, tokens = CONTEXT[bench.scale]
    size = MATMUL_ROWS[bench.scale]
    one, other = (torch.randn(size, size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    bench.add("matmul", 2.0 * size**3, "FLOP/s", 0.0, 0.0, lambda: one @ other)
    bench.matmul_flops = bench.cases["matmul"].rate
    chosen = torch.randperm(tokens - 64)[: count - 64]
    rows = torch.cat([chosen, torch.arange(tokens - 64, tokens)]).sort().values.to(bench.device)
    q = torch.randn(HEADS * GROUP, count, DIM, device=bench.device).to(torch.bfloat16)
    k, v, fresh_k, fresh_v = (
        torch.randn(HEADS, tokens, DIM, device=bench.device).to(torch.bfloat16) for _ in range(4)
    )  # fmt: skip
    places = torch.arange(tokens, device=bench.device)
    _attention(bench, (q, k, v, rows, places))
    _choice(bench, (fresh_k, fresh_v), (k, v))


def _attention(bench: Rates, given: tuple[Any, ...]) -> None:
    import torch
    from kvstore_kernels import attend, attend_with_mass
    from kvstore_kernels.gpu.attention import AttentionBlocks, Keys, launch_attention, runs_seen

    q, k, v, rows, places = given
    count, tokens, suffix = len(rows), len(places), SUFFIX_ROWS[bench.scale]
    pairs = float((rows + 1).sum())
    limit = bench.matmul_flops
    some = torch.linspace(0, count - 1, 24, device=bench.device).long()
    weights = _weights(q[:, some], k, rows[some], places)
    expected = (weights.unflatten(0, (HEADS, GROUP)) @ v.float()[:, None]).flatten(0, 1)
    page_shape = (tokens // PAGE_TOKENS, PAGE_TOKENS, HEADS, DIM)
    k_pages, v_pages = (each.transpose(0, 1).reshape(page_shape).contiguous() for each in (k, v))

    def close(out: Any) -> None:
        found = out[:, some].float()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=8e-3)  # a row of few keys is as large as a value
        assert float((found - expected).norm() / expected.norm()) < 1e-2

    def check_mass() -> None:
        _, mass = attend_with_mass(q[:, -suffix:], k, v, rows[-suffix:], places, suffix_rows=8)
        right = _weights(q[:, -8:], k, rows[-8:], places).sum((0, 1))
        torch.testing.assert_close(mass, right, rtol=2e-3, atol=1e-5)

    flops = 4.0 * DIM * HEADS * GROUP * pairs
    if bench.check("attention", lambda: close(attend(*given))):
        bench.add("attention, planes", flops, "FLOP/s", limit, MATMUL_TARGET, lambda: attend(*given))
    paged = partial(attend, q, k_pages, v_pages, rows, places, slots=places)
    if bench.check("attention, pages", lambda: close(paged())):
        bench.add("attention, pages", flops, "FLOP/s", limit, 0.0, paged)
    if bench.check("attention with mass", check_mass):
        last, some_pairs = (q[:, -suffix:], k, v, rows[-suffix:], places), float((rows[-suffix:] + 1).sum())
        bench.add(
            f"attention with mass, {suffix} rows", 6.0 * DIM * HEADS * GROUP * some_pairs, "FLOP/s", limit, 0.0,
            lambda: attend_with_mass(*last, suffix_rows=suffix),
        )  # fmt: skip
    if bench.tries:
        out, seen, keys, scale = torch.empty_like(q), runs_seen(rows, places, 0), Keys(k, v), DIM**-0.5
        sizes = ((128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2))
        ways = {
            str(each): partial(launch_attention, q, keys, seen, scale, out, None, AttentionBlocks(*each))
            for each in sizes
        }
        bench.best("attention", flops, ways)


def _weights(q: Any, k: Any, rows: Any, places: Any) -> Any:
    """Return the attention of a few rows by the formula, fp32 [heads, rows, tokens]."""
    scores = (q.float().unflatten(0, (HEADS, GROUP)) @ k.float()[:, None].transpose(-1, -2)).flatten(0, 1) * DIM**-0.5
    return scores.masked_fill(rows[:, None] < places, float("-inf")).softmax(-1)


def _choice(bench: Rates, fresh: tuple[Any, Any], cached: tuple[Any, Any]) -> None:
    import torch
    from kvstore_kernels import deviation_of, highest

    tokens = fresh[0].shape[1]
    copied = next((case.rate for name, case in bench.cases.items() if name.startswith("copy")), 0.0)
    found = deviation_of(fresh, cached)

    def check() -> None:
        right = sum(
            (a[:, :256].float() - b[:, :256].float()).square().sum((0, 2)) for a, b in zip(fresh, cached, strict=True)
        )
        torch.testing.assert_close(found[:256], right, rtol=1e-4, atol=1e-4)

    if bench.check("deviation", check):
        byte_count = 4.0 * fresh[0].nbytes
        bench.add("deviation, bytes read", byte_count, "B/s", copied, 0.0, lambda: deviation_of(fresh, cached))
    count = tokens * 15 // 100
    bench.add("torch.topk, ties in any order", tokens, "token/s", 0.0, 0.0, lambda: found.topk(count))
    known = bench.cases["torch.topk, ties in any order"].rate
    bench.add("top 15 %, in order", tokens, "token/s", known, 0.0, lambda: highest(found, count))


def run(scale: str) -> Result:
    """Measure all kernels. Raises Unavailable without a GPU, except at the scale tiny, where torch runs on the CPU."""
    import torch
    from kvstore_kernels import gpu

    if not torch.cuda.is_available() and scale != "tiny":
        raise Unavailable("gpu-kernels measures a CUDA device, and torch finds none")
    bench = Rates("cuda" if torch.cuda.is_available() else "cpu", scale)
    with torch.inference_mode():
        for tokens in TOKENS[scale]:
            bench.check(f"copies of {tokens} tokens", partial(_copy_cases, bench, tokens))
        bench.check("rows", partial(_rows_cases, bench))
    bench.errors.update({f"the {name} kernel": why for name, why in gpu.failures.items()})
    show("gpu-kernels", list(_lines(bench)))
    judged = {name: case for name, case in bench.cases.items() if case.target}
    worst = min(judged, key=lambda name: judged[name].ratio / judged[name].target)
    case = judged[worst]
    return Result(
        name="gpu-kernels", value=case.rate, unit=case.unit, limit=case.limit, ratio=case.ratio,
        **judged_by(
            *(Goal(name, each.ratio, each.target) for name, each in judged.items()),
            Goal("kernels that failed", len(bench.errors), 0, is_upper=True),
        ),
        runs=GROUPS[scale] * RUNS_PER_GROUP, spread=case.spread,
        conditions={
            "scale": scale, "device": bench.device, "judged_case": worst, "errors": bench.errors,
            "cases": {name: _told(each) for name, each in bench.cases.items()},
            "blocks": bench.tried,
        },
    )  # fmt: skip


def _told(case: Case) -> dict[str, Any]:
    """Return a case as plain values. Without a target it is a limit, or shown beside the others."""
    return {
        "value": case.rate, "unit": case.unit, "limit": case.limit, "ratio": case.ratio,
        "met": case.ratio >= case.target, "target": f">= {case.target}" if case.target else "",
    }  # fmt: skip


def _lines(bench: Rates) -> Iterator[tuple[str, str]]:
    for name, case in bench.cases.items():
        rate = (
            f"{case.rate / 1e9:,.1f} G{case.unit}" if case.unit != "token/s" else f"{case.rate / 1e6:,.1f} M{case.unit}"
        )
        of_limit = f", {case.ratio:.3f} of its limit" if case.limit else ""
        missed = f" (target {case.target}{', MISSED' if case.ratio < case.target else ''})" if case.target else ""
        yield name, f"{rate}{of_limit}{missed}"
    for kernel, found in bench.tried.items():
        for blocks, speed in sorted(found.items(), key=lambda each: -each[1]):
            yield f"blocks of {kernel}: {blocks}", f"{speed / 1e9:,.1f} G/s"
    for name, why in bench.errors.items():
        yield f"FAILED {name}", why[:400]
