"""The demo's text, its verdict, its table and its picture. The demo itself runs in ``make demo``."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from kvstore_ops.demo.scene import Outcome
from kvstore_ops.demo.show import picture, table
from kvstore_ops.demo.stage import verdict
from kvstore_ops.demo.text import prompt_tokens
from rich.console import Console

COLD = Outcome(
    name="cold", pid=1, token_count=4160, reused_token_count=0, tier="none", lookup_s=0.01, fetch_s=0.0,
    prefill_s=5.9, ttft_s=6.0, total_s=7.0, one_pass_s=5.0, fetched_bytes=0, stored="memory", tokens=[1, 2],
)  # fmt: skip
WARM = replace(
    COLD, name="warm", pid=2, reused_token_count=4096, ttft_s=0.25, prefill_s=0.24, fetch_s=0.1, total_s=1.0,
    one_pass_s=0.0, fetched_bytes=50_000_000,
)  # fmt: skip


def test_the_promise_is_checked() -> None:
    console = Console(quiet=True)
    assert verdict([COLD, WARM], console) == 0
    assert verdict([COLD, replace(WARM, tokens=[1, 3])], console) == 1
    assert verdict([COLD, replace(WARM, reused_token_count=0)], console) == 1


def test_the_table_compares_with_the_fairer_cold(tmp_path: Path) -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(table([COLD, WARM]))
    text = console.export_text()
    assert "20.0x" in text
    assert "4,096 of 4,160" in text
    assert "yes" in text
    picture([COLD, WARM], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_text_is_real_and_its_beginnings_differ() -> None:
    prompt = prompt_tokens(4096, 64)
    assert len(prompt) == 4160
    assert len(set(prompt)) > 500
    assert prompt_tokens(256, 64, offset=7)[:20] != prompt[:20]
