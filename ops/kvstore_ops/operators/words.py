"""Turns options of the command line into requests of the operator's calls."""

from __future__ import annotations

import math
from pathlib import Path

from kvstore_client.prompt import Prompt

from kvstore.errors import InvalidRequest
from kvstore.spec import Exactness
from kvstore.units import parse_bytes, parse_duration
from kvstore.v1alpha import admin_pb2
from kvstore_ops.locate import read_tokens
from kvstore_ops.operators.calls import Operator
from kvstore_ops.options import of_option


def selection_of(
    model: str = "", digest: str = "", tier: str = "", older_than: str = "", larger_than: str = "",
    smaller_than: str = "", used_at_most: int | None = None, chain: bytes = b"",
) -> admin_pb2.Selection:  # fmt: skip
    """Return a selection. Raises InvalidRequest naming the option that cannot be read."""
    return admin_pb2.Selection(
        model=model,
        digest=digest,
        tier=tier,
        older_than_seconds=math.ceil(of_option("--older-than", parse_duration, older_than)) if older_than else 0,
        byte_count_min=of_option("--larger-than", parse_bytes, larger_than) if larger_than else 0,
        byte_count_max=max(1, of_option("--smaller-than", parse_bytes, smaller_than)) if smaller_than else 0,
        use_count_max=_count(used_at_most),
        chain=chain,
    )


def _count(used_at_most: int | None) -> int | None:
    if used_at_most is not None and not 0 <= used_at_most < 1 << 32:
        raise InvalidRequest(f"--used-at-most {used_at_most}: use 0 to {(1 << 32) - 1}")
    return used_at_most


def wanted_of(
    asked: Operator, model: str, digest: str, tier: str, older_than: str, prompt: Path | None, tokenizer: str,
    larger_than: str = "", smaller_than: str = "", used_at_most: int | None = None, *, everything: bool = False,
    options: str = "--model, --digest, --tier, --older-than, --prompt, or --all",
) -> admin_pb2.Selection:  # fmt: skip
    """Return a selection with at least one restriction, unless ``everything`` is given. ``options``: those of the
    command that restrict it. Raises InvalidRequest."""
    if not (model or digest or tier or older_than or prompt or everything):
        raise InvalidRequest(f"say which chunks: {options}")
    chain = b""
    if prompt is not None:
        if not model:
            raise InvalidRequest("--prompt needs --model: whose tokens are they?")
        spec = asked.model(model)
        prompts = [Prompt.of(spec, each, (), Exactness.EXACT) for each in read_tokens(prompt, tokenizer)]
        chain = b"".join(dict.fromkeys(digest for each in prompts for digest in each.digests))
        if not chain:
            raise InvalidRequest(f"--prompt {prompt}: there is no token in it")
    return selection_of(model, digest, tier, older_than, larger_than, smaller_than, used_at_most, chain)
