"""Translates a server's refusals into typed errors."""

from __future__ import annotations

import re

from kvstore.errors import DataLoss, Exhausted, KVStoreError, Unavailable
from kvstore.tiers.contract import IS_FULL

URL = "tiers.redis.url"
MOVED = "moved"
"""The field of an error which says that another node has the key by now. Its value is the server's reply."""
NO_WRITES = "no_writes"
"""The field of an error which says that the server takes no writes, at least from this user; it may well be read."""
REPLICA = "replica"
"""The field of an error which says that the server is a replica: the name by which it was reached may lead to the
primary."""
_WRITE_REFUSALS = frozenset({"NOPERM", "READONLY", "MISCONF", "NOREPLICAS"})
_REPLICAS_REFUSALS = frozenset({"READONLY", "MASTERDOWN"})
_IN_SCRIPT = re.compile(
    "(?:-|: )(NOPERM|READONLY|MISCONF|NOREPLICAS|OOM|WRONGTYPE) |ACL failure in script|user executing the script can't"
)
"""The refusal of a command in a script: the server puts it into the text of another error. Where the user lacks a right
Redis 6 and 7 name no code, and Redis 7 begins with these words."""
RIGHTS = (
    "HGET", "HSET", "HDEL", "HGETALL", "HLEN", "HSTRLEN", "EXISTS", "PEXPIRE", "RENAME", "UNLINK", "SET", "GET", "ZADD",
    "ZREM", "ZRANGE", "ZREMRANGEBYSCORE", "TIME", "EVAL", "EVALSHA", "PING", "INFO",
)  # fmt: skip
"""The commands that a user needs on the keys of tiers.redis.prefix: for chunks, claims, hints and the directory."""
CLUSTER_RIGHTS = ("CLUSTER", "COMMAND", "ASKING")
"""The commands that a user of a cluster needs, too."""
DATABASE_RIGHTS = ("SELECT",)
"""The commands that a user needs, too, where tiers.redis.url names another database than 0."""
_DENIED = re.compile(r"run the '([\w|]+)' command")
"""The command in a refusal: the words of Redis 6 and 7 and of Valkey, from a script only those of the newer ones."""
_REMEDIES = {
    "NOAUTH": "it wants a password: set tiers.redis.password_file, and tiers.redis.username where there are users",
    "WRONGPASS": "it does not take this password: put the right one into tiers.redis.password_file, or change "
    "tiers.redis.username",
    "NOPERM": f"the user of tiers.redis.username lacks a right: give it {', '.join(RIGHTS[:-1])} and {RIGHTS[-1]} on "
    f"the keys of tiers.redis.prefix, in a cluster {', '.join(CLUSTER_RIGHTS[:-1])} and {CLUSTER_RIGHTS[-1]}, too, and "
    f"{' and '.join(DATABASE_RIGHTS)} where {URL} names a database",
    "READONLY": f"it is a replica that takes no writes: name the primary in {URL}, or set tiers.redis.write = never",
    "LOADING": "it is still loading its data: it is asked again later",
    "BUSY": "a script keeps it busy: it is asked again later",
    "MASTERDOWN": f"it has lost its primary: look at the server of {URL}",
    "MISCONF": "it takes no writes because it cannot save its data: look at its log, or switch its persistence off",
    "NOREPLICAS": "it takes no writes because it has too few replicas: look at min-replicas-to-write",
    "CLUSTERDOWN": f"the cluster is down or has slots without a node: look at CLUSTER INFO on {URL}",
    "TRYAGAIN": "the key's slot is moving between nodes: it is asked again later",
    "maxclients": "it has as many clients as it takes: raise its maxclients, or lower tiers.redis.control_count, "
    "reader_count and writer_count",
    "CROSSSLOT": f"it is a node of a cluster: use redis+cluster:// in {URL}",
}
_MOVES = ("MOVED", "ASK")


def refusal(text: str, where: str) -> KVStoreError:
    """Return the typed error of an error reply. ``text`` is the reply without its "-"; ``where`` names the server."""
    text = text.partition(", with args")[0]  # a server that does not know AUTH repeats the password
    code, _, rest = text.partition(" ")
    if code not in _REMEDIES and (inner := _IN_SCRIPT.search(text)):  # redis-py leaves ERR away
        code = inner[1] or "NOPERM"
    if code == "WRONGTYPE":
        return DataLoss("something else lies where a chunk should", reason="type")
    if code == "OOM":
        return Exhausted(
            f"the engine of tiers.redis ({where}) is full and gives nothing up: raise its maxmemory, or set its "
            "maxmemory-policy to allkeys-lru",
            **{IS_FULL: True},
        )
    if code in _MOVES:
        return Unavailable(
            f"tiers.redis: {where} says that another node has the key, now or soon: it is asked again later; use "
            f"redis+cluster:// in {URL}",
            **{MOVED: text},
        )
    if "tiers.redis" in text:
        return Unavailable(rest)  # the text is an error of our own
    if code == "ERR" and "invalid password" in rest:
        code = "WRONGPASS"
    if code == "ERR" and "max number of clients" in rest:
        code = "maxclients"
    if code == "ERR" and "unauthenticated" in rest:
        code = "NOAUTH"
    if code == "ERR" and "without any password" in rest:
        return Unavailable(f"tiers.redis: {where} has no password: leave it out of {URL} and tiers.redis.password_file")
    remedy = _REMEDIES.get(code, f"it says {text[:200]}: kvstore needs Redis 6.2 or Valkey, see {URL}")
    if code == "NOPERM" and (denied := _DENIED.search(text)):
        remedy = remedy.replace("lacks a right", f"lacks the right {denied[1].upper()}")
    fields: dict[str, object] = {NO_WRITES: code} if code in _WRITE_REFUSALS else {}
    fields |= {REPLICA: True} if code in _REPLICAS_REFUSALS else {}
    return Unavailable(f"tiers.redis: {where}: {remedy}", **fields)


def unreachable(where: str, reason: object) -> Unavailable:
    """Return the error for a server that does not answer, or not in time."""
    return Unavailable(f"tiers.redis: {where} does not answer ({reason}): see {URL}")
