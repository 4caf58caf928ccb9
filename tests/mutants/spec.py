"""Specs: what is no model's is refused, and what is refused is named."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MODEL = "kvstore/spec/model.py"
T_KEYS = "tests/keys/test_keys.py"

MUTANTS = [
    Mutant(
        "spec-in-another-form",
        MODEL,
        "        if spec.canonical != canonical:\n",
        "        if False:\n",
        "one model has two names, of which one says less",
        (f"{T_KEYS}::test_canonical_spec_comes_back_and_garbage_does_not",),
    ),
    Mutant(
        "weights-without-a-digest",
        MODEL,
        "    if not (unverified or _is_hex(digest)) or len(digest) > 512:\n",
        "    if len(digest) > 512:\n",
        "weights are named by anything, and two models by the same",
        (f"{T_KEYS}::test_a_wrong_spec_is_refused",),
    ),
    Mutant(
        "scales-of-fewer-layers",
        MODEL,
        "    if spec.scales and len(spec.scales) != len(spec.layers):\n",
        "    if False:\n",
        "a quantized layer is read without its scale",
        (f"{T_KEYS}::test_a_wrong_spec_is_refused",),
    ),
    Mutant(
        "recurrent-layers-kept",
        MODEL,
        "    if layer.kind is LayerKind.RECURRENT:\n",
        "    if False:\n",
        "a state that depends on all tokens is kept as if it were a token's own",
        (f"{T_KEYS}::test_a_wrong_spec_is_refused",),
    ),
]
