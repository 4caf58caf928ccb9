"""The vLLM connector's two sides without vLLM: requests and steps as vLLM passes them, a real sidecar below."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_client import ModelSpec, connect
from kvstore_client.engines.vllm.identity import Adapters
from kvstore_client.engines.vllm.pages import PagesOfModel
from kvstore_client.engines.vllm.scheduler import SchedulerSide
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_client.engines.vllm.worker import WorkerSide
from kvstore_ops.sidecar import Sidecar

from kvstore.keys import EXTRA_BYTES_MAX
from tests.engines.vllm.engine import (
    BLOCK,
    BLOCKS,
    MLA,
    SPEC,
    Engine,
    blocks_of,
    matched,
    request,
    scheduled,
    wait_stored,
)
from tests.server.raw import eventually
from tests.specs import tokens_of


@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["heads", "latent"])
def test_what_one_engine_computed_lies_in_the_others_blocks(sidecar: Sidecar, spec: ModelSpec) -> None:
    tokens = tokens_of(42, 1 if spec.mla else 2)
    first, second = Engine(sidecar.address, spec), Engine(sidecar.address, spec)
    filled = first.keep(request("a", tokens), blocks_of(42))
    asked, blocks = request("b", tokens), blocks_of(42, 20)
    assert second.admit(asked, blocks) == 40  # whole blocks
    second.worker.begin(second.scheduler.step(scheduled("x", [], 0, 0)))
    assert second.landed() == {"b"}
    assert second.worker.failed_blocks() == set()
    for ours, theirs in zip(second.content(blocks[:10]), filled, strict=True):
        assert torch.equal(ours, theirs[:10])
    assert all(not page[blocks[10]].any() for page in second.pages)  # the block that was not loaded
    first.close()
    second.close()


def test_a_prompt_that_is_whole_leaves_a_block_to_compute(engine: Engine) -> None:
    tokens = tokens_of(48, 3)
    engine.keep(request("a", tokens), blocks_of(48))
    assert matched(engine.scheduler, request("b", tokens), 0) == (44, True)
    assert matched(engine.scheduler, request("c", tokens), 44) == (0, False)
    assert matched(engine.scheduler, request("d", tokens), 32) == (12, True)
    assert matched(engine.scheduler, request("e", tokens, skip_reading_prefix_cache=True), 0) == (0, False)
    assert matched(engine.scheduler, request("f", tokens, prompt_embeds=object()), 0) == (0, False)


def test_a_prefill_in_pieces_is_kept_chunk_by_chunk(engine: Engine) -> None:
    asked, blocks = request("a", tokens_of(75, 4)), blocks_of(75)
    engine.admit(asked, blocks[:5])
    engine.fill(blocks, 7)
    kept = []
    for start, stop in ((0, 20), (20, 40), (40, 60), (60, 75)):
        first, last = -(-start // BLOCK), -(-stop // BLOCK)
        step = engine.compute(asked, blocks[first:last], start, stop - start, is_new=start == 0)
        kept += [save.tokens.size for save in step.saves]
        for save in step.saves:
            assert save.block_ids == [blocks[: save.tokens.size // BLOCK]]
            wait_stored(engine.clients[0], save)
    assert kept == [16, 32, 48, 72]
    assert not engine.compute(asked, [], 75, 1, is_new=False).saves  # answers are kept only when asked for


def test_answers_are_kept_by_chunks_when_asked_for(sidecar: Sidecar) -> None:
    engine = Engine(sidecar.address, save_output=True)
    asked, blocks = request("a", tokens_of(30, 5)), blocks_of(80)
    engine.admit(asked, blocks)
    assert [save.tokens.size for save in engine.compute(asked, blocks, 0, 30).saves] == [28]
    kept = []
    for _ in range(30):
        asked.all_token_ids.append(7)
        asked.num_tokens += 1
        step = engine.compute(asked, [], asked.num_tokens - 1, 1, is_new=False)
        kept += [save.tokens.size for save in step.saves]
    assert kept == [32, 48]
    engine.close()


def test_a_step_copies_no_blocks_of_before(engine: Engine) -> None:
    """A thousand requests with long prompts go on in one step, and most of them need no block."""
    asked, blocks = request("a", tokens_of(60, 77)), blocks_of(72)
    engine.admit(asked, blocks[:15])
    save = engine.compute(asked, blocks[:15], 0, 60).saves[0]
    known = engine.scheduler._tracked["a"].block_ids
    for computed, more in ((60, blocks[15:16]), (61, []), (62, []), (63, []), (64, blocks[16:17])):
        engine.compute(asked, more, computed, 1, is_new=False)
    assert engine.scheduler._tracked["a"].block_ids is known
    assert known == [blocks[:17]]
    assert save.block_ids == [blocks[:15]]


def test_a_request_that_was_preempted_starts_over(engine: Engine) -> None:
    asked = request("a", tokens_of(60, 6))
    engine.admit(asked, blocks_of(60))
    engine.fill(blocks_of(60), 3)
    step = engine.compute(asked, blocks_of(60), 0, 20)
    wait_stored(engine.clients[0], step.saves[0])
    blocks = blocks_of(60, 30)
    assert matched(engine.scheduler, asked, 0) == (16, True)
    engine.scheduler.allocated(asked, (blocks,), 16)
    step = engine.compute(asked, blocks, 16, 44)
    assert [load.block_ids for load in step.loads] == [[blocks]]
    assert [save.block_ids for save in step.saves] == [[blocks[:15]]]
    assert engine.landed() == {"a"}


def test_an_engine_that_only_stores_forgets_the_blocks_of_before_it_was_preempted(sidecar: Sidecar) -> None:
    """They are another request's by then. vLLM says so in the step that goes on with it."""
    engine = Engine(sidecar.address)
    side = SchedulerSide(engine.clients[0], Adapters(SPEC), ConnectorSettings(chunk_tokens=16), BLOCK, loads=False)
    asked, blocks, later = request("a", tokens_of(60, 73)), blocks_of(60), blocks_of(60, 30)
    side.new_request(asked)
    assert side.matched(asked, 0) == (0, False)
    side.allocated(asked, (blocks,), 0)
    assert [save.block_ids for save in side.step(scheduled("a", blocks[:5], 0, 20)).saves] == [[blocks[:4]]]
    side.allocated(asked, (later,), 0)
    resumed = scheduled("a", later, 0, 60, is_new=False)
    resumed.scheduled_cached_reqs.resumed_req_ids.add("a")
    assert [save.block_ids for save in side.step(resumed).saves] == [[later[:15]]]
    side.close()
    engine.close()


def test_after_a_reset_nothing_of_before_is_loaded_or_kept(sidecar: Sidecar) -> None:
    """vLLM clears its caches where its weights may have changed. From then on an engine shares with itself alone."""
    engine, other = Engine(sidecar.address), Engine(sidecar.address)
    tokens, later = tokens_of(42, 70), tokens_of(42, 71)
    engine.keep(request("before", tokens), blocks_of(42))
    waiting, running, blocks = request("waiting", tokens), request("running", tokens_of(60, 72)), blocks_of(60, 20)
    assert matched(engine.scheduler, waiting, 0) == (40, True)
    engine.admit(running, blocks)
    wait_stored(engine.clients[0], engine.compute(running, blocks, 0, 20).saves[0])
    engine.scheduler.new_request(unseen := request("unseen", later))
    engine.scheduler.reset()
    assert matched(engine.scheduler, waiting, 0) == (0, False)
    assert engine.compute(running, [], 20, 40, is_new=False).saves == []
    assert matched(engine.scheduler, running, 0) == (0, False), "it was preempted: its own blocks are of before, too"
    wait_stored(engine.clients[0], engine.compute(unseen, blocks_of(42, 40), 0, 42).saves[0])
    assert matched(engine.scheduler, request("after", later), 0) == (40, True)
    assert matched(other.scheduler, request("after", later), 0) == (0, False)
    assert matched(other.scheduler, request("before", tokens), 0) == (40, True)
    engine.close()
    other.close()


def test_images_salts_and_adapters_keep_prompts_apart(engine: Engine, tmp_path: Path) -> None:
    tokens = tokens_of(42, 12)

    def image(identifier: str, offset: int = 20) -> Any:
        return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=8))

    def adapter(name: str, number: int, content: bytes) -> Any:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "adapter_model.safetensors").write_bytes(content)
        return SimpleNamespace(lora_name="fine", lora_int_id=number, lora_path=str(directory))

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "cat": {"mm_features": [image("cat")]},
        "dog": {"mm_features": [image("dog")]},
        "salt": {"cache_salt": "tenant"},
        "one": {"lora_request": adapter("one", 1, b"1")},
        "two": {"lora_request": adapter("two", 2, b"2")},
    }
    engine.keep(request("plain-1", tokens), blocks_of(42))
    expected = {"plain": 40, "cat": 16, "dog": 16}  # the first chunk lies before the image
    for kind, more in kinds.items():
        assert matched(engine.scheduler, request(f"{kind}-2", tokens, **more), 0)[0] == expected.get(kind, 0)
    for kind in ("cat", "salt", "one"):
        asked = request(f"{kind}-3", tokens, **kinds[kind])
        engine.scheduler.new_request(asked)
        wait_stored(engine.clients[0], engine.compute(asked, blocks_of(42), 0, 42).saves[0])
    for kind, more in kinds.items():
        wanted = {**expected, "cat": 40, "salt": 40, "one": 40}.get(kind, 0)
        assert matched(engine.scheduler, request(f"{kind}-4", tokens, **more), 0)[0] == wanted
    same = {"lora_request": adapter("elsewhere", 3, b"1")}
    assert matched(engine.scheduler, request("same", tokens, **same), 0)[0] == 40  # the weights decide, not the path
    gone = SimpleNamespace(lora_name="gone", lora_int_id=4, lora_path=str(tmp_path / "gone"))
    assert matched(engine.scheduler, request("gone", tokens, lora_request=gone), 0) == (0, False)


def test_an_image_of_a_later_turn_keeps_a_session_apart(engine: Engine) -> None:
    """vLLM's sessions that stream their input bring tokens and images while they run."""
    tokens, blocks = tokens_of(80, 74), blocks_of(80)

    def turn(asked: Any, image: str) -> None:
        asked.all_token_ids += [int(each) for each in tokens[36:]]
        asked.num_tokens = asked.num_prompt_tokens = 80
        place = SimpleNamespace(offset=40, length=8)
        asked.mm_features.append(SimpleNamespace(identifier=image, mm_position=place))

    first, second = request("a", tokens[:36], mm_features=[]), request("b", tokens[:36], mm_features=[])
    engine.admit(first, blocks[:9])
    wait_stored(engine.clients[0], engine.compute(first, blocks[:9], 0, 36).saves[0])
    assert engine.admit(second, blocks_of(36, 30)) == 32
    turn(first, "cat")
    wait_stored(engine.clients[0], engine.compute(first, blocks[9:], 36, 44, is_new=False).saves[0])
    turn(second, "dog")
    assert matched(engine.scheduler, second, 0) == (36, True)  # preempted, it asks again
    assert matched(engine.scheduler, request("plain", tokens), 0) == (36, True)
    engine.scheduler.finished("b")
    turn(third := request("c", tokens[:36], mm_features=[]), "cat")
    assert matched(engine.scheduler, third, 0) == (76, True)


def test_a_salt_that_cannot_name_a_cache_fails_no_request(engine: Engine) -> None:
    """Callers of vLLM's server send it: an error here would end the engine."""
    tokens, blocks = tokens_of(60, 76), blocks_of(60)
    asked = request("a", tokens, cache_salt="x" * (EXTRA_BYTES_MAX + 1))
    engine.scheduler.new_request(asked)
    assert engine.admit(asked, blocks) == 0
    assert engine.compute(asked, blocks, 0, 60).saves == []


def test_an_adapter_that_is_written_while_a_request_runs_is_not_kept(engine: Engine, tmp_path: Path) -> None:
    """vLLM may have read the new files for it: it reads them when the request is first computed."""
    tokens, blocks, weights = tokens_of(60, 75), blocks_of(60), tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"1")
    fine = {"lora_request": SimpleNamespace(lora_name="fine", lora_int_id=1, lora_path=str(tmp_path))}
    asked = request("a", tokens, **fine)
    engine.admit(asked, blocks)
    assert [save.tokens.size for save in engine.compute(asked, blocks[:5], 0, 20).saves] == [16]
    weights.write_bytes(b"2")
    assert engine.compute(asked, blocks[5:], 20, 40, is_new=False).saves == []
    assert matched(engine.scheduler, request("b", tokens, **fine), 0) == (0, False)


def test_an_adapter_without_a_name_is_said_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM asks again in each step while a request waits for blocks."""
    gone = SimpleNamespace(lora_name="fine", lora_int_id=1, lora_path="organisation/of-the-hub")
    asked = request("a", tokens_of(60, 79), lora_request=gone)
    engine.scheduler.new_request(asked)
    for _ in range(5):
        assert engine.scheduler.matched(asked, 0) == (0, False)
    assert caplog.text.count("this request is neither loaded nor kept") == 1
    assert "give vLLM the adapter's directory" in caplog.text
    engine.scheduler.finished("a")
    engine.scheduler.matched(asked, 0)
    assert caplog.text.count("this request is neither loaded nor kept") == 2, "another request by the same name"


@pytest.mark.parametrize("is_in_place", [False, True])
def test_blocks_of_an_adapters_files_of_before_are_not_kept(engine: Engine, tmp_path: Path, is_in_place: bool) -> None:
    """vLLM's own prefix cache knows an adapter by its name and path: it finds what the files of before computed."""
    tokens, weights = tokens_of(60, 78 + is_in_place), tmp_path / "adapter_model.safetensors"

    def adapter(number: int) -> Any:
        again = {"load_inplace": True} if is_in_place else {"lora_int_id": number}
        return SimpleNamespace(**{"lora_name": "fine", "lora_int_id": 1, "lora_path": str(tmp_path), **again})

    weights.write_bytes(b"1")
    engine.keep(request("a", tokens, lora_request=adapter(1)), blocks_of(60))
    same = request("b", tokens, lora_request=adapter(1))
    engine.scheduler.new_request(same)
    assert matched(engine.scheduler, same, 32) == (24, True), "and nothing is wrong with its own files' blocks"
    weights.write_bytes(b"2")
    anew, blocks = request("c", tokens, lora_request=adapter(2)), blocks_of(60, 20)
    engine.scheduler.new_request(anew)
    assert matched(engine.scheduler, anew, 32) == (0, False)  # vLLM has 32 tokens, by the files of before
    engine.scheduler.allocated(anew, (blocks,), 0)
    assert engine.compute(anew, blocks, 32, 28).saves == []
    whole = request("d", tokens, lora_request=adapter(2))
    assert engine.admit(whole, blocks_of(60, 40)) == 0  # vLLM has nothing of it
    assert engine.compute(whole, blocks_of(60, 40), 0, 60).saves


def test_nothing_stays_held(own_sidecar: Sidecar) -> None:
    tokens = tokens_of(42, 13)
    engine = Engine(own_sidecar.address)
    engine.keep(request("a", tokens), blocks_of(42))

    def held() -> int:
        return int(engine.clients[0].stats().sessions.ticket_count)

    asked = request("b", tokens)
    for _ in range(3):  # vLLM asks until it has room
        assert matched(engine.scheduler, asked, 0) == (40, True)
    assert held() == 1
    engine.scheduler.allocated(asked, (blocks_of(42),), 0)  # it chose not to load
    eventually(lambda: held() == 0)
    assert matched(engine.scheduler, request("c", tokens), 0) == (40, True)
    engine.scheduler.finished("c")
    eventually(lambda: held() == 0)
    for name in ("e", "f", "g"):
        engine.scheduler.matched(request(name, tokens), 0)
        engine.scheduler.finished(name)  # perhaps before its answer came
    eventually(lambda: held() == 0)
    assert matched(engine.scheduler, request("d", tokens), 0) == (40, True)
    engine.scheduler.close()
    assert engine.clients[1].stats().sessions.ticket_count == 0
    engine.close()


def test_without_its_sidecar_an_engine_computes(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/kvstore.sock", required=False)
    side = SchedulerSide(client, Adapters(SPEC), ConnectorSettings(chunk_tokens=16), BLOCK)
    asked = request("a", tokens_of(42))
    side.new_request(asked)
    assert matched(side, asked, 0) == (0, False)
    assert len(side.step(scheduled("a", blocks_of(42), 0, 42)).saves) == 1
    side.close()


def test_a_sidecar_that_stalls_is_left_alone(own_sidecar: Sidecar) -> None:
    engine = Engine(own_sidecar.address, timeout_s=2.2)
    engine.keep(request("a", tokens_of(42, 15)), blocks_of(42))
    os.kill(own_sidecar.pid, signal.SIGSTOP)
    try:
        cold = request("cold", tokens_of(42, 150))
        assert matched(engine.scheduler, cold, 0) == (0, False), "nothing of it is stored: nobody is asked"
        assert engine.scheduler.matched(request("b", tokens_of(42, 15)), 0) == (None, False), "the loop goes on"
        for name in ("b", "c", "d"):  # the first waits, and the others need not
            asked = request(name, tokens_of(42, 15))
            assert matched(engine.scheduler, asked, 0) == (0, False)
            engine.scheduler.new_request(asked)
            assert engine.compute(asked, blocks_of(42), 0, 42).saves
        eventually(lambda: [client.statistics()["unavailable"] for client in engine.clients] == [1, 1])
    finally:
        os.kill(own_sidecar.pid, signal.SIGCONT)
    engine.close()


@pytest.mark.parametrize(
    ("spec", "ranks", "replicas"), [(SPEC, 2, 1), (SPEC, 4, 2), (MLA, 3, 3)], ids=["shared out", "twice each", "latent"]
)
def test_ranks_keep_their_heads_together_or_not_at_all(
    sidecar: Sidecar, spec: ModelSpec, ranks: int, replicas: int
) -> None:
    """Where several have the same heads, each keeps some layers, and all load all."""
    clients = [connect(sidecar.address) for _ in range(1 + ranks)]
    scheduler = SchedulerSide(clients[0], Adapters(spec), ConnectorSettings(chunk_tokens=16), BLOCK, ranks=ranks)
    shares, content = ranks // replicas, spec.layers[0].k_dim + spec.layers[0].v_dim
    parts = [[torch.randn(BLOCKS, 1, BLOCK, content).to(torch.bfloat16) for _ in spec.layers] for _ in range(shares)]
    pages = [[each.clone() for each in parts[rank // replicas]] for rank in range(ranks)]
    how = {"ranks": ranks, "replicas": replicas}
    workers = [
        WorkerSide(
            clients[1 + rank],
            PagesOfModel(spec, pages[rank], BLOCK, "TRITON_MLA" if spec.mla else "FLASH_ATTN", rank=rank, **how),
            is_layerwise=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    prompts = {is_whole: tokens_of(42, 17 + 2 * ranks + is_whole) for is_whole in (True, False)}
    for is_whole, tokens in prompts.items():
        asked = request(f"a{is_whole}", tokens)
        scheduler.new_request(asked)
        step = scheduler.step(scheduled(asked.request_id, blocks_of(42), 0, 42))
        if not is_whole:
            workers[1]._doubtful.update(blocks_of(42)[:1])  # this rank's load of another request has failed
        for worker in workers:
            worker.save(step.saves)
        if is_whole:
            wait_stored(clients[0], step.saves[0])
        else:
            eventually(lambda: not clients[0].stats().sessions.reservation_count)
            assert clients[0].lookup(spec, asked.all_token_ids).prefix_token_count == 0
    kept = clients[0].fetch(spec, prompts[True])
    for layer, pair in enumerate(kept):
        for share in range(shares):
            whole = parts[share][layer][blocks_of(42)[:10], 0].flatten(0, 1)
            assert torch.equal(torch.cat([pair[0][share], pair[1][share]], dim=-1), whole)
    scheduler.new_request(again := request("again", prompts[True]))
    assert matched(scheduler, again, 0)[0] == 40
    scheduler.allocated(again, (blocks_of(42, 20),), 40)
    step = scheduler.step(scheduled("again", blocks_of(42, 20), 40, 2))
    for rank, worker in enumerate(workers):
        worker.begin(step)
        for layer in range(len(spec.layers)):
            worker.wait_layer(layer)
        worker.end_layerwise()
        assert not worker.failed_blocks()
        for ours, theirs in zip(pages[rank], parts[rank // replicas], strict=True):
            assert torch.equal(ours[blocks_of(42, 20)[:10]], theirs[blocks_of(42)[:10]])
    for client in clients:
        client.close()
