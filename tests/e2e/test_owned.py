"""Memory that a fetch makes for itself: each plane has bytes of its own, and is like any tensor. No server."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvstore_client.fetch import owned
from kvstore_client.fetch.owned import ALIGNMENT, OwnedHalves, owned_layers
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.overlap import Span, overlapping

from tests.specs import small_spec

SPEC = small_spec()
HEADS, K_DIM, V_DIM = SPEC.layers[0].kv_heads, SPEC.layers[0].k_dim, SPEC.layers[0].v_dim


@given(st.integers(1, 70), st.data())
def test_planes_have_the_shape_of_their_layer_and_bytes_of_their_own(token_count: int, data: st.DataObject) -> None:
    found = OwnedHalves.of(Wanted.of(SPEC, None, None, (), False), token_count)
    assert found is not None
    assert [tuple(plane.shape for plane in planes) for planes in found.layers] == [
        ((HEADS, token_count, K_DIM), (HEADS, token_count, V_DIM)) for _ in range(SPEC.layer_count)
    ]
    planes = [plane for both in found.layers for plane in both]
    assert overlapping([Span.of(plane) for plane in planes if plane.numel()]) is None
    base = planes[0].data_ptr()
    assert all((plane.data_ptr() - base) % ALIGNMENT == 0 for plane in planes)
    for number, plane in enumerate(planes):
        plane.fill_(number)
    shown_tokens = data.draw(st.integers(0, token_count))
    for position in range(SPEC.layer_count):
        for which, plane in enumerate(found.shown(position, shown_tokens, SPEC.cache_dtype)):
            assert plane.dtype is torch.bfloat16
            assert plane.shape[1] == shown_tokens
            assert (plane.view(torch.int16) == 2 * position + which).all()


def planes_shown() -> list[torch.Tensor]:
    found = OwnedHalves.of(Wanted.of(SPEC, None, None, (), False), 5)
    assert found is not None
    return [plane for layer in range(SPEC.layer_count) for plane in found.shown(layer, 5, SPEC.cache_dtype)]


def test_a_plane_takes_values_that_need_gradients() -> None:
    k = planes_shown()[0]
    given = torch.ones(k.shape, dtype=k.dtype, requires_grad=True)
    k.copy_(given * 2)
    k.sum().backward()
    assert given.grad is not None
    assert (given.grad == 2).all()


def test_a_plane_that_changes_spoils_no_other_ones_gradient() -> None:
    k, _, other, *_ = planes_shown()
    weight = torch.ones(k.shape, dtype=k.dtype, requires_grad=True)
    product = (weight * k).sum()
    other.add_(1)
    product.backward()
    assert weight.grad is not None


def test_a_plane_is_saved_and_grows_alone() -> None:
    planes = planes_shown()
    for plane in planes:
        assert plane.untyped_storage().nbytes() == plane.nbytes
        plane.fill_(1)
    with pytest.raises(RuntimeError, match="not resizable"):
        planes[0].resize_(2, HEADS, 5, K_DIM)


def test_without_torch_each_plane_is_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "torch_module", lambda: None)
    wanted = Wanted.of(SPEC, None, None, (), False)
    assert OwnedHalves.of(wanted, 5) is None
    assert [plane.shape for plane in owned_layers(wanted, 5)[0]] == [(HEADS, 5, K_DIM), (HEADS, 5, V_DIM)]
