"""Two nodes whose bucket chooses encodings: lz4 for the model that it makes smaller, raw for noise, and the other node
reads both to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from kvstore_client import Client, Tier, connect

from kvstore.keys import fingerprint
from kvstore.spec import CacheKind
from kvstore.tiers.choice import FIRST_COUNT
from tests.e2e.test_nvme import same
from tests.e2e.two_nodes import quiet, two_nodes
from tests.ops.command import run
from tests.outage.load import COUNT, SPEC, STEP, tokens
from tests.server.raw import eventually
from tests.specs import random_cache

pytestmark = [pytest.mark.redis, pytest.mark.s3]
NOISE, LIKE_KV = (
    replace(SPEC, model_id=name, weights_digest=2 * digits * 16) for name, digits in (("noise", "11"), ("kv", "22"))
)
SEEDS = range(4)
CHUNK_COUNT = len(SEEDS) * COUNT // STEP
ENCODING_AT, FINGERPRINT_AT = 35, 96
"""Offsets in a header."""
RAW, LZ4 = 0, 1
AUTO = {
    "TIERS__REDIS__ENCODING": "auto", "TIERS__S3__ENCODING": "auto", "TIERS__S3__PAID_BYTES_PER_S": "1 KiB",
    "TIERS__S3__LOOKUP_S_MAX": "10 s",  # a node's first question makes its client: a second and more where all is busy
}  # fmt: skip


def cache(spec: Any, seed: int) -> Any:
    """Random bits; like a cache, nearly all exponents of ``LIKE_KV`` are the same."""
    found = random_cache(spec, COUNT, seed)
    return found if spec is NOISE else [(k & 0x80FF | 0x3F00, v & 0x80FF | 0x3F00) for k, v in found]


def give(client: Client) -> None:
    for seed in SEEDS:
        for spec in (NOISE, LIKE_KV):
            client.store(spec, tokens(seed), cache(spec, seed)).wait(10.0)
            quiet(client)


def test_each_model_is_encoded_where_that_pays_and_the_other_node_reads_it_to_the_bit() -> None:
    with two_nodes(**AUTO) as cluster:
        with connect(cluster.a.socket_address) as client:
            give(client)
        eventually(lambda: len(cluster.in_s3()) == 2 * CHUNK_COUNT)  # a write that came too late is made again
        objects = [cluster.s3.get(key) for key in cluster.in_s3().values()]
        found = Counter((each[FINGERPRINT_AT : FINGERPRINT_AT + 32], each[ENCODING_AT]) for each in objects)
        assert found[fingerprint(NOISE, CacheKind.KV), RAW] == CHUNK_COUNT
        assert found[fingerprint(LIKE_KV, CacheKind.KV), RAW] in (FIRST_COUNT, FIRST_COUNT + 1), "two at a time"
        assert found.total() == 2 * CHUNK_COUNT
        assert {encoding for _, encoding in found} == {RAW, LZ4}
        tiers = {
            each["name"]: each for each in run("tiers", "--socket", cluster.a.socket_address, "--json").json["tiers"]
        }
        chosen = {each["fingerprint"]: each for each in tiers["s3"]["encodings"]}
        assert chosen[fingerprint(LIKE_KV, CacheKind.KV).hex()]["encoding"] == "lz4"
        assert chosen[fingerprint(NOISE, CacheKind.KV).hex()]["encoding"] == "raw"
        assert {each["sample_count"] for name in ("redis", "s3") for each in tiers[name]["encodings"]} == {FIRST_COUNT}
        shown = run("tiers", "--socket", cluster.a.socket_address).out
        assert "encodings chosen" in shown
        assert fingerprint(NOISE, CacheKind.KV).hex()[:16] in shown
        cluster.drop(s3=False)
        with connect(cluster.b.socket_address) as client:
            for seed in SEEDS:
                for spec in (NOISE, LIKE_KV):
                    found = client.fetch(spec, tokens(seed), verify=True)
                    assert (found.token_count, found.tier) == (COUNT, Tier.S3)
                    assert same(found, cache(spec, seed), COUNT)
