"""Settings of the Redis tier: URLs of every kind, mistakes that are named, and passwords that are never shown."""

from __future__ import annotations

import pytest
from kvstore_ops.cli import app
from typer.testing import CliRunner

from kvstore.config import RedisAddress, RedisSettings, load
from kvstore.errors import InvalidRequest

URL = "KVSTORE__TIERS__REDIS__URL"


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://host", {"places": (("host", 6379),)}),
        ("redis://me:a%40b@host:1/2", {"places": (("host", 1),), "username": "me", "password": "a@b", "database": 2}),
        ("rediss://[::1]:7", {"places": (("::1", 7),), "is_tls": True}),
        ("redis://[::1]", {"places": (("::1", 6379),)}),
        ("unix:///run/redis%20a.sock?db=3", {"path": "/run/redis a.sock", "database": 3}),
        ("redis+sentinel://a,b:2/main/1",
         {"kind": "sentinel", "places": (("a", 26379), ("b", 2)), "service": "main", "database": 1}),
        ("rediss+cluster://a:1,[::2]:3", {"kind": "cluster", "places": (("a", 1), ("::2", 3)), "is_tls": True}),
    ],
)  # fmt: skip
def test_what_a_url_says(url: str, found: dict[str, object]) -> None:
    assert RedisAddress.of(url) == RedisAddress(**{"kind": "server", **found})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host", "redis+cluster://"),
        ("redis://", "redis+cluster://"),
        ("redis://host:port", "redis+cluster://"),
        ("redis://host/name", "a database is a number"),
        ("redis://a,b", "several servers"),
        ("redis+sentinel://a", "name the service"),
        ("unix://redis.sock", "whole path"),
        ("redis://host?db=3", "what follows ? means nothing here"),
        ("rediss://host?ssl_cert_reqs=none", "what follows ?"),
    ],
)
def test_a_url_that_is_none_is_named(url: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=r"KVSTORE__TIERS__REDIS__URL: tiers\.redis\.url = ") as caught:
        load(None, {"HOME": "/h", URL: url})
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix": "a{b}"}, "tiers.redis.prefix"),
        ({"prefix": ""}, "tiers.redis.prefix"),
        ({"write": "through"}, "back, reuse or never"),
        ({"ttl_s": 0.0}, "tiers.redis.ttl_s"),
        ({"lookup_s_max": 0.0}, "tiers.redis.lookup_s_max"),
        ({"reader_count": 0}, "tiers.redis.reader_count"),
        ({"url": "redis://h", "embedded": True}, "tiers.redis.embedded = true: leave out tiers.redis.url"),
        ({"url": "redis://h", "ca_file": "/ca"}, "rediss://"),
        ({"url": "rediss://h", "key_file": "/key"}, "tiers.redis.key_file"),
        ({"url": "redis://:secret@h", "password_file": "/p"}, "tiers.redis.password_file"),
        ({"embedded_bytes": 1}, "16 MiB"),
        ({"url": "redis://a:pw@h", "username": "b"}, "tiers.redis.username = b: the URL has another user"),
        ({"url": "redis://h", "username": "b"}, "tiers.redis.username = b: .* set password_file"),
        ({"url": "redis://b@h"}, "tiers.redis.username = b: .* set password_file"),
        ({"url": "redis://h", "sentinel_username": "b"}, r"tiers.redis.sentinel_username = b: use redis\+sentinel"),
    ],
)
def test_settings_that_cannot_be_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        RedisSettings(**changes)


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert not load(None, {"HOME": "/h"}).settings.tiers.redis.is_on
    assert load(None, {"HOME": "/h", "KVSTORE__TIERS__REDIS__EMBEDDED": "true"}).settings.tiers.redis.is_on
    found = load(None, {"HOME": "/h", URL: "redis://h", "KVSTORE__TIERS__REDIS__LOOKUP_S_MAX": "7 ms"}).settings
    assert (found.tiers.redis.is_on, found.tiers.redis.lookup_s_max) == (True, 0.007)


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{SECRET}@h", f"redis://:{SECRET}@[::1", f"x://u:a/{SECRET}@h:1", f"redis://h?password={SECRET}",
        f"redis://h?{SECRET}", f"redis://u:a?{SECRET}@h", f"u:{SECRET}@h", f"redis:u:{SECRET}@h:1",
    ],
)  # fmt: skip
def test_a_password_is_shown_to_nobody(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    try:
        loaded = load(None, {"HOME": "/h", URL: url})
        said += [repr(loaded.settings), str(loaded.rows()), repr(RedisAddress.of(url))]
    except InvalidRequest as error:
        said += [error.message, repr(error), str(error.fields)]
    monkeypatch.setenv(URL, url)
    for arguments in (["config"], ["config", "--json"]):
        ran = CliRunner().invoke(app, arguments)
        said.append(ran.output + repr(ran.exception))
    assert all(said)
    assert SECRET not in str(said)


@pytest.mark.parametrize(
    "tiers", [{}, {"KVSTORE__TIERS__REDIS__EMBEDDED": "true"}, {"KVSTORE__TIERS__S3__BUCKET": "kv-caches"}]
)
def test_a_warm_up_without_a_redis_that_nodes_share_is_refused(tiers: dict[str, str]) -> None:
    """Nobody would hear the node's hints, and it would hear none."""
    asked = {"HOME": "/h", "KVSTORE__POLICY__WARM_UP_BYTES": "1 GiB"}
    with pytest.raises(InvalidRequest, match=r"KVSTORE__POLICY__WARM_UP_BYTES: policy\.warm_up_bytes") as caught:
        load(None, asked | tiers)
    assert "set tiers.redis.url" in caught.value.message
    assert "kvstore warm --from" in caught.value.message
    assert load(None, asked | {URL: "redis://h"}).settings.policy.warm_up_bytes == 1 << 30
    assert load(None, {"HOME": "/h"} | tiers).settings.policy.warm_up_bytes == 0
