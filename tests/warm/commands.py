"""The commands with all options of ``serve``, built. Sidecars that start warm find them."""

from __future__ import annotations

from kvstore_ops.cli import command

for option in command().commands["serve"].params:
    option.get_runtime_param()
