"""``make fuzz``: random models, prompts and values through every door and both planes, beside a dict, with evictions,
damage on the device, kills and restarts in between. It ends after so many reads, or at the first that is wrong."""

from __future__ import annotations

import argparse
import random
import time

from tests.e2e.differential import live

STEPS, READS = 60, 4


def main() -> None:
    """Worlds one after the other; each says its seed before it begins."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Compare reads with a dict.")
    parser.add_argument("--reads", type=int, default=10_000, help="end after so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20), help="the first world's")
    given = parser.parse_args()
    began, reads, hits, compared, damaged, number = time.monotonic(), 0, 0, 0, 0, 0
    while reads < given.reads:
        print(f"world {number}, seed {given.seed + number}: ", end="", flush=True)
        world = live(given.seed + number, number, steps=STEPS, reads=READS)
        reads, hits, compared = reads + world.read_count, hits + world.hit_count, compared + world.compared
        damaged, number = damaged + world.damaged, number + 1
        print(
            f"{time.monotonic() - began:.0f} s, {reads:,} reads, {hits:,} hits, {compared:,} arrays compared, "
            f"{damaged:,} bits flipped on the device",
            flush=True,
        )
    print("every byte was right")


if __name__ == "__main__":
    main()
