"""kernels: the rate at which K and V arrive in the engine's cache, raw and rotated with fp32 arithmetic, over a
two-thread memcpy of the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from kvstore.errors import Unavailable
from kvstore.spec import RopeSpec
from kvstore_ops.bench.copying import LAYERS, timed
from kvstore_ops.bench.result import Goal, Result, judged_by, quartiles, show

RAW_TARGET = 0.80
ROTATED_TARGET = 0.25
THREADS = 2
HEADS, DIM = 8, 128
TOKENS = {"full": 2048, "quick": 2048, "tiny": 256}
RUNS = {"full": 40, "quick": 15, "tiny": 2}
DOCUMENT_TOKENS = 256
SECOND_THREAD_MIN = 1.5
TRIES = 20


class Layers:
    """K and V planes of every layer, and the planes where they arrive; all pre-faulted. 8B geometry, bf16."""

    def __init__(self, scale: str) -> None:
        import torch

        count, tokens = LAYERS[scale], TOKENS[scale]
        shape = (HEADS, tokens, DIM)
        generator = torch.Generator().manual_seed(1)
        plane = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.sources = [plane.clone() for _ in range(2 * count)]
        self.targets = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(2 * count)]
        self.byte_count = sum(source.nbytes for source in self.sources)
        self.turn = _turn(tokens)

    def each(self, kernel: Callable[[Any, Any], object], into: list[Any]) -> Callable[[], None]:
        """Return a function that runs the kernel on every source and its target."""

        def run() -> None:
            for source, target in zip(self.sources, into, strict=True):
                kernel(source, target)

        return run


def _turn(tokens: int) -> Any:
    """Return the rotation of documents of 256 tokens from position 0, where each was computed, to their places in a
    prompt."""
    import torch
    from kvstore_kernels import rotary_of, rotation

    rotary = rotary_of(RopeSpec(theta=500000.0, rotary_dim=DIM))
    positions = torch.arange(tokens)
    return rotation(rotary, positions + 64, positions % DOCUMENT_TOKENS)


def _actions(layers: Layers) -> dict[str, Callable[[], None]]:
    from kvstore_kernels import arrive

    turn, planes = layers.turn, layers.targets

    def k_and_v() -> None:
        for number, (source, target) in enumerate(zip(layers.sources, planes, strict=True)):
            arrive(source, target, turn=turn if number % 2 == 0 else None)

    return {
        "memcpy": layers.each(lambda source, target: target.view(-1).copy_(source.view(-1)), planes),
        "raw": layers.each(arrive, planes),
        "rotated": layers.each(lambda source, target: arrive(source, target, turn=turn), planes),
        "k_and_v": k_and_v,
    }


def run(scale: str) -> Result:
    """Measure interleaved pairs of each kernel and a memcpy, with two threads of torch, after a warm-up of all."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        return _measured(scale)
    finally:
        torch.set_num_threads(before)


def _measured(scale: str) -> Result:
    layers = Layers(scale)
    actions = _actions(layers)
    gain = _second_thread(actions["rotated"], scale)
    ratios: dict[str, list[float]] = {name: [] for name in actions if name != "memcpy"}
    limits: list[float] = []
    for action in actions.values():
        action()
    for _ in range(RUNS[scale]):
        for name, found in ratios.items():
            limits.append(timed(actions["memcpy"]))
            found.append(limits[-1] / timed(actions[name]))
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    limit = layers.byte_count / statistics.median(limits)
    show(
        f"kernels: {layers.byte_count >> 20} MiB, {RUNS[scale]} pairs each",
        [
            ("arrival raw", f"{medians['raw']:.3f} of a memcpy"),
            ("arrival rotated, all of it", f"{medians['rotated']:.3f}"),
            ("arrival of K rotated and V raw", f"{medians['k_and_v']:.3f}"),
            ("memcpy, 2 threads", f"{limit / 1e9:.2f} GB/s"),
            ("what the second thread brings to rotation", f"{gain:.2f}"),
        ],
    )
    ratio = min(medians["raw"], medians["rotated"])
    return Result(
        name="kernels", value=medians["rotated"] * limit, unit="B/s", limit=limit, ratio=ratio,
        **judged_by(Goal("raw", medians["raw"], RAW_TARGET), Goal("rotated", medians["rotated"], ROTATED_TARGET)),
        runs=RUNS[scale], spread=quartiles(ratios["rotated"]),
        conditions={
            "scale": scale, "bytes": layers.byte_count, "warm": True, "threads": THREADS, "second_thread": gain,
            **{f"{name}_ratio": value for name, value in medians.items()},
        },
    )  # fmt: skip


def _second_thread(rotated: Callable[[], None], scale: str) -> float:
    """Return the speed-up of rotation by the second thread, the best of a few tries. A kernel that computes is taken
    because copies may gain little: one thread's streaming stores nearly fill the bandwidth of some memories.

    Raises Unavailable when the second thread hardly gets a core: every ratio would mislead.
    """
    import torch

    rotated()
    best = 0.0
    for _ in range(1 if scale == "tiny" else TRIES):
        torch.set_num_threads(1)
        one = timed(rotated)
        torch.set_num_threads(THREADS)
        best = max(best, one / timed(rotated))
        if best >= SECOND_THREAD_MIN:
            break
    if scale != "tiny" and best < SECOND_THREAD_MIN:
        raise Unavailable(f"two threads do {best:.2f} times what one does: a core is missing, measure again")
    return best
