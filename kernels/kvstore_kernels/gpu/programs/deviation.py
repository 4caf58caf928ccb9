"""KV deviation: squared differences, summed over heads and dims, of K, of V or of both, in one pass."""

import triton
import triton.language as tl


@triton.jit
def _squares(
    total, fresh, cached, token, inside, heads, fresh_head, fresh_token, fresh_dim, cached_head, cached_token,
    cached_dim, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (dims < DIM)[None, :]
    a = fresh + (token * fresh_token)[:, None] + dims[None, :] * fresh_dim
    b = cached + (token * cached_token)[:, None] + dims[None, :] * cached_dim
    for _ in range(heads):
        difference = tl.load(a, mask=mask, other=0.0).to(tl.float32) - tl.load(b, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(difference * difference, 1)
        a += fresh_head
        b += cached_head
    return total


@triton.jit(do_not_specialize=["tokens", "heads"])
def deviation_program(
    fresh_k, cached_k, fresh_v, cached_v, out, tokens, heads,
    fk_head, fk_token, fk_dim, ck_head, ck_token, ck_dim, fv_head, fv_token, fv_dim, cv_head, cv_token, cv_dim,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """K_DIM or V_DIM 0: that plane does not count."""
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = place < tokens
    token = place.to(tl.int64)
    total = tl.zeros([BLOCK_T], tl.float32)
    if K_DIM > 0:
        total = _squares(
            total, fresh_k, cached_k, token, inside, heads, fk_head, fk_token, fk_dim, ck_head, ck_token, ck_dim,
            K_DIM, BLOCK_K,
        )  # fmt: skip
    if V_DIM > 0:
        total = _squares(
            total, fresh_v, cached_v, token, inside, heads, fv_head, fv_token, fv_dim, cv_head, cv_token, cv_dim,
            V_DIM, BLOCK_V,
        )  # fmt: skip
    tl.store(out + place, total, mask=inside)
