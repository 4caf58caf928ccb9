"""What the cache is good for: tokens that were fetched by hour, kept over restarts; and which prefixes are hot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.controller import UsedChain
from kvstore.controller.benefit import HotPrefix, Saving, Served
from kvstore.controller.benefit.heat import HALVED_S, PREFIX_COUNT_MAX, WALKED_CHUNKS_MAX, Heat
from kvstore.controller.benefit.served import COUNT_MAX, HOUR_COUNT_MAX, HOUR_S, MODEL_COUNT_MAX
from kvstore.errors import InvalidRequest
from kvstore.planning.kept import digest_of
from kvstore.planning.loading import ComputeRate, Prefill, Prefills, saved_seconds
from kvstore.spec import CacheKind
from tests.controller.service import CHUNK, Service
from tests.simulated import ManualClock

NAME = bytes(31) + b"\1"


class Space:
    """As much of a namespace as counts."""

    def __init__(self, fingerprint: bytes = NAME, kind: CacheKind = CacheKind.KV, layer: int | None = None) -> None:
        self.fingerprint, self.kind, self.layer = fingerprint, kind, layer


def add(served: Served, space: Space, token_count: int, fetch_count: int = 1) -> None:
    served.add(space, token_count, fetch_count)  # type: ignore[arg-type]  # a namespace's three fields


# ---------------------------------------------------------------- tokens


def test_seconds_saved_are_those_of_a_prefill_of_the_prefix() -> None:
    rate = ComputeRate(pass_s=5.0, token_s=1e-3, pair_s=1e-6, load=2.0, sample_count=9)
    whole = rate.seconds(1000)
    assert saved_seconds(1000, rate) == pytest.approx(whole - rate.load * rate.pass_s)
    assert saved_seconds(1000, ComputeRate()) == 0


def test_a_small_pass_does_not_make_a_prefix_look_dear() -> None:
    """Most of its time is the reading of the weights, which a large pass does once."""
    rate = Prefills(0.0, (Prefill(1, 30_000, 0.02),)).rate
    assert saved_seconds(30_000, rate) == pytest.approx(rate.seconds(30_000)) == pytest.approx(2.0)


def test_hours_count_what_was_fetched_in_them_and_the_total_what_was_since_the_start() -> None:
    clock = ManualClock()
    served = Served(clock)
    add(served, Space(), 100)
    served.learn(NAME, ComputeRate(token_s=0.5, sample_count=1))
    add(served, Space(), 30, 3)
    clock.advance(HOUR_S)
    add(served, Space(), 7)
    found = served.of(NAME)
    assert found.total == Saving(5, 137, 18.5)
    assert [tuple(hour) for hour in found.hours] == [(0, Saving(4, 130, 15.0)), (HOUR_S, Saving(1, 7, 3.5))]
    clock.advance((HOUR_COUNT_MAX - 1) * HOUR_S)
    assert [hour.start_s for hour in served.of(NAME).hours] == [HOUR_S]


@pytest.mark.parametrize(
    "space", [Space(kind=CacheKind.OPAQUE), Space(kind=CacheKind.ENCODER), Space(kind=CacheKind.E, layer=3)]
)
def test_what_no_prefill_makes_saves_none(space: Space) -> None:
    served = Served(ManualClock())
    add(served, space, 100)
    assert served.of(NAME).total == Saving()
    assert not served.is_changed


def test_what_is_kept_is_bounded_and_what_was_fetched_last_stays() -> None:
    clock = ManualClock()
    served = Served(clock)
    for hour in range(3 * HOUR_COUNT_MAX):
        add(served, Space(), 1)
        assert len(served.of(NAME).hours) == min(hour + 1, HOUR_COUNT_MAX)
        clock.advance(HOUR_S)
    for number in range(2 * MODEL_COUNT_MAX):
        add(served, Space(number.to_bytes(32, "big")), 1)
        add(served, Space(), 1)
    assert len(served.of(NAME).hours) == HOUR_COUNT_MAX
    kept = json.loads(served.pack())["models"]
    assert len(kept) <= MODEL_COUNT_MAX + 1
    again = Served(clock)
    again.unpack(served.pack())
    assert again.of(NAME).hours == served.of(NAME).hours


def packed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Hours with a change, and with the digest that they then have."""
    served = Served(ManualClock())
    add(served, Space(), 5)
    found = json.loads(served.pack())
    change(found["models"])
    found["digest"] = digest_of(found["models"])
    return json.dumps(found).encode()


ROW = NAME.hex()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"[]", b'{"format": "kvstore-served", "version": 2}',
        packed(lambda _: None).replace(b'"digest": "', b'"digest": "0'),
        packed(lambda models: models.update({"00": [[0, 1, 1, 0.0]]})),
        packed(lambda models: models.update({"zz" * 32: [[0, 1, 1, 0.0]]})),
        packed(lambda models: models.update({ROW: [[0, 0, 0, 0.0]]})),
        packed(lambda models: models.update({ROW: [[0, 2, 1, 0.0]]})),
        packed(lambda models: models.update({ROW: [[0, 1, COUNT_MAX + 1, 0.0]]})),
        packed(lambda models: models.update({ROW: [[0, 1, 1, -1.0]]})),
        packed(lambda models: models.update({ROW: [[0, 1, 1, 1e999]]})),
        packed(lambda models: models.update({ROW: [[0, 1]]})),
        packed(lambda models: models.update({ROW: 5})),
        packed(lambda models: models.update({ROW: [[hour, 1, 1, 0.0] for hour in range(HOUR_COUNT_MAX + 1)]})),
        packed(lambda models: models.update({number.to_bytes(32, "big").hex(): [] for number in range(200)})),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_was_kept_is_refused_and_changes_nothing(data: bytes) -> None:
    served = Served(ManualClock())
    add(served, Space(), 9)
    before = served.of(NAME)
    with pytest.raises(InvalidRequest):
        served.unpack(data)
    assert served.of(NAME) == before


async def test_chunks_are_counted_by_kind_and_tier_and_no_client_makes_a_count_overflow() -> None:
    service = Service(chunks=8)
    session = service.controller.open_session()
    await service.store(session, 1, 2, 3)
    assert service.check(session, 1, 2, 3) == 3
    last = service.query(1, 2, 3)._replace(digests=service.query(1, 2, 3).digests[-1:])
    service.controller.used([UsedChain(last, 2, 2 * 3 * CHUNK)])
    counters = service.parts.counters.snapshot()
    assert counters["fetched_chunks"] == counters["fetched_kv_chunks"] == 3 + 2 * 3
    for _ in range(16):
        service.controller.used([UsedChain(last, 1, 1 << 63)])
    assert 1 << 20 < service.parts.counters.snapshot()["fetched_chunks"] < 1 << 30


async def test_fetches_by_a_call_and_without_one_count_alike() -> None:
    service = Service(chunks=8)
    session = service.controller.open_session()
    await service.store(session, 1, 2, 3)
    assert service.check(session, 1, 2, 3) == 3
    last = service.query(1, 2, 3)._replace(digests=service.query(1, 2, 3).digests[-1:])
    unknown = last._replace(digests=[bytes(32)])
    service.controller.used([UsedChain(last, 2, 2 * 3 * CHUNK), UsedChain(last), UsedChain(unknown, 9, 900)])
    assert service.parts.served.of(service.model).total == Saving(3, 3 * 3 * CHUNK, 0.0)
    (hot,) = service.parts.heat.hottest(9)
    assert (hot.token_count, hot.heat) == (3 * CHUNK, 3.0)
    await service.controller.close_sessions()


# ---------------------------------------------------------------- heat


def named(service: Service, found: list[HotPrefix]) -> list[tuple[int, int, float, float]]:
    """Each with the chunks that it has, in the place of its row."""
    return [(each.above, each.token_count // CHUNK, each.heat, each.own_heat) for each in found]


async def test_a_prefix_is_as_hot_as_all_that_goes_on_from_it() -> None:
    service = Service(chunks=16)
    session = service.controller.open_session()
    paths = [(1, 1, 2), (1, 1, 3), (1, 1, 3, 4), (5,)]
    for path, count in zip(paths, (4, 2, 1, 3), strict=True):
        await service.store(session, *path)
        for _ in range(count):
            service.check(session, *path)
    assert named(service, service.parts.heat.hottest(9)) == [
        (-1, 2, 7.0, 0.0), (0, 3, 4.0, 4.0), (-1, 1, 3.0, 3.0), (0, 3, 3.0, 2.0), (3, 4, 1.0, 1.0),
    ]  # fmt: skip
    assert named(service, service.parts.heat.hottest(2)) == [(-1, 2, 7.0, 0.0), (0, 3, 4.0, 4.0)]
    service.clock.advance(HALVED_S)
    assert service.parts.heat.hottest(1)[0].heat == 3.5
    service.clock.advance(20 * HALVED_S)
    assert service.parts.heat.hottest(9) == []
    await service.controller.close_sessions()


async def test_what_is_not_stored_any_more_is_not_hot() -> None:
    service = Service(chunks=2)
    session = service.controller.open_session()
    await service.store(session, 1, 2)
    service.check(session, 1, 2)
    await service.store(session, 3, 4)
    assert service.parts.heat.hottest(9) == []
    await service.controller.close_sessions()


class Rows:
    """As much of a catalog as heat reads: a chain of any length without its chunks, and one chunk beside it."""

    def __init__(self, length: int) -> None:
        self.table = self
        self.parents = [*range(-1, length - 1), -1]
        self.digests = [number.to_bytes(32, "big") for number in range(length + 1)]
        self.child_counts = [1] * (length + 1)
        self.token_counts = [16] * (length + 1)
        self.index = {digest: row for row, digest in enumerate(self.digests)}
        self.spaces = self
        self.number = 0

    def space_id(self, number: int) -> int:
        return number

    def by_id(self, space_id: int) -> Rows:
        return self


def test_of_many_short_lived_prefixes_what_they_share_stays_hot() -> None:
    """Twenty times as many as are told apart; each is fetched once, and hangs on the second chunk by one between."""
    count = 20 * PREFIX_COUNT_MAX
    rows = Rows(2)
    rows.parents[1:] = [0]
    rows.parents += [parent for number in range(count) for parent in (1, 2 + 2 * number)]
    rows.digests = [number.to_bytes(32, "big") for number in range(2 + 2 * count)]
    rows.child_counts = [1, count, *[1, 0] * count]
    rows.token_counts = [16] * len(rows.digests)
    rows.index = {digest: row for row, digest in enumerate(rows.digests)}
    heat = Heat(rows, ManualClock())  # type: ignore[arg-type]
    for number in range(count):
        heat.add(rows, rows.digests[3 + 2 * number])  # type: ignore[arg-type]
        assert len(heat._heat) <= 2 * PREFIX_COUNT_MAX
    hottest = heat.hottest(1)[0]
    assert (hottest.row, hottest.heat) == (1, count)


def test_a_tree_has_so_many_chunks_and_the_hottest_come_into_it() -> None:
    rows = Rows(2 * WALKED_CHUNKS_MAX)
    heat = Heat(rows, ManualClock())  # type: ignore[arg-type]  # what of it is read
    heat.add(rows, rows.digests[-1], 9)  # type: ignore[arg-type]
    heat.add(rows, rows.digests[WALKED_CHUNKS_MAX], 5)  # type: ignore[arg-type]
    assert [each.row for each in heat.hottest(9)] == [len(rows.digests) - 1]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12))
def test_a_tree_is_what_counting_every_prefix_says(paths: list[list[int]]) -> None:
    """Against a count of all prefixes of all fetches."""
    rows = Rows(0)
    rows.parents, rows.digests = [], []
    places: dict[tuple[int, ...], int] = {}
    for path in paths:
        for end in range(1, len(path) + 1):
            prefix = tuple(path[:end])
            if prefix not in places:
                places[prefix] = len(places)
                rows.parents.append(places.get(prefix[:-1], -1))
                rows.digests.append(len(rows.digests).to_bytes(32, "big"))
    rows.token_counts = [16] * len(places)
    rows.index = {digest: row for row, digest in enumerate(rows.digests)}
    heat = Heat(rows, ManualClock())  # type: ignore[arg-type]
    for path in paths:
        heat.add(rows, rows.digests[places[tuple(path)]])  # type: ignore[arg-type]
    of = {row: prefix for prefix, row in places.items()}
    expected = Counter(tuple(path[:end]) for path in paths for end in range(1, len(path) + 1))
    own = Counter(map(tuple, paths))
    found = heat.hottest(1000)
    assert {of[each.row] for each in found} >= set(own)
    for number, each in enumerate(found):
        prefix = of[each.row]
        assert (each.heat, each.own_heat, each.token_count) == (expected[prefix], own[prefix], 16 * len(prefix))
        above = () if each.above < 0 else of[found[each.above].row]
        assert each.above < number
        assert prefix[: len(above)] == above
        between = {prefix[:end] for end in range(len(above) + 1, len(prefix))}
        assert not between & {of[other.row] for other in found}
