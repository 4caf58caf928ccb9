"""Two nodes, an engine on each: what one computed the other loads, from Redis, and from S3 once Redis is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.cluster import PYTHON, between
from tests.vllm.engine import Engine
from tests.vllm.test_end_to_end import CHUNK, prompt

pytestmark = [
    pytest.mark.vllm, pytest.mark.redis, pytest.mark.s3, pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="the nodes run in .venv: make setup"),
]  # fmt: skip
PROMPTS = [prompt(300, seed) for seed in (40, 41, 42)]
SHARED = 256
"""Whole chunks; the tail of a prompt stays on its node."""


def test_the_second_nodes_engine_loads_what_the_first_ones_computed(models: dict[str, Path]) -> None:
    own = {"extra": CHUNK, "enable_prefix_caching": False}
    with Engine(models["llama"], None, enable_prefix_caching=False) as engine:
        said, _ = engine.ask(*PROMPTS)
    with between() as nodes:
        with Engine(models["llama"], nodes.a, **own) as first:
            assert first.ask(*PROMPTS) == (said, [0, 0, 0])
            assert nodes.have("spread") == ["12", "12"]
        nodes.have("kill a")
        with Engine(models["llama"], nodes.b, **own) as second:
            assert second.ask(PROMPTS[0]) == (said[:1], [SHARED])
            nodes.have("kill redis")
            assert second.ask(*PROMPTS[1:]) == (said[1:], [SHARED, SHARED])
            assert second.ask(*PROMPTS)[0] == said
