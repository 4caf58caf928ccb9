"""Benchmarks: one per file, each prints its figure beside the limit measured in the same run."""

SHARED = frozenset({"result", "copying", "model_1b", "paged", "recomputed", "memory"})
"""Modules of this package that are no benchmark."""
