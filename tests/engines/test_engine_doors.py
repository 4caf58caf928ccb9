"""What engines give in the place of their tensors: refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client.engines.transformers import cache_of
from kvstore_client.engines.vllm.pages import PagesOfModel

from kvstore.errors import InvalidRequest
from tests.specs import small_spec

SHAPE = (6, 2, 4, 16)  # [pages, heads, tokens, K and V]
GOOD = torch.zeros(SHAPE, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(SHAPE, dtype=torch.float16), "float16.*bfloat16"),
        (torch.zeros(SHAPE, dtype=torch.float32), "float32.*bfloat16"),
        (torch.zeros(SHAPE, dtype=torch.uint8), "uint8.*bfloat16"),
        (GOOD.to("meta"), "meta"), (GOOD.to_sparse(), "sparse"), (GOOD[:, :1], "shape"), (GOOD[0], "shape"),
        (GOOD[..., :8], "shape"), (None, "NoneType"),
    ],
)  # fmt: skip
def test_vllms_pages_are_the_models_or_refused(tensor: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        PagesOfModel(small_spec(), [GOOD, tensor], 4, "FLASH_ATTN")
    with pytest.raises(InvalidRequest, match=r"1 tensors of pages.* 2 layers"):
        PagesOfModel(small_spec(), [GOOD], 4, "FLASH_ATTN")


PLANE = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((PLANE,), "pair"), ((PLANE, None), "NoneType"), ((PLANE, PLANE[:, :4]), "one length"),
        ((PLANE, PLANE[0]), "5, 8"), ((PLANE, PLANE.half()), "float16.*float32"), ((PLANE, PLANE.to("meta")), "meta"),
        ((PLANE, PLANE.numpy()), "tensors"), (None, "NoneType"),
    ],
)  # fmt: skip
def test_a_cache_for_transformers_has_one_dtype_and_length(pair: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"kv\[1\].*{words}"):
        cache_of([(PLANE, PLANE), pair])
