"""Every way to store against every way to read, beside a dict: random models, prompts, cuts, planes, devices and
restarts. Whatever comes is what the dict has, to the bit; with room for all of it, all of it comes.

``KVSTORE_DIFFERENTIAL_SEED`` repeats one that failed; each failure says its seed.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.e2e.differential import live

IS_FULL = os.environ.get("KVSTORE_TEST_SCALE") == "full"
STEPS = 60 if IS_FULL else 12


@pytest.mark.parametrize("number", range(12 if IS_FULL else 2))
def test_what_is_read_is_what_a_dict_would_have(number: int) -> None:
    chosen = random.SystemRandom().randrange(1 << 20) if IS_FULL else number
    seed = int(os.environ.get("KVSTORE_DIFFERENTIAL_SEED", chosen))
    print(f"KVSTORE_DIFFERENTIAL_SEED={seed}, number {number}")  # pytest shows it where the test fails
    assert live(seed, number, steps=STEPS, reads=4 if IS_FULL else 3).compared > STEPS
