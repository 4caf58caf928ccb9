"""Specs: what is no model's is refused, and what is refused is named."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MODEL = "kvstore/spec/model.py"
T_KEYS = "tests/keys/test_keys.py"

MUTANTS = [
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
    Mutant(
        "configuration-is-not-in-the-key",
        "kvstore/spec/configuration.py",
        "    told = json.dumps([configuration, dict(beside or {})], sort_keys=True).encode()\n",
        "    told = json.dumps(dict(beside or {}), sort_keys=True).encode()\n",
        "a model with another rotation or norm is served the first one's cache",
        ("tests/engines/test_key_of_transformers.py::test_an_attribute_that_nobody_knows_counts",),
    ),
    Mutant(
        "tables-beside-are-not-in-the-key",
        "kvstore/spec/live.py",
        "        if odd:\n",
        "        if False:\n",
        "a model whose rotations were rounded shares its cache with one whose were not",
        ("tests/engines/test_key_of_transformers.py::test_dtype_adapter_and_kernels_of_attention_are_in_the_key",),
    ),
    Mutant(
        "weights-that-changed-in-place",
        "kvstore/spec/live.py",
        "        return tensors is not None and self._watch.holds(tensors)\n",
        "        return tensors is not None\n",
        "after an adapter was merged the old weights' cache is served",
        ("tests/engines/test_changing_weights.py::test_a_change_in_place_is_seen_at_the_next_use",),
    ),
    Mutant(
        "hooks-that-change-what-passes",
        "kvstore/spec/plain.py",
        "        if not _observes(hook):\n",
        "        if False:\n",
        "an adapter's cache is kept under the plain model's name",
        ("tests/engines/test_key_of_transformers.py::test_a_forward_pass_that_is_not_the_configurations_has_no_key",),
    ),
    Mutant(
        "wrappers-by-their-names",
        "kvstore/spec/plain.py",
        'variables.get("__name__", "torch")',
        'variables.get("", "torch")',
        "what a wrapper changes is kept under the plain model's name",
        ("tests/engines/test_what_no_tensor_says.py::test_what_only_the_process_knows_has_no_key",),
    ),
    Mutant(
        "another-models-spec",
        "clients/kvstore_client/engines/transformers_spec.py",
        "    for name in sorted(wrong, key",
        "    for name in sorted(wrong and [], key",
        "one model is served another's cache",
        ("tests/engines/test_generate_options.py::test_another_models_spec_is_refused_by_both_digests",),
    ),
    Mutant(
        "options-that-nobody-knows",
        "clients/kvstore_client/engines/transformers_options.py",
        "        if name not in HONOURED and value not in NEUTRAL.get(name, ()):\n",
        "        if False:\n",
        "an option that changes what K and V are is ignored",
        ("tests/engines/test_generate_options.py::test_every_other_option_is_left_to_transformers",),
    ),
    Mutant(
        "rotations-of-the-prompts-length",
        "clients/kvstore_client/engines/transformers_options.py",
        "    if rope_kind not in KINDS:\n",
        "    if False:\n",
        "prompts share a beginning that they do not have",
        (
            "tests/engines/test_generate_options.py::test_a_rotation_that_depends_on_the_prompts_length_is_left_to_transformers",
        ),
    ),
    Mutant(
        "decoders-that-see-what-comes-later",
        "kvstore/spec/from_transformers.py",
        '    if not getattr(config, "is_causal", True):',
        "    if False:",
        "a prompt's beginning is served to prompts that go on otherwise, though it was computed with all of the first",
        (
            "tests/engines/test_generate_options.py::test_a_model_that_sees_what_comes_later_has_no_spec_and_is_left_to_transformers",
        ),
    ),
    Mutant(
        "tensors-without-their-shape",
        "kvstore/spec/weights.py",
        '        head = f"{name}\\0{state[name].dtype}\\0{tuple(state[name].shape)}\\0"\n',
        '        head = f"{name}\\0"\n',
        "two models whose bytes are alike and whose shapes are not share a name",
        (
            "tests/engines/test_changing_weights.py::test_the_same_bytes_under_another_name_shape_or_dtype_are_other_weights",
        ),
    ),
]
