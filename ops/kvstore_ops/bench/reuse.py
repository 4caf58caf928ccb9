"""reuse: the share of a pretrained model's answers that lossy reuse keeps, and its speed-up, one row per setting.

Prompts are questions about documents of real text (``kvstore_ops.pretrained.questions``); each document was computed
by itself, or behind the prompt's own preamble. For every setting the table has f; the time to the first token through
a sidecar beside a full prefill in one pass; of the answers that are right after a full prefill, the share that is
kept whole; the share of kept tokens; and the KL divergence. Every other context chooses a setting: the fastest that
keeps what the target asks for with two standard errors to spare. The figure is that setting's on the other contexts.
A quick run has one context, and chooses nothing. The trained testbed model answers when the pretrained model is
missing, and at the scale tiny. A full run's answers are kept in a file, and asked once: ``python -m
kvstore_ops.reuse`` asks them beforehand.
"""

from __future__ import annotations

from kvstore_ops.bench.result import Result


def run(scale: str) -> Result:
    """Measure all settings. The figure is that of the setting chosen on half of the contexts, on the other half."""
    from kvstore_ops.reuse.settings import Asking
    from kvstore_ops.reuse.whole import measured

    return measured(Asking.OWN, scale)
