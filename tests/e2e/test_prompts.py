"""Prompts are kept by their tokens: a kept one is the caller's, or none. Needs no server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvstore_client.prompt import KEPT_BYTES_MAX, KEPT_CHUNKS_MAX, Prompt
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.keys import chain_digests
from kvstore.spec import Exactness
from tests.specs import small_spec

SPEC = small_spec()


def named(tokens: NDArray[Any], spec: object = SPEC, exactness: Exactness | None = None) -> Prompt:
    return Prompt.of(spec, tokens, (), exactness)  # type: ignore[arg-type]  # tests give odd specs, too


def test_what_is_kept_is_bounded_and_nobody_changes_it() -> None:
    chunks = replace(SPEC, chunk_tokens=1)
    tokens = np.arange(KEPT_CHUNKS_MAX + 1, dtype=np.int64) % 100
    assert named(tokens, chunks) is not named(tokens, chunks)
    shared = named(tokens[:-1], chunks)
    assert shared is named(tokens[:-1], chunks)
    assert shared.tokens is not None
    with pytest.raises(ValueError, match="read-only"):
        shared.tokens[0] = 5


@pytest.mark.parametrize("dtype", ["<u4", "<i8", ">i8", "u1", "<i2"])
@pytest.mark.parametrize("count", [1, SPEC.chunk_tokens, 3 * SPEC.chunk_tokens + 1, KEPT_BYTES_MAX])
def test_a_prompt_is_named_by_the_tokens_that_the_array_has_now(dtype: str, count: int) -> None:
    tokens = (np.arange(count) % 100).astype(dtype)
    for changed in (0, count // 2, count - 1):
        before = named(tokens)
        kept = before.tokens.tolist() if before.tokens is not None else []
        tokens[changed] += 1
        after = named(tokens)
        assert after.digests == chain_digests(tokens.astype("<u4"), SPEC.chunk_tokens)
        assert after.digests != before.digests
        assert after.tokens is not None
        assert after.tokens.tolist() == tokens.tolist()
        if tokens.nbytes <= KEPT_BYTES_MAX:
            assert before.tokens is not None
            assert before.tokens.tolist() == kept


def test_bytes_of_another_dtype_are_other_tokens() -> None:
    narrow = np.array([1, 2, 3, 4], "<u2")
    assert named(narrow).digests != named(narrow.view("<u4") % SPEC.vocab_size).digests
    assert named(narrow).digests == named(narrow.astype("<i8")).digests
    assert named(narrow[::2]).digests == named(np.array([1, 3])).digests


def test_a_prompt_of_another_model_or_exactness_is_not_taken() -> None:
    tokens = np.arange(2 * SPEC.chunk_tokens)
    other = replace(SPEC, chunk_tokens=2 * SPEC.chunk_tokens)
    assert named(tokens, other).digests != named(tokens).digests
    assert named(tokens, replace(SPEC, adapter_id="one")).spec.adapter_id == "one"
    found = [named(tokens, SPEC, each) for each in (None, Exactness.EXACT, Exactness.DERIVED)]
    assert [(each.exactness, each.is_claimed) for each in found] == [(1, False), (1, True), (2, True)]


@pytest.mark.parametrize(
    "wrong", [np.array([SPEC.vocab_size]), np.array([-1]), np.array([2**32]), np.array([1], object), np.array([1.0])]
)
def test_wrong_tokens_are_refused_each_time(wrong: NDArray[Any]) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="token"):
            named(wrong)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        named(np.array([5]), replace(SPEC, vocab_size=5))
    assert named(np.array([4]), replace(SPEC, vocab_size=5)).token_count == 1
