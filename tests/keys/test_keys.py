"""Digests are the same for ever, and differ wherever a cache would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvstore import keys
from kvstore.errors import InvalidRequest
from kvstore.keys import Extra
from kvstore.seams.secrets import DEFAULT_TENANT_SECRET
from kvstore.spec import CacheKind, Exactness, LayerKind, LayerSpec, ModelSpec, Provenance, RopeSpec
from tests.specs import read_back, small_spec

GOLDEN = {
    "chain 0": "2ca2589437db1c8885837569eeaf48f6413c63849e9ebb9208484cd4fc0245a2",
    "chain tail": "32e9a810ed785ef2a3b7316a9573d692a78f3afae757126dfebf13150853e58f",
    "salted tail": "b798585476f045167091f3b4ab93266cc6f272354c119a50fe0525ac37be99ec",
    "content": "da5d1c255c19e80d4e5ce67d874abfd7bfb60fde3dbc79ac3f267833ba05822d",
    "content behind": "2200f32d11450659fcb1a383b6f1d83653a01886d6164006ca5266ac12931f30",
    "tokens": "3fd3c411a77aca30fb4bcd57bacb866d7d5fda43b3d65982beb4ac76762c27a1",
    "fingerprint kv": "708fc6ceb85fae41662e6f3ab5122da02adf7a2d8e8fc49e7af9ed8025a74677",
    "fingerprint e": "26d1afcb8c490b40a3e2227cf8fe0f920e3b52cca0b8edadda0e47ef1a138c74",
    "storage": "d181a0bdb5d5e38af5cc3c048f3ee0d88d9718e7fd74847e50c17684b8dea65a",
}


def tokens(count: int) -> keys.Tokens:
    return keys.token_array(np.arange(count), 1000)


def vectors() -> dict[str, str]:
    spec = small_spec()
    chain = keys.chain_digests(tokens(40), 16)
    salted = keys.chain_digests(tokens(40), 16, [Extra(0, b"salt"), Extra(20, b"image")])
    name = keys.fingerprint(spec, CacheKind.KV)
    return {
        "chain 0": chain[0].hex(),
        "chain tail": chain[2].hex(),
        "salted tail": salted[2].hex(),
        "content": keys.content_digest(tokens(40)).hex(),
        "content behind": keys.content_digest(tokens(40), behind=keys.token_digest(tokens(16))).hex(),
        "tokens": keys.token_digest(tokens(16)).hex(),
        "fingerprint kv": name.hex(),
        "fingerprint e": keys.fingerprint(spec, CacheKind.E, 1).hex(),
        "storage": keys.storage_key(
            DEFAULT_TENANT_SECRET, name, Provenance.IN_CONTEXT, Exactness.EXACT, chain[0]
        ).hex(),
    }


def test_golden_vectors() -> None:
    assert vectors() == GOLDEN


def test_a_chain_extends_its_prefix_and_nothing_else() -> None:
    long, short = keys.chain_digests(tokens(64), 16), keys.chain_digests(tokens(32), 16)
    assert long[:2] == short
    changed = tokens(64).copy()
    changed[3] = 999
    assert not set(keys.chain_digests(changed, 16)) & set(long)


@pytest.mark.parametrize(
    "extras",
    [[Extra(0, b"a")], [Extra(0, b"b")], [Extra(1, b"a")], [Extra(0, b"a"), Extra(0, b"a")], [Extra(0, b"aa")]],
)
def test_extras_change_the_chunk_they_are_in_and_all_after(extras: list[Extra]) -> None:
    plain, other = keys.chain_digests(tokens(48), 16), keys.chain_digests(tokens(48), 16, extras)
    assert not set(plain) & set(other)
    late = keys.chain_digests(tokens(48), 16, [Extra(20, b"a")])
    assert late[0] == plain[0]
    assert late[1:] != plain[1:]


def test_a_segments_chunks_are_named_by_all_tokens_up_to_their_end() -> None:
    long = tokens(64)
    digests = keys.segment_digests(long, 16)
    assert digests[0] == keys.content_digest(long[:16])
    assert digests[1] == keys.prefix_digest(digests[0], long[16:32])
    assert not set(digests) & set(keys.chain_digests(long, 16)), "alone is not in context"
    assert keys.segment_digests(long[:40], 16) == [*digests[:2], keys.prefix_digest(digests[1], long[32:40])]
    assert not set(keys.segment_digests(long[16:], 16)) & set(digests), "the same text after other text"
    assert keys.segment_digests(long[:0], 16) == []
    late = keys.segment_digests(long, 16, [Extra(20, b"a")])
    assert late[0] == digests[0]
    assert late[1:] != digests[1:]
    assert keys.segment_digests(long, 16, [Extra(15, b"a")])[0] != digests[0]


def test_a_segment_behind_another_preamble_shares_no_name() -> None:
    alone, behind = keys.segment_digests(tokens(40), 16), keys.token_digest(tokens(16))
    found = [alone, keys.segment_digests(tokens(40), 16, (), behind)]
    found.append(keys.segment_digests(tokens(40), 16, (), keys.token_digest(tokens(15))))
    found.append(keys.segment_digests(tokens(40), 16, [Extra(0, b"salt")], behind))
    found.append(keys.chain_digests(tokens(40), 16))
    assert len({digest for digests in found for digest in digests}) == sum(map(len, found))


def different_specs() -> list[ModelSpec]:
    spec = small_spec()
    layer = spec.layers[0]
    return [
        spec,
        replace(spec, model_id="other"),
        replace(spec, weights_digest="cd" * 32),
        replace(spec, weights_digest="unverified:ab"),
        replace(spec, adapter_id="lora"),
        replace(spec, tokenizer_digest="ef" * 32),
        replace(spec, cache_dtype="float16"),
        replace(spec, hidden_dtype="float16"),
        replace(spec, chunk_tokens=32),
        replace(spec, rope=RopeSpec(rotary_dim=8, theta=5e5)),
        replace(spec, rope=RopeSpec(rotary_dim=8, kind="linear", factors=(("factor", 2.0),))),
        replace(spec, layers=(layer, LayerSpec(kv_heads=2, k_dim=8, v_dim=16))),
        replace(spec, scales=((1.0, 1.0), (1.0, 2.0))),
    ]


def test_nothing_that_differs_shares_a_name() -> None:
    chain = keys.chain_digests(tokens(16), 16)[0]
    names = [keys.fingerprint(each, CacheKind.KV) for each in different_specs()]
    names += [keys.fingerprint(small_spec(), CacheKind.E, layer) for layer in (0, 1)]
    assert len(set(names)) == len(names)
    stored = {
        keys.storage_key(secret, name, provenance, exactness, chain)
        for secret in (DEFAULT_TENANT_SECRET, bytes(32))
        for name in names
        for provenance in Provenance
        for exactness in Exactness
    }
    assert len(stored) == len(names) * 8


def test_a_canonical_form_says_all_of_its_spec() -> None:
    for spec in different_specs():
        assert read_back(spec.canonical) == spec


@pytest.mark.parametrize(
    "bad", [[-1], [1000], [[1, 2]], [1.5], ["a"], 7, [2**40], [2**70], [True], None, [[1], [1, 2]]]
)
def test_bad_tokens_are_named(bad: object) -> None:
    with pytest.raises(InvalidRequest, match="token"):
        keys.token_array(bad, 1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_digest", "XYZ"), ("cache_dtype", "int3"), ("chunk_tokens", 0), ("vocab_size", 0), ("layers", None),
        ("model_id", ""), ("scales", ((1.0, 1.0),)), ("rope", RopeSpec(theta=-1.0)),
        ("layers", (LayerSpec(kv_heads=0, k_dim=1, v_dim=1),)),
        ("layers", (LayerSpec(kind=LayerKind.RECURRENT, kv_heads=1, k_dim=1, v_dim=1),)),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest):
        small_spec(**{field: value})


@pytest.mark.parametrize(
    ("position", "data"), [(-1, b""), (2**64, b""), (0, "text"), (0, bytes(keys.EXTRA_BYTES_MAX + 1)), (1.0, b"")]
)
def test_bad_extras_are_refused(position: int, data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="extra"):
        Extra(position, data)


@pytest.mark.parametrize("form", [list, tuple, lambda a: a.astype(">u4"), lambda a: np.repeat(a, 2)[::2]])
def test_a_digest_does_not_depend_on_how_the_tokens_came(form: Callable[[keys.Tokens], object]) -> None:
    assert keys.token_digest(keys.token_array(form(tokens(16)), 1000)).hex() == GOLDEN["tokens"]


def test_token_range_is_the_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="out of range: the vocabulary has 1000 entries"):
        keys.token_array([1, 2**70], 1000)  # numpy has no whole number of so many bits
    assert keys.token_array([0, 999], 1000).tolist() == [0, 999]
    assert keys.token_array([2**32 - 1], 2**32).tolist() == [2**32 - 1]
    assert keys.token_array([], 1000).tolist() == []


def test_a_tail_is_named_alike_alone_and_in_its_chain() -> None:
    extras = [Extra(35, b"late"), Extra(20, b"image"), Extra(3, b"image"), Extra(0, b"salt")]
    chain = keys.chain_digests(tokens(40), 16, extras)
    assert chain == keys.chain_digests(tokens(40), 16, extras[::-1])
    assert keys.tail_digest(tokens(40), 32, 40, chain[1], extras) == chain[2]
    assert keys.tail_digest(tokens(40), 32, 40, chain[0], extras) != chain[2]


@pytest.mark.parametrize("position", [40, 41, 47, 48])
def test_what_lies_beyond_the_last_token_changes_no_name(position: int) -> None:
    """An engine may name all images of a request and store the tokens before the last of them."""
    inside, beyond = [Extra(35, b"image")], [Extra(35, b"image"), Extra(position, b"later")]
    chain = keys.chain_digests(tokens(40), 16, inside)
    assert keys.chain_digests(tokens(40), 16, beyond) == chain
    assert keys.tail_digest(tokens(40), 32, 40, chain[1], beyond) == chain[2]
    assert keys.segment_digests(tokens(40), 16, beyond) == keys.segment_digests(tokens(40), 16, inside)


def test_the_same_tokens_have_a_name_of_their_own_in_each_domain() -> None:
    run = tokens(16)
    found = [
        keys.chain_digests(run, 16)[0],
        keys.content_digest(run),
        keys.content_digest(run, [Extra(0, b"a")]),
        keys.content_digest(run, [Extra(1, b"a")]),
        keys.token_digest(run),
    ]
    assert len(set(found)) == len(found)


def test_kinds_and_layers_do_not_share_a_name() -> None:
    mla = small_spec(layers=(LayerSpec(kv_heads=1, k_dim=24, v_dim=8),) * 2, mla=True)
    specs = [mla, replace(mla, mla=False)]
    found = [keys.fingerprint(spec, kind) for spec in specs for kind in CacheKind if kind is not CacheKind.E]
    found += [keys.fingerprint(spec, CacheKind.E, layer) for spec in specs for layer in (0, 1)]
    assert len(set(found)) == len(found) == 14


def test_equal_specs_have_one_canonical_form() -> None:
    whole = small_spec(rope=RopeSpec(rotary_dim=8, theta=10000, factors=(("factor", 2),)), scales=((1, 1), (1, 2)))
    real = small_spec(
        rope=RopeSpec(rotary_dim=8, theta=10000.0, factors=(("factor", 2.0),)), scales=((1.0, 1.0), (1.0, 2.0))
    )
    assert whole == real
    assert hash(whole) == hash(real)
    assert whole.canonical == real.canonical
    assert read_back(whole.canonical) == real


SPEC_NUMBERS = ("hidden_size", "vocab_size", "chunk_tokens")
ROPE_NUMBERS = ("theta", "rotary_dim")
LAYER_NUMBERS = ("kv_heads", "k_dim", "v_dim", "window", "group")


def spec_with(name: str, value: object, kind: LayerKind = LayerKind.FULL) -> ModelSpec:
    """A spec with one number of it, of its rope or of its second layer changed."""
    if name in SPEC_NUMBERS:
        return small_spec(**{name: value})
    if name in LAYER_NUMBERS:
        full = LayerSpec(kv_heads=2, k_dim=8, v_dim=8)
        return small_spec(layers=(full, replace(full, kind=kind, **{name: value})))
    if name == "mrope":
        return small_spec(rope=RopeSpec(rotary_dim=8, mrope=(value, 2)))  # type: ignore[arg-type]
    if name == "factor":
        return small_spec(rope=RopeSpec(rotary_dim=8, factors=(("factor", value),)))  # type: ignore[arg-type]
    return small_spec(rope=replace(RopeSpec(rotary_dim=8), **{name: value}))


@pytest.mark.parametrize("kind", [LayerKind.FULL, LayerKind.NONE])
@pytest.mark.parametrize("name", [*SPEC_NUMBERS, *ROPE_NUMBERS, *LAYER_NUMBERS, "mrope", "factor"])
def test_a_number_has_one_canonical_form_or_is_refused(name: str, kind: LayerKind) -> None:
    """8 == 8.0 == True + 7 to Python: what is equal must get one name, however it was written."""
    for low, forms in ((8, (8.0,)), (1, (1.0, True)), (0, (0.0, -0.0, False))):
        try:
            plain = spec_with(name, low, kind)
        except InvalidRequest:
            continue
        for form in forms:
            try:
                found = spec_with(name, form, kind)
            except InvalidRequest:
                continue
            assert found == plain
            assert found.canonical == plain.canonical
            assert read_back(found.canonical) == found


def test_a_layers_kind_may_be_given_by_its_word() -> None:
    full, named = LayerSpec(kind=LayerKind.NONE), LayerSpec(kind="none")  # type: ignore[arg-type]
    assert full == named
    assert not named.has_slab
    with pytest.raises(InvalidRequest, match="'most'"):
        LayerSpec(kind="most")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RopeSpec(rotary_dim=8.5),  # type: ignore[arg-type]
        lambda: RopeSpec(rotary_dim=float("nan")),  # type: ignore[arg-type]
        lambda: RopeSpec(rotary_dim=float("inf")),  # type: ignore[arg-type]
        lambda: RopeSpec(mrope=("1",)),  # type: ignore[arg-type]
        lambda: LayerSpec(kv_heads=True, k_dim=1, v_dim=1),
        lambda: RopeSpec(theta="1"),  # type: ignore[arg-type]
        lambda: RopeSpec(theta=10**400),
        lambda: RopeSpec(factors=(("factor", True),)),
        lambda: small_spec(scales=(("1", 1.0), (1.0, 1.0))),
        lambda: small_spec(mla=1),
    ],
)
def test_numbers_that_are_none_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest):
        make()
