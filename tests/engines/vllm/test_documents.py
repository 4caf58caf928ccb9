"""Documents in prompts of vLLM: which are kept, over which a prompt is computed, and whom the result never reaches."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_client import ModelSpec, Recompute
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.engines.vllm import documents
from kvstore_client.engines.vllm.documents import DERIVED, NamedDocuments, check_documents, own_salt
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.engines.vllm.step import Mended, Step
from kvstore_client.engines.vllm.worth import SEEN_S_MAX
from kvstore_ops.operators.calls import Operator
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import Prefill
from kvstore.v1alpha import admin_pb2
from tests.engines.vllm.engine import BLOCK, Engine, blocks_of, matched, request, scheduled
from tests.engines.vllm.lookalike import LlamaForCausalLM
from tests.recompute.models import model_of as made
from tests.recompute.models import prompt
from tests.server.raw import eventually
from tests.simulated import ManualClock

HEAD, ONE, TWO, QUESTION = (prompt(count, seed).tolist() for count, seed in ((6, 1), (33, 2), (18, 3), (7, 4)))
ASKED = HEAD + TWO + ONE + QUESTION
RUNS = [(6, 24), (24, 57)]
SOME = {"selector": "suffix_attention", "ratio": 0.4}


def named(*runs: Any, preamble: int = 6) -> dict[str, Any]:
    return {"kv_transfer_params": {"kvstore_documents": list(runs), "kvstore_preamble": preamble}}


def asked(name: str, salt: str | None = DERIVED, runs: Any = RUNS) -> Any:
    return request(name, ASKED, cache_salt=salt, **named(*runs))


@pytest.fixture(scope="module")
def theirs() -> Any:
    return made("qwen3")


@pytest.fixture(scope="module")
def spec(theirs: Any) -> ModelSpec:
    return TransformersRunner(theirs, chunk_tokens=16).spec


@pytest.fixture
def engine(sidecar: Sidecar, theirs: Any, spec: ModelSpec) -> Any:
    engine = Engine(sidecar.address, spec, model=LlamaForCausalLM(theirs), recompute=SOME)
    yield engine
    engine.close()


def wait_kept(engine: Engine, save: Any) -> None:
    """Until a document is stored, which is no prefix."""

    def found() -> Any:
        runs = [(save.preamble, save.tokens.size)]
        return engine.clients[0].lookup(save.spec, save.tokens, extras=save.extras, segments=runs, preamble=HEAD)

    eventually(lambda: found().segments[0].is_whole)
    assert found().prefix_token_count == 0


def remember(engine: Engine, *texts: list[int], salt: str | None = None) -> None:
    """Keep documents of random numbers, as an engine does that computes them."""
    for index, each in enumerate(texts):
        tokens = HEAD + each
        whole = request(f"{salt}{index}", tokens, cache_salt=salt, **named((6, len(tokens))))
        blocks = blocks_of(len(tokens))
        assert engine.admit(whole, blocks) == 0
        engine.fill(blocks, index)
        (save,) = engine.compute(whole, blocks, 0, len(tokens)).saves
        wait_kept(engine, save)
        engine.scheduler.finished(whole.request_id)


def forget(engine: Engine) -> None:
    """Evict all that is stored."""
    evicted = admin_pb2.ChangeRequest(selection=admin_pb2.Selection(tier="memory"), evict=admin_pb2.Evict())
    assert [*Operator(engine.clients[0]).change(evicted)]


def test_a_prompt_is_computed_over_its_documents_and_not_kept(engine: Engine, theirs: Any, spec: ModelSpec) -> None:
    remember(engine, ONE, TWO)
    blocks = blocks_of(len(ASKED))
    engine.fill(blocks, 9)
    mended = asked("b")
    assert engine.admit(mended, blocks) == 60  # whole blocks of 4; the last of 64 tokens is left
    step = engine.compute(mended, blocks, 60, 4)
    assert (len(step.mends), step.saves) == (1, [])
    assert engine.worker.failed_blocks() == set()
    moved = engine.worker.moved.take()
    again = Recompute(0, -1, 0.4, "suffix_attention").share(2)  # of the second one: the first one stands where it stood
    assert moved["mend_reused_tokens"] == 51
    assert moved["mend_computed_tokens"] == pytest.approx(13 + again * 33, abs=2)
    assert len(moved["mend_seconds"]) == 1
    wanted = engine.clients[0].partial_prefill(
        TransformersRunner(theirs, spec=spec), ASKED, segments=RUNS, preamble=HEAD,
        recompute=Recompute(0, -1, 0.4, "suffix_attention"),
    )  # fmt: skip
    for pages, planes in zip(engine.content(blocks[:15]), wanted.kv, strict=True):
        held = pages.transpose(1, 2).flatten(0, 1).transpose(0, 1)  # [heads, slots, K and V]
        assert torch.allclose(held, torch.cat([each[:, :60] for each in planes], -1), atol=1e-4)
    engine.scheduler.finished("b")
    assert engine.admit(request("c", ASKED), blocks) == 0, "nothing of it is a prefix"


def test_documents_of_another_salt_or_of_a_request_without_one_are_not_reused(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    remember(engine, ONE, TWO, salt="tenant")
    assert own_salt(asked("x", f"{DERIVED}:tenant")) == "tenant"
    assert own_salt(asked("x", f"{DERIVED}tenant")) == f"{DERIVED}tenant"
    for name, salt, found in (("a", None, 0), ("b", "tenant", 0), ("c", "other", 0), ("d", "tenant", 60)):
        of_derived = f"{DERIVED}:{salt}" if name in "cd" else salt
        assert matched(engine.scheduler, asked(name, of_derived), 0) == (found, False)
    assert caplog.text.count("without a cache_salt that begins with") == 1


def test_what_vllm_has_behind_the_documents_is_not_computed_again(engine: Engine) -> None:
    remember(engine, ONE, TWO)
    assert matched(engine.scheduler, asked("a"), 0) == (60, False)
    assert matched(engine.scheduler, asked("b"), 4) == (56, False)
    for name, computed in (("c", 24), ("d", 40), ("e", 56)):
        assert matched(engine.scheduler, asked(name), computed) == (0, False), "vLLM computes less"


def test_a_prompt_of_which_little_is_stored_is_computed_by_vllm(engine: Engine) -> None:
    remember(engine, ONE, TWO)
    forget(engine)
    remember(engine, ONE)
    assert matched(engine.scheduler, asked("a"), 0) == (0, False), "half of it, of which half is computed again"
    short = request("b", HEAD + ONE + QUESTION, cache_salt=DERIVED, **named((6, 39)))
    assert matched(engine.scheduler, short, 0) == (44, False)


def test_the_load_of_a_prompt_that_is_not_mended_is_planned(engine: Engine) -> None:
    remember(engine, TWO, salt="planned")
    engine.keep(request("a", ASKED[:16], cache_salt="planned"), blocks_of(16))
    engine.clients[0].planner.mode = "on"
    assert matched(engine.scheduler, asked("b", f"{DERIVED}:planned"), 0) == (16, True)
    assert engine.scheduler._lookups._found["b"].decision is not None


@pytest.mark.parametrize("left", [[], [ONE]], ids=["nothing", "too little"])
def test_a_prompt_whose_documents_are_gone_when_it_is_mended_is_computed_by_vllm(
    engine: Engine, left: list[list[int]]
) -> None:
    remember(engine, ONE, TWO)
    one, blocks = asked("a"), blocks_of(64)
    assert engine.admit(one, blocks) == 60
    forget(engine)
    remember(engine, *left)
    before = engine.fill(blocks, 9)
    engine.compute(one, blocks, 60, 4)
    assert engine.worker.failed_blocks() == set(blocks)
    assert engine.worker.moved.take().keys() & {"mends", "failed_mends"} == {"failed_mends"}
    assert all(torch.equal(*each) for each in zip(engine.content(blocks), before, strict=True))


def test_a_request_that_takes_mended_caches_is_not_kept(engine: Engine) -> None:
    """Nothing of it is mended, but vLLM may have had its first blocks from one of which something was."""
    one = asked("a", f"{DERIVED}:somebody")
    assert engine.admit(one, blocks_of(64)) == 0
    assert engine.compute(one, blocks_of(64), 0, 64).saves == []


def test_a_prompt_that_cannot_be_computed_over_its_documents_is_told_once(engine: Engine) -> None:
    remember(engine, ONE, TWO)
    engine.worker._mender._runner = None  # type: ignore[union-attr]  # it has one
    one, blocks = asked("a"), blocks_of(64)
    assert engine.admit(one, blocks, 4) == 56
    engine.compute(one, blocks, 60, 4)
    failed = engine.worker.failed_blocks()
    assert failed == set(blocks[1:])
    assert engine.scheduler.reported(failed) == failed, "vLLM's prefix cache has them, and gives them to others"
    assert matched(engine.scheduler, one, 4) == (0, False)


def test_blocks_computed_beside_a_mend_that_fails_are_dropped_too(engine: Engine) -> None:
    """Of a request with the same salt that has the first one's blocks by vLLM's prefix cache, in the same step, as
    where vLLM does not ask before."""
    remember(engine, ONE, TWO)
    engine.worker._mender._runner = None  # type: ignore[union-attr]  # it has one
    one, blocks = asked("a"), blocks_of(64)
    assert engine.admit(one, blocks) == 60
    beside, own = request("b", ASKED + QUESTION, cache_salt=DERIVED), [40, 41, 42]
    engine.scheduler.new_request(beside)
    step = scheduled("a", blocks, 60, 4)
    step.scheduled_new_reqs += scheduled("b", blocks[:15] + own, 60, 11).scheduled_new_reqs
    step.num_scheduled_tokens["b"] = 11
    engine.worker.begin(engine.scheduler.step(step))
    failed = engine.worker.failed_blocks()
    assert failed == set(blocks)
    assert engine.scheduler.reported(failed) == {*blocks, *own}


def test_blocks_of_a_mend_that_fails_are_dropped_though_its_request_was_aborted_meanwhile(engine: Engine) -> None:
    remember(engine, ONE, TWO)
    engine.worker._mender._runner = None  # type: ignore[union-attr]  # it has one
    one, blocks = asked("a"), blocks_of(64)
    assert engine.admit(one, blocks) == 60
    engine.compute(one, blocks, 60, 4)
    engine.scheduler.finished("a")
    assert engine.scheduler.reported(engine.worker.failed_blocks()) == set(blocks)


def test_a_sidecar_that_stalls_is_waited_for_once_by_the_mends_of_a_step(
    own_sidecar: Sidecar, theirs: Any, spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM computes both."""
    engine = Engine(own_sidecar.address, spec, model=LlamaForCausalLM(theirs), recompute=SOME, timeout_s=2.2)
    remember(engine, ONE, TWO)
    blocks = {"a": blocks_of(64), "b": blocks_of(64, 20)}
    for name, given in blocks.items():
        assert engine.admit(asked(name), given) == 60
    os.kill(own_sidecar.pid, signal.SIGSTOP)
    try:
        engine.worker.begin(Step(mends=engine.scheduler._mends))
    finally:
        os.kill(own_sidecar.pid, signal.SIGCONT)
    assert engine.worker.failed_blocks() == {*blocks["a"], *blocks["b"]}
    assert caplog.text.count("; the prompt is computed") == 1
    engine.close()


def ended(step: Step, *mended: Mended) -> Any:
    """Return the workers' report of a step."""
    told = SimpleNamespace(number=step.number, mended=mended)
    return SimpleNamespace(finished_recving=None, invalid_block_ids=None, kv_connector_worker_meta=told)


def timed(engine: Engine, tokens_per_s: float, *mended: Mended) -> None:
    """Have an engine learn how fast vLLM computes, and what came of prompts over documents."""
    for count in (16, 64) * 6:
        engine.clients[0].planner.computed(engine.scheduler._planner._spec, 0, Prefill(count, 0, count / tokens_per_s))
    engine.scheduler.received(ended(Step(), *mended))


@pytest.mark.parametrize(("took_s", "is_faster"), [(0.03, True), (0.055, True), (0.065, False), (3.0, False)])
def test_a_prompt_that_vllm_computes_sooner_is_not_mended(
    sidecar: Sidecar, theirs: Any, spec: ModelSpec, took_s: float, is_faster: bool
) -> None:
    """vLLM takes 64 ms for it, and 4 ms for its last block. A minute later it is tried again. What was measured first
    makes no difference."""
    clock = ManualClock()
    engine = Engine(sidecar.address, spec, model=LlamaForCausalLM(theirs), recompute=SOME, clock=clock)
    remember(engine, ONE, TWO)
    for each in 2 * [Mended(64, 51, 38, took_s)]:
        engine.scheduler.received(ended(Step(), each))
    timed(engine, 1000.0)
    if not is_faster:
        assert matched(engine.scheduler, asked("a"), 0) == (0, False)
        clock.advance(SEEN_S_MAX + 1.0)
    assert matched(engine.scheduler, asked("b"), 0) == (60, False)
    engine.close()


@pytest.mark.parametrize("slow", [[Mended(64, 51, 38, 3.0)], 2 * [Mended(6400, 5100, 3800, 9000.0)]])
def test_one_slow_mend_ends_no_others(sidecar: Sidecar, theirs: Any, spec: ModelSpec, slow: list[Mended]) -> None:
    """The first one of a process pays for what the others find ready. Those of long prompts end none of short ones."""
    engine = Engine(sidecar.address, spec, model=LlamaForCausalLM(theirs), recompute=SOME, clock=ManualClock())
    remember(engine, ONE, TWO)
    timed(engine, 1000.0, *slow)
    assert matched(engine.scheduler, asked("a"), 0) == (60, False)
    engine.scheduler.received(ended(Step(), Mended(64, 51, 38, 0.03)))
    assert matched(engine.scheduler, asked("b"), 0) == (60, False)
    engine.close()


def test_the_scheduler_hears_of_what_was_mended_and_how_long_steps_take(
    sidecar: Sidecar, theirs: Any, spec: ModelSpec
) -> None:
    """Though nothing is planned."""
    engine = Engine(sidecar.address, spec, model=LlamaForCausalLM(theirs), recompute=SOME)
    remember(engine, ONE, TWO)
    blocks = blocks_of(64)
    assert engine.admit(asked("a"), blocks) == 60
    step = engine.compute(asked("a"), blocks, 60, 4)
    assert step.number
    (mended,) = engine.worker.mended()
    assert (mended.token_count, mended.reused) == (64, 51)
    assert 13 < mended.computed < 64
    assert mended.seconds > 0
    assert engine.worker.mended() == []
    engine.scheduler.finished("a")
    assert engine.admit(request("b", TWO[:7]), blocks) == 0
    engine.scheduler.received(ended(engine.compute(request("b", TWO[:7]), blocks, 0, 7)))
    assert engine.scheduler._planner.computing_s(0, 7) > 0
    engine.close()


def test_a_request_that_has_blocks_which_a_mend_fills_waits_for_the_next_step(engine: Engine) -> None:
    """If the mend fails, vLLM computes the first request anew, in one step or in many, and others over its blocks."""
    remember(engine, ONE, TWO)
    one, blocks = asked("a"), blocks_of(64)
    assert engine.admit(one, blocks) == 60
    assert engine.scheduler.matched(asked("b"), 60) == (None, False)
    assert engine.scheduler.matched(request("c", HEAD + TWO, cache_salt=DERIVED), 8) == (None, False)
    assert matched(engine.scheduler, request("d", QUESTION * 3), 8)[0] == 0, "of other tokens"
    engine.compute(one, blocks, 60, 4)
    assert matched(engine.scheduler, asked("b"), 60) == (0, False)


def test_a_step_that_mends_says_nothing_of_what_vllm_computes_in_a_time(engine: Engine) -> None:
    remember(engine, ONE, TWO)
    planner = engine.clients[0].planner
    for one, computed in ((asked("a"), 60), (request("b", QUESTION), 0)):
        assert not planner._prefills, "of the mend"
        count, blocks = one.num_tokens, blocks_of(one.num_tokens)
        assert engine.admit(one, blocks) == computed
        engine.scheduler.received(ended(engine.compute(one, blocks, computed, count - computed)))
    assert planner._prefills, "of the other request"


def test_documents_are_kept_where_one_table_has_all_of_a_cache(sidecar: Sidecar, spec: ModelSpec) -> None:
    """Without windows, too, layers may have a table each."""
    tables = [LayerGroup(0, (0,), BLOCK), LayerGroup(1, (1,), BLOCK)]
    for groups, is_kept in (([], True), (tables, False)):
        engine = Engine(sidecar.address, spec, groups=groups)
        engine.scheduler.new_request(request("a", HEAD + ONE, **named((6, 39))))
        assert (engine.scheduler._tracked["a"].preamble is not None) == is_kept
        engine.close()


@pytest.mark.parametrize(
    ("runs", "preamble", "said"),
    [
        ([(6, 90)], 6, "must be a run of the prompt's 64 tokens"),
        ([(30, 40), (20, 24)], 6, "behind the segment before it"),
        ("all", 6, "must be a list"),
        ([], 6, "one run or more, behind the 6 tokens"),
        ([(4, 24)], 6, "one run or more, behind the 6 tokens"),
        ([(each, each + 1) for each in range(6, 64)], 6, "names 58 runs, and may name 57"),
        ([(6, 24)], -1, "kvstore_preamble -1 must be a whole number"),
        ([(6, 24)], 64, "kvstore_preamble 64 must be"),
        ([(6, 24)], True, "kvstore_preamble True must be"),
    ],
)
def test_documents_that_are_none_are_said_and_the_request_goes_on(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, runs: Any, preamble: Any,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(documents, "RUNS_MAX", 57)
    given = {"kv_transfer_params": {"kvstore_documents": runs, "kvstore_preamble": preamble}}
    wrong = request("a", ASKED, cache_salt=DERIVED, **given)
    with pytest.raises(InvalidRequest, match=said):
        NamedDocuments.of(wrong)
    assert matched(engine.scheduler, wrong, 0) == (0, False)
    assert "neither kept nor reused" in caplog.text


@pytest.mark.parametrize("given", [5, ["kvstore_documents"], "kvstore_documents"])
def test_parameters_that_are_no_table_name_no_documents(engine: Engine, given: Any) -> None:
    """Over HTTP a request may have anything there, by ``vllm_xargs``."""
    assert matched(engine.scheduler, request("a", ASKED, cache_salt=DERIVED, kv_transfer_params=given), 0) == (0, False)


def test_a_document_is_kept_when_its_prompt_is_complete(engine: Engine) -> None:
    tokens = HEAD + ONE
    whole, blocks = request("a", tokens, **named((6, 39))), blocks_of(39)
    assert engine.admit(whole, blocks) == 0
    engine.fill(blocks, 1)
    assert engine.compute(whole, blocks, 0, 20).saves == []
    (save,) = engine.compute(whole, [], 20, 19, is_new=False).saves
    assert (save.preamble, save.new, save.block_ids) == (6, 33, [blocks])
    assert engine.compute(whole, [], 39, 1, is_new=False).saves == []
    assert len(blocks) * BLOCK > 39, "the last block is kept, too, though it is not whole"
    place = SimpleNamespace(offset=0, length=2)
    seen = [SimpleNamespace(mm_position=place, identifier="x", modality="image")]
    engine.scheduler.new_request(request("b", tokens, mm_features=seen, **named((6, 39))))
    assert engine.scheduler._tracked["b"].preamble is None, "a document has no images"


def test_a_setting_that_computes_about_as_much_as_vllm_is_refused() -> None:
    layers = [SimpleNamespace(window=0)] * 4
    geometry: Any = SimpleNamespace(
        ranks=1, draft=None, is_one_table=True, layers=layers, mla=False, cache_dtype="float32"
    )  # fmt: skip
    config: Any = SimpleNamespace(model_config=SimpleNamespace(dtype="float32"))
    check_documents(config, geometry, Recompute(0, -1, 0.5, "suffix_attention"), is_alone=True)
    for much in (Recompute(0, -1, 0.6, "suffix_attention"), Recompute(0, 2), Recompute(0, -1, 1.0)):
        with pytest.raises(InvalidRequest, match=r"% of documents again, and .* up to 67%: lower ratio or last_layer"):
            check_documents(config, geometry, much, is_alone=True)
