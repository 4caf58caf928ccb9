"""At the limit a new model takes the place of one that nothing needs, and an empty namespace gives its number up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.catalog import Catalog, Namespace
from kvstore.catalog.namespace import UNNUMBERED
from kvstore.catalog.spaces import Model
from kvstore.errors import UNREGISTERED, Exhausted, InvalidRequest
from kvstore.keys import ROOT_DIGEST, fingerprint
from kvstore.spec import Exactness, MissReason, Provenance
from tests.catalog.shelves import shelved_catalog
from tests.catalog.test_catalog import digest, put, take
from tests.presence.shown import difference
from tests.specs import small_spec

MODELS = 4
"""As many as a ``shelved_catalog`` registers."""


def register(catalog: Catalog, number: int) -> Model:
    return catalog.register(small_spec(model_id=f"m{number}"))


def space_of(model: Model) -> Namespace:
    return model.namespace(None, Exactness.EXACT)


def test_the_one_that_was_used_least_recently_goes_and_tells_its_clients() -> None:
    catalog = shelved_catalog()
    models = [register(catalog, number) for number in range(MODELS)]
    catalog.model(models[0].fingerprint)
    register(catalog, 2)  # again: that is a use
    register(catalog, 9)
    assert [each.fingerprint in catalog.models for each in models] == [True, False, True, True]
    with pytest.raises(InvalidRequest, match="call RegisterModel first") as caught:
        catalog.model(models[1].fingerprint)
    assert caught.value.fields == {UNREGISTERED: models[1].fingerprint.hex()}


def test_models_in_use_stay_and_when_all_are_the_new_one_is_refused_by_name() -> None:
    """By a visible chunk, a ghost, a chunk that is on its way, and whatever else is under way."""
    catalog = shelved_catalog()
    models = [register(catalog, number) for number in range(MODELS)]
    spaces = list(map(space_of, models[:3]))
    row = put(catalog, spaces[0], "a")
    parent = put(catalog, spaces[1], "a")
    child = put(catalog, spaces[1], "b", "a")
    take(catalog, parent)
    catalog.table.hold(child)
    take(catalog, child)
    assert (len(spaces[1].index), len(spaces[1].ghosts)) == (0, 2)
    catalog.claim(spaces[2], digest("a"), object())
    use = catalog.use(models[3].fingerprint)
    for number in range(10, 13):
        with pytest.raises(Exhausted, match=r"all of them are in use.*limits\.model_count_max"):
            register(catalog, number)
    assert list(catalog.models) == [each.fingerprint for each in models]
    use.end()
    use.end()  # idempotent
    models[3] = register(catalog, 20)
    use = catalog.use(models[3].fingerprint)
    catalog.unclaim(spaces[2], digest("a"))
    models[2] = register(catalog, 21)
    put(catalog, space_of(models[2]), "a")
    catalog.unhold(child)
    models[1] = register(catalog, 22)
    put(catalog, space_of(models[1]), "a")
    take(catalog, row)
    models[0] = register(catalog, 23)
    assert list(catalog.models) == [models[each].fingerprint for each in (3, 2, 1, 0)]
    assert difference(catalog) == ""


def test_a_number_that_another_namespace_had_brings_nothing_of_it() -> None:
    catalog = shelved_catalog()
    old = space_of(register(catalog, 0))
    row = put(catalog, old, "a")
    was, number = catalog.table.identity(row), old.number
    put(catalog, old, "short", count=3)
    for each in reversed(list(old.index.values())):
        take(catalog, each)
    assert difference(catalog) == ""
    for model in range(1, MODELS + 1):
        register(catalog, model)
    assert difference(catalog) == "", "the reasons of its departed chunks are forgotten with it"
    assert not catalog.presence.known().size
    new = space_of(register(catalog, 1))
    assert new.number == number
    assert put(catalog, new, "a") == row
    assert catalog.table.identity(row) != was
    assert catalog.spaces.by_id(was[0]) is None
    assert catalog.spaces.by_id(catalog.table.identity(row)[0]) is new
    again = register(catalog, 0)
    found = again.seen(None, Exactness.EXACT)
    assert catalog.walk([found], [digest("a")]).runs[0].reason is MissReason.COLD
    mine = space_of(again)
    assert mine is not old
    assert mine.number != number
    assert catalog.space_of(row) is new
    assert difference(catalog) == ""


def test_at_their_limit_empty_namespaces_give_their_numbers_up_but_not_a_stores_own() -> None:
    catalog = shelved_catalog(namespace_count_max=3)
    model, other = register(catalog, 0), register(catalog, 1)
    spaces: list[Namespace] = []
    for layer in (None, 0, 1):
        spaces.append(model.namespace(layer, Exactness.EXACT, beside=spaces))
    with pytest.raises(Exhausted, match=r"limits\.namespace_count_max"):
        model.namespace(None, Exactness.DERIVED, beside=spaces)
    use = catalog.use(model.fingerprint, spaces[:2])
    made = space_of(other)
    assert made.number == 2
    assert [each in model.namespaces.values() for each in spaces] == [True, True, False]
    with pytest.raises(Exhausted, match=r"limits\.namespace_count_max"):
        other.namespace(0, Exactness.EXACT, beside=[made])
    use.end()
    assert {other.namespace(layer, Exactness.EXACT, beside=[made]).number for layer in (0, 1)} == {0, 1}
    assert not model.namespaces
    assert catalog.spaces.count == 3


def test_a_geometry_is_known_as_long_as_a_model_has_it() -> None:
    catalog = shelved_catalog()
    spec = small_spec()
    other = replace(spec, hidden_size=64)
    catalog.register(spec)
    catalog.register(replace(spec, chunk_tokens=32))
    with pytest.raises(InvalidRequest, match="two geometries"):
        catalog.register(other)
    for number in range(3):
        register(catalog, number)  # the last one takes the first one's place
    assert fingerprint(spec, spec.kind) not in catalog.models
    with pytest.raises(InvalidRequest, match="two geometries"):
        catalog.register(other)
    register(catalog, 3)
    catalog.register(other)
    with pytest.raises(InvalidRequest, match="two geometries"):
        catalog.register(spec)


def test_the_catalog_of_two_thousand_models_in_turn_is_bounded() -> None:
    catalog = shelved_catalog()
    for number in range(2000):
        model = register(catalog, number)
        space = space_of(model)
        for count, name in ((16, "a"), (16, "b"), (5, "c")):
            take(catalog, put(catalog, space, f"{name}{number}", count=count))
    spaces = catalog.spaces
    assert len(catalog.models) == len(catalog.registered._geometries) == MODELS
    assert len(spaces._by_key) == spaces.count == MODELS
    assert len(spaces.numbered) <= MODELS + 1
    assert len(catalog.table.digests) <= 2
    assert catalog.presence.known().size == 3 * MODELS, "the reasons of those that are registered"
    assert difference(catalog) == ""


def test_what_a_device_has_of_a_forgotten_model_is_found_when_it_comes_back() -> None:
    """E of a layer that nobody asked for: its namespace waits, as after a restart, and does not keep the model."""
    catalog = shelved_catalog()
    spec = small_spec(model_id="m0")
    model = register(catalog, 0)
    name = model._name(1)
    space = catalog.spaces.get(name, Provenance.IN_CONTEXT, Exactness.EXACT)
    row = catalog.row_of(space, digest("e"), ROOT_DIGEST, 16)
    catalog.table.copies[1].put(row, 7)
    catalog.publish(row)
    for number in range(1, MODELS + 1):
        register(catalog, number)
    assert model.fingerprint not in catalog.models
    found = catalog.register(spec).seen(1, Exactness.EXACT)
    assert found is space
    assert catalog.walk([found], [digest("e")]).hit_count == 1
    with pytest.raises(Exhausted):
        for number in range(MODELS):
            put(catalog, space_of(register(catalog, number)), "a")
        register(catalog, 9)
    assert model.fingerprint in catalog.models, "now its chunk keeps it"


def test_who_still_has_a_forgotten_model_takes_nothing_from_the_one_that_came_back() -> None:
    """A warm-up goes through the models, and awaits in between."""
    catalog = shelved_catalog()
    old = register(catalog, 0)
    for number in range(1, MODELS + 1):
        register(catalog, number)
    new = register(catalog, 0)
    space = space_of(new)
    put(catalog, space, "short", count=3)
    assert new is not old
    assert old.seen(None, Exactness.EXACT) is space
    assert not old.namespaces
    assert len(catalog.tails([space], ROOT_DIGEST).rows) == 1
    take(catalog, space.index[digest("short")])
    for number in range(1, MODELS + 1):
        register(catalog, number)
    assert not new.namespaces
    assert difference(catalog) == ""


def test_reasons_go_with_their_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted over all namespaces: those of one that is forgotten must not be looked for in it later."""
    monkeypatch.setattr("kvstore.catalog.namespace.DEPARTURE_COUNT_MAX", 2)
    catalog = shelved_catalog()
    old = space_of(register(catalog, 0))
    catalog.depart(old, digest("a"), MissReason.EVICTED)
    catalog.depart(old, digest("b"), MissReason.EVICTED)
    new = [space_of(register(catalog, number)) for number in range(1, MODELS + 1)][-1]
    assert (old.number, dict(old.departures)) == (UNNUMBERED, {})
    for name in "cde":
        catalog.depart(new, digest(name), MissReason.EVICTED)
    assert list(new.departures) == [digest("d"), digest("e")]
    assert difference(catalog) == ""
