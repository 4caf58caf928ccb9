"""Whose cache a vLLM engine computes: what its name must have."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

IDENTITY = "clients/kvstore_client/engines/vllm/identity.py"
T_IDENTITY = "tests/engines/vllm/test_identity.py"
T_WEIGHTS = "tests/engines/vllm/test_weights.py"

MUTANTS = [
    Mutant(
        "quantized-otherwise",
        IDENTITY,
        "    if online is not None:\n",
        "    if False:\n",
        "an engine loads what weights of another quantization computed",
        (f"{T_IDENTITY}::test_what_is_beside_the_configuration_is_in_the_identity",),
    ),
    Mutant(
        "weights-of-the-hubs-own-cache",
        IDENTITY,
        "cache_dir=download_dir, ",
        "",
        "an engine with --download-dir loads what other weights of the same name computed",
        (f"{T_WEIGHTS}::test_weights_are_those_of_the_directory_that_vllm_downloads_to",),
    ),
    Mutant(
        "weights-from-elsewhere",
        IDENTITY,
        "    if load_format not in FROM_FILES or elsewhere:\n",
        "    if False:\n",
        "an engine loads what the model's own files computed, and has other weights",
        (f"{T_WEIGHTS}::test_weights_that_are_not_the_models_own_files_need_a_name",),
    ),
]
