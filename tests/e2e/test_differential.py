"""Every way to store against every way to read, beside a dict: random models, prompts, cuts, planes, devices and
restarts. Whatever comes is what the dict has, to the bit; with room for all of it, all of it comes.

``KVSTORE_DIFFERENTIAL_SEED`` repeats one that failed; each failure says its seed.
"""

from __future__ import annotations

import os
import random

import pytest
from kvstore_ops.sidecar import Sidecar

from tests.e2e.differential import World

IS_FULL = os.environ.get("KVSTORE_TEST_SCALE") == "full"
STEPS = 60 if IS_FULL else 12
READS = 4 if IS_FULL else 3
RESTART_EACH = 8


def run(seed: int, encoding: str, *, is_roomy: bool, steps: int) -> int:
    environment = {**os.environ, "KVSTORE__TIERS__NVME__ENCODING": encoding}
    capacity, nvme = ("128 MiB", "256 MiB") if is_roomy else ("12 MiB", "48 MiB")
    with Sidecar("--capacity", capacity, nvme=nvme, environment=environment, plane="remote") as sidecar:
        world = World(seed, sidecar, is_roomy=is_roomy)
        try:
            for number in range(steps):
                world.store(world.make(number))
                for kept in [world.prompts[-1], *world.chance.choices(world.prompts, k=READS - 1)]:
                    world.read(kept)
                if number % 4 == 1:
                    world.put_value()
                if number % 4 == 3:
                    world.put_embeddings()
                if number % RESTART_EACH == RESTART_EACH - 1:
                    world.restart()
                    world.read_values()
            for kept in world.prompts:
                world.read(kept)
            world.read_values()
        finally:
            world.close()
    return world.compared


@pytest.mark.parametrize("number", range(12 if IS_FULL else 2))
def test_what_is_read_is_what_a_dict_would_have(number: int) -> None:
    seed = int(
        os.environ.get("KVSTORE_DIFFERENTIAL_SEED", random.SystemRandom().randrange(1 << 20) if IS_FULL else number)
    )
    encoding = ("raw", "lz4")[number % 2]
    print(f"KVSTORE_DIFFERENTIAL_SEED={seed}, {encoding}")  # pytest shows it where the test fails
    assert run(seed, encoding, is_roomy=number % 4 < 2, steps=STEPS) > STEPS
