"""Partial prefills as calls: what lies below memory, or on another host, is planned by the sidecar."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from typing import Any

import grpc
import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.loading import patience
from kvstore_client.loading.call import Asked
from kvstore_client.prompt import Prompt
from kvstore_ops.cli import app
from kvstore_ops.sidecar import Sidecar
from typer.testing import CliRunner

from kvstore.errors import Exhausted, InvalidRequest, KVStoreError, Unauthenticated, from_status
from kvstore.planning.loading import BusyTime, BusyTimes, LoadPlan, Prefill, Way
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire.plans import plan_from_message
from tests.e2e.prefills import RECEIVER, STEP, computed, keep
from tests.e2e.test_partial_prefill import prompt
from tests.server.raw import eventually

COUNT, STORED = STEP * 12 + 3, STEP * 12
SPEC = RECEIVER.spec
TOKEN_BYTES = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in SPEC.layers) * SPEC.item_size


class Operator:
    """Who asks by the sidecar's own socket what became of plans."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def plans(self, limit: int = 0) -> list[admin_pb2.PlanEntry]:
        session = self._client.connect_now()
        return list(session.call(session.admin.Plans, admin_pb2.PlansRequest(limit=limit), 10.0).plans)

    def last(self) -> admin_pb2.PlanEntry:
        """The plan that began last, once it has ended."""
        eventually(lambda: self.plans(1)[0].state != "on its way")
        return self.plans(1)[0]


@pytest.fixture(scope="module")
def operator(sidecar: Sidecar) -> Iterator[Operator]:
    with connect(sidecar.socket_address) as connected:
        yield Operator(connected)


@pytest.fixture
def client(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(patience, "BUDGET", 1e4)  # these tests are about plans: no load is given up
    with connect(sidecar.address, planning="on") as connected:
        connected.peek = lambda *_, **__: None  # type: ignore[method-assign]  # as if nothing showed in shared memory
        yield connected
        eventually(lambda: not held(connected))


def held(client: Client) -> int:
    sessions = client.stats().sessions
    return sessions.lease_count + sessions.ticket_count + sessions.stream_count


def speeds(client: Client, link_bytes_per_s: float, token_s: float) -> None:
    """The client has measured so."""
    sizes = [size for size in (1000, 100_000, 10_000_000) for _ in range(3)]
    client.planner._link = BusyTimes(tuple(BusyTime(size, size / link_bytes_per_s) for size in sizes))
    client.planner._prefills.clear()
    for _ in range(40):
        client.planner.computed(SPEC, 0, Prefill(1000, 0, 1000 * token_s))


def plain(tokens: torch.Tensor) -> torch.Tensor:
    """The last logits of a plain prefill."""
    return computed(RECEIVER, tokens).logits[-1]


def test_all_is_loaded_where_that_is_fastest_and_the_sidecar_hears_of_it(client: Client, operator: Operator) -> None:
    tokens = prompt(COUNT, 51)
    keep(client, RECEIVER, tokens)
    speeds(client, 1e12, 1e-3)
    found = client.partial_prefill(RECEIVER, tokens)
    assert found.plan.loading is not None
    assert found.plan.loading.chosen.way is Way.LOAD
    assert found.plan.reused_token_count >= STORED
    entry = operator.last()
    assert (entry.state, entry.model_id) == ("done", SPEC.model_id)
    assert plan_from_message(entry.plan) == found.plan.loading
    assert entry.stored_token_count == STORED
    assert 0 < entry.end.ttft_seconds <= found.timeline.total_s


@pytest.mark.parametrize("seed", [52, 53])
def test_the_front_is_computed_while_what_lies_behind_loads(client: Client, seed: int) -> None:
    """Where both take alike long they meet about in the middle, and the answer is a plain prefill's."""
    tokens = prompt(COUNT, seed)
    keep(client, RECEIVER, tokens)
    speeds(client, TOKEN_BYTES / 1e-3, 1e-3)
    found = client.partial_prefill(RECEIVER, tokens)
    assert found.plan.loading is not None
    chosen = found.plan.loading.chosen
    assert chosen.way is Way.MEET
    assert 0 < chosen.load_start < chosen.load_stop <= STORED
    assert found.plan.front_token_count == chosen.load_start
    assert found.plan.reused_token_count == chosen.loaded_tokens
    (learned,) = client.planner._prefills.values()
    assert (learned.prefills[-1].new_tokens, learned.prefills[-1].context_tokens) == (chosen.load_start, 0)
    assert torch.allclose(found.logits[-1], plain(tokens), atol=1e-4)


def test_a_front_that_was_computed_stays_when_the_rest_is_lost(
    client: Client, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(COUNT, 54)
    keep(client, RECEIVER, tokens)
    speeds(client, TOKEN_BYTES / 1e-3, 1e-3)
    wanted = plain(tokens)
    begun = client.start_fetch

    def lost(*args: Any, **options: Any) -> Any:
        transfer = begun(*args, **options)
        transfer.wait(10.0)
        transfer._bringing.layers[3].__init__()
        transfer._bringing.layers[3].set_exception(Exhausted("lost, says the test"))
        return transfer

    monkeypatch.setattr(client, "start_fetch", lost)
    embedded: list[int] = []
    embed = TransformersRunner.embed
    monkeypatch.setattr(
        TransformersRunner, "embed", lambda runner, ids: (embedded.append(len(ids)), embed(runner, ids))[1]
    )
    found = client.partial_prefill(RECEIVER, tokens)
    assert found.plan.reason == "lost, says the test: what was to come was computed"
    assert torch.allclose(found.logits[-1], wanted, atol=1e-4)
    front, behind, again = embedded
    assert 0 < front < COUNT
    assert behind < again == COUNT - front, "the front was computed once"
    assert operator.last().state == "given up"


def test_it_is_computed_where_that_is_fastest_and_nothing_is_held(client: Client, operator: Operator) -> None:
    tokens = prompt(COUNT, 55)
    keep(client, RECEIVER, tokens)
    speeds(client, 1.0, 1e-6)
    found = client.partial_prefill(RECEIVER, tokens)
    assert found.plan.loading is not None
    assert found.plan.loading.chosen.way is Way.PREFILL
    assert found.plan.reused_token_count == 0
    assert operator.last().end.HasField("computed")


def test_a_client_that_only_observes_loads_all_and_says_what_it_would_have_done(
    client: Client, operator: Operator, sidecar: Sidecar
) -> None:
    tokens = prompt(COUNT, 56)
    keep(client, RECEIVER, tokens)
    speeds(client, 1.0, 1e-6)
    client.planner.mode = "observe"
    found = client.partial_prefill(RECEIVER, tokens)
    assert found.plan.loading is not None
    assert found.plan.loading.chosen.way is Way.PREFILL
    assert found.plan.reused_token_count >= STORED
    assert operator.last().state == "done"
    drawn = shown("--limit", "1", "--address", sidecar.socket_address)
    assert "; with planning on, " in " ".join(drawn.split()), "it was compared: all was loaded"
    client.planner.mode = "off"
    found = client.partial_prefill(RECEIVER, tokens)
    assert found.plan.loading is None
    assert found.plan.reused_token_count >= STORED
    assert not operator.last().HasField("plan")


def test_a_partial_chunk_behind_what_is_loaded_comes_along(client: Client) -> None:
    tokens = prompt(COUNT, 57)
    keep(client, RECEIVER, tokens)
    speeds(client, 1e12, 1e-3)
    asked = torch.cat((tokens, prompt(9, 58)))
    found = client.partial_prefill(RECEIVER, asked)
    assert found.plan.reused_token_count == COUNT
    assert torch.allclose(found.logits[-1], plain(asked), atol=1e-4)


def test_the_command_shows_what_was_planned_and_what_came_of_it(
    client: Client, operator: Operator, sidecar: Sidecar
) -> None:
    tokens = prompt(COUNT, 70)
    keep(client, RECEIVER, tokens)
    speeds(client, 1e12, 1e-3)
    client.partial_prefill(RECEIVER, tokens)
    number = operator.last().number
    place = ["--address", sidecar.socket_address]
    (told,) = json.loads(shown("--number", str(number), "--json", *place))
    assert told["model_id"] == SPEC.model_id
    assert told["plan"]["candidates"][0]["way"] == "WAY_PREFILL"
    assert told["end"]["ttft_seconds"] > 0
    assert "compared: half were off by" in shown("--limit", "1", *place)
    whole = shown("--number", str(number), *place)
    assert "less than a plain prefill" in " ".join(whole.split())
    with pytest.raises(InvalidRequest, match="no plan that is kept has it"):
        shown("--number", "999999", *place)


def shown(*options: str) -> str:
    result = CliRunner().invoke(app, ["plans", *options])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_what_engines_take_is_learned_for_those_who_have_measured_nothing(client: Client) -> None:
    fresh = prompt(COUNT, 59)
    client.partial_prefill(RECEIVER, fresh)
    eventually(lambda: any(each.model_id == SPEC.model_id for each in client.stats().engines))
    (told,) = [each for each in client.stats().engines if each.model_id == SPEC.model_id and not each.step_tokens]
    assert told.rate.sample_count >= 1
    assert told.rate.token_seconds > 0
    keep(client, RECEIVER, fresh)
    client.planner._prefills.clear()
    found = client.partial_prefill(RECEIVER, fresh)
    assert found.plan.loading is not None
    assert found.plan.loading.is_measured


def test_a_sidecar_that_plans_nothing_is_asked_once(
    client: Client, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of an older release."""
    tokens = prompt(COUNT, 60)
    keep(client, RECEIVER, tokens)
    session, count = client.connect_now(), len(operator.plans())
    unknown = session.channel.stream_stream("/kvstore.v1alpha.PrefillService/NoSuchCall")
    calls: list[int] = []

    class Older:
        def PartialPrefill(self, requests: Any, **options: Any) -> Any:
            calls.append(1)
            return unknown((each.SerializeToString() for each in requests), **options)

    monkeypatch.setattr(session, "prefills", Older())
    speeds(client, 1e12, 1e-3)
    for _ in range(2):
        assert client.partial_prefill(RECEIVER, tokens).plan.reused_token_count >= STORED
    assert (len(calls), len(operator.plans())) == (1, count)


# ---------------------------------------------------------------- whoever speaks the protocol badly


def talk(client: Client, *steps: prefill_pb2.PartialPrefillRequest) -> list[prefill_pb2.PartialPrefillResponse]:
    session = client.connect_now()
    try:
        return list(session.prefills.PartialPrefill(iter(steps), timeout=10.0, metadata=session.metadata))
    except grpc.RpcError as error:
        raise from_status(error.code().name, error.details()) from None


def begin(client: Client, **fields: Any) -> prefill_pb2.PartialPrefillRequest:
    _, name = client._context.ready(SPEC)
    asked = {"query": pb.ChainQuery(fingerprint=name, digests=bytes(range(32))), "token_count": STEP, **fields}
    return prefill_pb2.PartialPrefillRequest(begin=prefill_pb2.BeginPrefill(**asked))


def ended(**fields: Any) -> prefill_pb2.PartialPrefillRequest:
    return prefill_pb2.PartialPrefillRequest(end=prefill_pb2.EndPrefill(**fields))


def test_what_does_not_fit_together_is_refused_by_name(client: Client) -> None:
    wrong: list[tuple[type[KVStoreError], str, list[prefill_pb2.PartialPrefillRequest]]] = [
        (InvalidRequest, "begins", [ended(ttft_seconds=1.0)]),
        (InvalidRequest, "begins", []),
        (InvalidRequest, "only end", [begin(client), begin(client)]),
        (InvalidRequest, "more than the prompt", [begin(client, token_count=STEP - 1)]),
        (InvalidRequest, "reusable_token_count", [begin(client, reusable_token_count=STEP + 1)]),
        (InvalidRequest, "mode", [begin(client, mode=77)]),
        (InvalidRequest, "step_tokens", [begin(client, step_tokens=(1 << 30) + 1)]),
        (Exhausted, "limits.token_count_max", [begin(client, token_count=2**63)]),
    ]
    for kind, word, steps in wrong:
        with pytest.raises(kind, match=word):
            talk(client, *steps)


def test_more_readers_than_a_ticket_has_are_refused_and_hold_nothing(client: Client) -> None:
    tokens = prompt(COUNT, 61)
    keep(client, RECEIVER, tokens)
    _, name = client._context.ready(SPEC)
    digests = Prompt.of(SPEC, tokens, (), None).digests[:12]
    query = pb.ChainQuery(fingerprint=name, digests=b"".join(digests))
    with pytest.raises(InvalidRequest, match="readers"):
        talk(client, begin(client, query=query, token_count=COUNT, readers=1 << 20))
    assert not held(client)


def test_a_call_without_a_session_is_refused(client: Client) -> None:
    session = client.connect_now()
    metadata = tuple((key, value) for key, value in session.metadata if key != "kvstore-session-bin")
    with pytest.raises(grpc.RpcError) as raised:
        list(session.prefills.PartialPrefill(iter([begin(client)]), timeout=10.0, metadata=metadata))
    assert raised.value.code().name == Unauthenticated.status


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 1000.0, 1e9])
def test_lies_teach_nothing(client: Client, lie: float) -> None:
    """Durations that did not pass, and rates that no engine has."""
    before = [each.rate.sample_count for each in client.stats().engines]
    took = prefill_pb2.MeasuredPrefill(new_tokens=STEP, context_tokens=0, seconds=lie, passes=1)
    talk(client, begin(client), ended(ttft_seconds=lie, wait_seconds=lie, computed=took))
    talk(client, begin(client), ended(ttft_seconds=0.001, computed=took))
    assert [each.rate.sample_count for each in client.stats().engines] == before
    rate = prefill_pb2.ComputeRate(pass_seconds=lie, token_seconds=lie, load=lie, caution=lie, sample_count=3)
    link = prefill_pb2.LinkRate(latency_seconds=lie, byte_seconds=lie, caution=lie, sample_count=3)
    on = prefill_pb2.PLANNING_MODE_ON
    (answer,) = talk(client, begin(client, compute=rate, link=link, mode=on, ways=[2, 3, 4, 99]))
    assert not math.isnan(answer.plan.candidates[0].ttft_seconds)


@pytest.mark.parametrize("counts", [(STEP + 1, 0), (STEP, 1), (1 << 30, 0)])
def test_a_prefill_of_more_than_the_prompt_teaches_nothing(client: Client, counts: tuple[int, int]) -> None:
    """It would make an engine look fast for all clients that have not measured it."""
    before = [each.rate.sample_count for each in client.stats().engines]
    took = prefill_pb2.MeasuredPrefill(new_tokens=counts[0], context_tokens=counts[1], seconds=1e-6, passes=1)
    talk(client, begin(client), ended(ttft_seconds=0.001, computed=took))
    assert [each.rate.sample_count for each in client.stats().engines] == before


def test_rates_of_no_engine_count_as_no_time_saved(client: Client) -> None:
    """Each is possible; all together say that a plain prefill takes longer than the age of the earth."""
    tokens = prompt(COUNT, 63)
    keep(client, RECEIVER, tokens)
    speeds(client, 1e12, 1e-3)
    _, name = client._context.ready(SPEC)
    digests = b"".join(Prompt.of(SPEC, tokens, (), None).digests[:1])
    rate = prefill_pb2.ComputeRate(pair_seconds=3600.0, load=16.0, caution=1.0, sample_count=1)
    many = 1 << 20  # the default limits.token_count_max
    saved = client.stats().counters["partial_prefill_saved_milliseconds"]
    asked = begin(
        client, query=pb.ChainQuery(fingerprint=name, digests=digests), token_count=many, reusable_token_count=many - 1,
        compute=rate, mode=prefill_pb2.PLANNING_MODE_ON, ways=[2],
    )  # fmt: skip
    (answer,) = talk(client, asked, ended(ttft_seconds=0.0))
    assert answer.plan.candidates[answer.plan.chosen].way == 2
    assert client.stats().counters["partial_prefill_saved_milliseconds"] == saved


def test_a_client_that_goes_in_the_middle_holds_nothing(client: Client, operator: Operator) -> None:
    tokens = prompt(COUNT, 62)
    keep(client, RECEIVER, tokens)
    speeds(client, 1e12, 1e-3)
    prompted = Prompt.of(SPEC, tokens, (), None)
    call = client.planner.begin(prompted, Asked(COUNT - 1, 0, frozenset(Way), "on"))
    assert call is not None
    assert client.stats().sessions.ticket_count == 1
    call.close()
    eventually(lambda: not held(client))
    assert operator.last().state == "gone"


def test_a_plan_that_no_release_makes_computes_everything() -> None:
    plan = plan_from_message(prefill_pb2.LoadPlan(token_count=9, chosen=1))
    assert (plan.chosen.way, plan.chosen is plan.prefill, plan.token_count) == (Way.PREFILL, True, 9)


def test_a_chosen_way_that_only_a_later_release_knows_means_compute(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar holds chunks for it. The client loads none of them, and they are free afterwards."""
    tokens = prompt(COUNT, 64)
    keep(client, RECEIVER, tokens)
    speeds(client, 1e12, 1e-3)

    def later(message: prefill_pb2.LoadPlan, ways: Collection[Way]) -> LoadPlan:
        for each in message.candidates:
            each.way = 99 if each.way else 0  # type: ignore[assignment]
        return plan_from_message(message, ways)

    monkeypatch.setattr("kvstore_client.loading.call.plan_from_message", later)
    found = client.partial_prefill(RECEIVER, tokens)
    assert found.plan.loading is not None
    assert "does not know" in found.plan.loading.why
    assert found.plan.reused_token_count == 0
    assert torch.allclose(found.logits[-1], plain(tokens), atol=1e-4)


def test_a_way_that_only_a_later_release_knows_is_left_out() -> None:
    later, load, first = (prefill_pb2.Candidate(way=way) for way in (99, prefill_pb2.WAY_LOAD, prefill_pb2.WAY_FIRST))
    told = prefill_pb2.LoadPlan(candidates=[later, load, first], chosen=1)
    plan = plan_from_message(told)
    assert plan.chosen.way is Way.LOAD
    assert [each.way for each in plan.candidates] == [Way.PREFILL, Way.LOAD, Way.FIRST]
    told.chosen = 0
    assert plan_from_message(told).chosen.way is Way.PREFILL
