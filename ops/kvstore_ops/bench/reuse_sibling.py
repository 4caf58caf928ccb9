"""reuse-sibling: as the benchmark reuse, of a sibling that was fine-tuned from the pretrained model. It reuses the
pretrained model's cache of the same prompt, and is compared with its own full prefill. ``python -m
kvstore_ops.pretrained sibling`` makes it; where it is missing, and at the scale tiny, the testbed's siblings answer."""

from __future__ import annotations

from kvstore_ops.bench.result import Result


def run(scale: str) -> Result:
    """Measure all settings. The figure is that of the setting chosen on half of the contexts, on the other half."""
    from kvstore_ops.reuse.settings import Asking
    from kvstore_ops.reuse.whole import measured

    return measured(Asking.SIBLING, scale)
