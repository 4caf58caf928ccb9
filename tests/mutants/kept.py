"""What a restart keeps of models and pins: a file says nothing wrong of a model, and no pin outlives its end."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEPT = "kvstore/server/kept.py"
PINS = "kvstore/controller/pins.py"
T_MODELS = "tests/server/test_kept_models.py"
T_PINS = "tests/controller/test_pins.py"
T_RATES = "tests/server/test_rates.py"

MUTANTS = [
    Mutant(
        "a-kept-spec-under-another-name",
        KEPT,
        "                if fingerprint(spec, spec.kind).hex() == name:\n",
        "                if True:\n",
        "a spec that was packed under another name refuses that model's engines their own geometry",
        (f"{T_MODELS}::test_a_spec_that_is_another_models_or_none_registers_nothing",),
    ),
    Mutant(
        "kept-models-leave-no-room",
        KEPT,
        "        self._count_max = model_count_max // 2\n",
        "        self._count_max = model_count_max\n",
        "models with chunks on the device take all places, and a restart no longer lets new engines in",
        (f"{T_MODELS}::test_past_the_limits_those_used_last_are_kept",),
    ),
    Mutant(
        "unwritten-news-is-forgotten",
        KEPT,
        "        self._is_owed = True\n",
        "        self._is_owed = False\n",
        "a pin whose write failed once is never written",
        (f"{T_RATES}::test_a_write_that_nobody_makes_ends_nothing_and_is_owed",),
    ),
    Mutant(
        "pins-without-end",
        PINS,
        "                    if row is not None and (not end or rest_s > 0):\n",
        "                    if row is not None:\n",
        "a pin that ended while the service was down comes back",
        (f"{T_PINS}::test_pins_come_back_with_their_ends_and_what_they_hang_on",),
    ),
    Mutant(
        "ended-pins-stay-in-the-file",
        PINS,
        "        self.is_changed = has_tiers and len(self) != sum(map(len, found.values()))\n",
        "        self.is_changed = False\n",
        "a pin whose chunk is gone pins that chunk when it is stored again, one restart later",
        (f"{T_PINS}::test_pins_come_back_with_their_ends_and_what_they_hang_on",),
    ),
]
