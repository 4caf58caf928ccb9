"""A real sidecar whose bucket may cost no more today: what lies there is unknown to it, and not absent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_client import connect

from kvstore.spec import MissReason
from tests.e2e.s3 import BucketSidecar, bucket_server
from tests.fakes.s3_server import S3Server
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

pytestmark = pytest.mark.s3
STEP = 512
COUNT = 4 * STEP
SPEC = small_spec(chunk_tokens=STEP)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with bucket_server() as server:
        yield server


def test_what_a_spent_bucket_may_have_is_unavailable_and_the_status_names_the_setting(server: S3Server) -> None:
    limit = {"TIERS__S3__DAY_REQUEST_COUNT_MAX": "1"}
    with BucketSidecar(server.url, server.bucket) as one, BucketSidecar(server.url, server.bucket, **limit) as two:
        with connect(one.socket_address) as client:
            client.store(SPEC, tokens_of(COUNT), random_cache(SPEC, COUNT)).wait(10.0)
            eventually(lambda: client.stats().backlog_chunk_count == 0, 20.0)
        with connect(two.socket_address) as client:
            client.lookup(SPEC, tokens_of(STEP, 7))  # spends the day's one request
            eventually(lambda: client.stats().tiers[-1].state == "failing", 20.0)
            for seed in (0, 8):  # one is there, and one is not: the node cannot know
                found = client.lookup(SPEC, tokens_of(COUNT, seed))
                assert {each.reason for each in found.chunks} == {MissReason.UNAVAILABLE}
                fetched = client.fetch(SPEC, tokens_of(COUNT, seed))
                assert (fetched.token_count, fetched.reason) == (0, MissReason.UNAVAILABLE)
            assert client.stats().tier_problem == "tiers.s3.day_request_count_max is reached"
