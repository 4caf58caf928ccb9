"""Speculative decoding in a real vLLM: what the draft's layers hold comes back with the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore_client import ModelSpec, connect
from kvstore_client.engines.vllm.geometry import geometry_of
from kvstore_client.engines.vllm.identity import spec_of
from kvstore_client.engines.vllm.naming import next_tokens
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_ops.sidecar import Sidecar
from vllm.engine.arg_utils import EngineArgs

from tests.vllm.engine import Engine
from tests.vllm.test_end_to_end import CHUNK, leases_of, prompt
from tests.vllm.test_interface import FULL, caches

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
COUNT = 3
"""Tokens that are drafted in a step."""
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(5)]  # three layers, and two of the draft
WHOLE = prompt(300, 70)
FORKED = WHOLE[:128] + prompt(160, 71)


def drafted(models: dict[str, Path], method: str) -> dict[str, Any]:
    """A draft of other weights, a layer of the model, or the model as its own draft."""
    names = {"eagle": "eagle", "eagle3": "eagle3", "draft_model": "llama"}
    more: dict[str, Any] = {"model": str(models[names[method]])} if method in names else {}
    more |= {"disable_padded_drafter_batch": True} if method != "draft_model" else {}
    return {"speculative_config": {"method": method, "num_speculative_tokens": COUNT, **more}}


def spec_for(models: dict[str, Path], method: str) -> ModelSpec:
    """The name of what a Llama with this draft keeps."""
    given: dict[str, Any] = {"enforce_eager": True, "block_size": 32, "dtype": "float32", "max_model_len": 1024}
    config = EngineArgs(
        model=str(models["llama"]), skip_tokenizer_init=True, **given, **drafted(models, method)
    ).create_engine_config()
    return spec_of(config, geometry_of(config, caches(FULL, names=NAMES)), ConnectorSettings.of(CHUNK))


def kept(sidecar: Sidecar, spec: ModelSpec, tokens: list[int], count: int) -> Any:
    """All layers of a prompt, as the sidecar has them: [layers, 2, heads, tokens, dim]."""
    with connect(sidecar.address) as client:
        found = client.fetch(spec, np.asarray(tokens), extras=next_tokens(tokens, spec.chunk_tokens))
        assert found.token_count == count
        return np.stack([np.stack([np.asarray(k), np.asarray(v)]) for k, v in found])


def wait_kept(sidecar: Sidecar, chunk_count: int) -> None:
    from tests.server.raw import eventually

    with connect(sidecar.address) as client:
        eventually(lambda: client.stats().counters["store_committed_chunks"] >= chunk_count)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_what_is_computed_behind_a_load_is_what_a_whole_prefill_computes(models: dict[str, Path], method: str) -> None:
    """The draft's cache of a token depends on the next token, and its second layer's on the first one's of all tokens
    before. A prompt that forks where a chunk ends does not load that chunk: its last token has the cache of another
    next one. One that forks a token later does."""
    own = {"extra": CHUNK, "enable_prefix_caching": False, **drafted(models, method)}
    spec = spec_for(models, method)
    with Sidecar("--capacity", "64 MiB") as computed, Sidecar("--capacity", "64 MiB") as loaded:
        with Engine(models["llama"], computed.address, **own) as engine:
            said, _ = engine.ask(FORKED)
            wait_kept(computed, 5)  # four chunks of 64 and a tail of 32
        with Engine(models["llama"], loaded.address, **own) as engine:
            engine.ask(WHOLE)
            wait_kept(loaded, 5)
            assert engine.ask(FORKED) == (said, [64])
            wait_kept(loaded, 9)
            assert engine.ask([*WHOLE[:129], *FORKED[129:]])[1] == [128]
            wait_kept(loaded, 12)
        ours, theirs = (kept(each, spec, FORKED, 288) for each in (loaded, computed))
        assert np.abs(ours - theirs).max() < 1e-3
        other = kept(loaded, spec, WHOLE, 288)
        differs = np.abs(ours - other).max((1, 2, 4))
        assert differs[:, :127].max() < 1e-3 > differs[:3, 127].max()
        assert differs[3:, 127].max() > 0.1, "the draft's cache of the last token that both have is not the same"
        assert leases_of(loaded) == (0, 0)


def test_a_prompt_in_pieces_is_kept_as_a_whole_one(models: dict[str, Path]) -> None:
    """At the end of a piece the draft reads the token behind it, which the next piece computes."""
    own = {"extra": CHUNK, "enable_prefix_caching": False, "max_num_seqs": 4, **drafted(models, "eagle")}
    found = []
    for count in (1024, 100):
        with Sidecar("--capacity", "64 MiB") as sidecar:
            with Engine(models["llama"], sidecar.address, max_num_batched_tokens=count, **own) as engine:
                engine.ask(WHOLE)
                wait_kept(sidecar, 5)
            found.append(kept(sidecar, spec_for(models, "eagle"), WHOLE, 288))
    assert np.abs(found[0] - found[1]).max() < 1e-3


@pytest.mark.parametrize(
    ("method", "name", "seed", "hits"),
    [
        ("eagle", "llama", 72, 256),
        ("eagle3", "llama", 77, 256),
        ("mtp", "glm", 75, 256),
        ("draft_model", "llama", 76, 288),
    ],
)
def test_drafts_are_as_good_behind_a_load(
    models: dict[str, Path], durable: Sidecar, method: str, name: str, seed: int, hits: int
) -> None:
    own = {"extra": CHUNK, "enable_prefix_caching": False, **drafted(models, method)}
    mine, model = prompt(300, seed), models[name]
    with Engine(model, None, enable_prefix_caching=False) as engine:
        said, _ = engine.ask(mine, max_tokens=24)
    with connect(durable.address) as client:
        before = client.stats().counters["store_committed_chunks"]
    with Engine(model, durable.address, **own) as engine:
        assert engine.ask(mine, max_tokens=24) == (said, [0])
        accepted = engine.accepted
        wait_kept(durable, before + 5)
    if method == "draft_model":
        assert accepted == 18, "of itself it accepts all"
    with Engine(model, durable.address, **own) as engine:
        assert engine.ask(mine, max_tokens=24) == (said, [hits])
        assert engine.accepted == accepted
    with Engine(model, durable.address, extra=CHUNK, enable_prefix_caching=False) as engine:
        assert engine.ask(mine, max_tokens=24) == (said, [0]), "without the draft it is another cache"
    assert leases_of(durable) == (0, 0)


def test_two_ranks_load_what_one_kept_with_its_draft(models: dict[str, Path], durable: Sidecar) -> None:
    own = {"extra": CHUNK, "enable_prefix_caching": False, **drafted(models, "eagle")}
    mine = prompt(300, 78)
    with connect(durable.address) as client:
        before = client.stats().counters["store_committed_chunks"]
    with Engine(models["llama"], durable.address, **own) as engine:
        said, _ = engine.ask(mine)
        wait_kept(durable, before + 5)
    with Engine(models["llama"], durable.address, tensor_parallel_size=2, is_one_process=False, **own) as engine:
        assert engine.ask(mine) == (said, [256])
    assert leases_of(durable) == (0, 0)


def test_what_a_step_without_drafts_computes_is_not_kept(models: dict[str, Path]) -> None:
    """vLLM drafts nothing in a step with a sequence that is nearly as long as can be, and has no cache of the draft
    then. Its own prefix cache has such blocks, too: a prompt that goes on behind them is not kept either."""
    longest = prompt(1020, 73)
    own = {"extra": CHUNK, "enable_prefix_caching": True, **drafted(models, "eagle")}
    with Sidecar("--capacity", "64 MiB") as sidecar, Engine(models["llama"], sidecar.address, **own) as engine:
        engine.ask(longest, max_tokens=2)
        assert engine.ask(longest[:400], max_tokens=2)[1][0] > 0, "of vLLM's own"
        engine.ask(prompt(200, 74), max_tokens=2)
        wait_kept(sidecar, 3)
        with connect(sidecar.address) as client:
            assert client.stats().counters["store_committed_chunks"] == 3, "those of the last prompt"


@pytest.mark.parametrize("extra", [{"load": "layerwise"}, {"save_output": True}])
def test_a_draft_that_comes_behind_the_step_is_said(models: dict[str, Path], extra: dict[str, Any]) -> None:
    own = {"extra": {**CHUNK, **extra}, **drafted(models, "eagle")}
    with pytest.raises(RuntimeError, match='set "load": "async", and no "save_output"'):
        Engine(models["llama"], "unix:///nonexistent/kvstore.sock", **own).__enter__()
