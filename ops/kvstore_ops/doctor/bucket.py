"""Checks of the bucket of tiers.s3 by requests of this command's own: its owner, each right, conditional writes, and
lifecycle rules. The one object that is written has a random name below the prefix, and is removed."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.config import S3Settings
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.tiers.s3.connection import S3Connection, connection_to
from kvstore.tiers.s3.objects import LOOK_S_MAX, bucket_of, encryption_of
from kvstore.tiers.s3.refusals import Refused, error_of
from kvstore_ops.doctor.finding import Finding, Health

BODY = b"kvstore doctor"
NO_RULES, NOT_KNOWN = ("NoSuchLifecycleConfiguration", "NoSuchLifecycle"), ("NotImplemented", "MethodNotAllowed")
DENIED, ABSENT, REFUSES = 403, 404, 412
RIGHTS = {
    "PUT": ("s3:PutObject", "no chunk is sent there"),
    "GET": ("s3:GetObject", "no chunk comes from there"),
    "LIST": ("s3:ListBucket", "what is not there is told as denied, and kvstore scan finds nothing"),
    "DELETE": ("s3:DeleteObject", "canaries, and what kvstore scan --delete is to remove, stay there"),
}


def look_at_bucket(settings: S3Settings) -> Iterator[Finding]:
    """Check the bucket. Nothing is left there, unless the right to delete is missing."""
    if not settings.bucket:
        yield Finding("s3", Health.UNSEEN, "tiers.s3.bucket is not set")
        return
    try:
        yield from _Bucket(settings).looks()
    except KVStoreError as error:
        yield Finding(
            "s3", Health.BAD, error.message, "chunks are not kept there, and lookups wait for it a few times",
            "do what the message says; then ask again",
        )  # fmt: skip


class _Bucket:
    """Requests to the bucket of the settings."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._bucket = bucket_of(settings)
        self._place = {**self._bucket, "Key": f"{settings.prefix}/doctor/{secrets.token_hex(16)}"}
        self._written = {**self._place, **encryption_of(settings), "Body": BODY}
        self._is_absent = False

    def looks(self) -> Iterator[Finding]:
        yield self._owner()
        if self._is_absent:  # each right would be refused for the bucket's sake, and be taken for missing
            yield Finding("s3 rights", Health.UNSEEN, "there is no bucket to try them on")
            return
        try:
            yield self._right("PUT", lambda client: client.put_object(**self._written))
            yield self._conditions()
            yield self._right("GET", self._read)
            yield self._right("LIST", lambda client: client.list_objects_v2(
                **self._bucket, Prefix=self._place["Key"], MaxKeys=1))  # fmt: skip
        finally:
            removed = self._right("DELETE", lambda client: client.delete_object(**self._place))
        yield removed
        yield self._lifecycle()

    async def _read(self, client: Any) -> bool:
        answer = await client.get_object(**self._place)
        async with answer["Body"] as body:
            return bool(await body.read() == BODY)

    def _asked(self, request: Callable[[Any], Awaitable[Any]]) -> Any:
        """Make one request. Raises Refused; KVStoreError where the endpoint does not answer."""

        async def work(connection: S3Connection) -> Any:
            return await connection.ask(request)

        try:
            return connection_to(self._settings).run(work, LOOK_S_MAX)
        except Refused as refused:
            if not refused.status:
                raise error_of(refused, "read") from refused
            raise
        except DeadlineExceeded as error:
            raise error from None

    def _owner(self) -> Finding:
        settings = self._settings
        try:
            self._asked(lambda client: client.list_objects_v2(**self._bucket, MaxKeys=1))
        except Refused as refused:
            self._is_absent = refused.status == ABSENT
            if refused.status == DENIED and not settings.expected_owner:
                return Finding("s3 bucket", Health.UNSEEN, f"it is not told whether {settings.bucket} is there")
            return Finding(
                "s3 bucket", Health.BAD, f"{settings.bucket} is not to be had ({refused.code})",
                "the tier is of no use",
                "create it, or mend tiers.s3.bucket, tiers.s3.region, or tiers.s3.expected_owner (its account)",
            )  # fmt: skip
        if settings.expected_owner:
            return Finding("s3 bucket", Health.GOOD, f"{settings.bucket} is {settings.expected_owner}'s")
        return Finding(
            "s3 bucket", Health.WEAK, f"{settings.bucket} is there; whose it is, is not checked",
            "who takes over a bucket's name gets the chunks that are sent there",
            "set tiers.s3.expected_owner to the account that owns it",
        )  # fmt: skip

    def _right(self, name: str, request: Callable[[Any], Awaitable[Any]]) -> Finding:
        right, why = RIGHTS[name]
        try:
            found = self._asked(request)
        except Refused as refused:
            if refused.code == "NoSuchKey":  # nothing could be written, and this may be read
                return Finding(f"s3 {name}", Health.GOOD, f"the credentials have {right}")
            left = f"; an object was left at {self._place['Key']}" if name == "DELETE" else ""
            has_key = self._settings.sse_kms_key_id and name in ("PUT", "GET")
            key = ", and kms:GenerateDataKey and kms:Decrypt on tiers.s3.sse_kms_key_id" if has_key else ""
            return Finding(
                f"s3 {name}", Health.BAD, f"it is refused ({refused.code}){left}", why,
                f"give the service's credentials {right} on {self._settings.bucket}/{self._settings.prefix}/*{key}",
            )  # fmt: skip
        if found is False:
            return Finding(
                f"s3 {name}", Health.BAD, "other bytes came back than were sent", "chunks fail their checks",
                "see what changes objects on the way: a proxy, or the endpoint",
            )  # fmt: skip
        return Finding(f"s3 {name}", Health.GOOD, f"the credentials have {right}")

    def _conditions(self) -> Finding:
        """Check that an object that is there is not replaced where that was ruled out."""
        what = "s3 conditional writes"
        why = "two nodes that write one chunk write it twice, and a damaged copy is replaced by whoever comes last"
        remedy = "use an endpoint, or a release of it, that honours If-None-Match"
        try:
            self._asked(lambda client: client.put_object(**self._written, IfNoneMatch="*"))
        except Refused as refused:
            if refused.status == REFUSES:
                return Finding(what, Health.GOOD, "the endpoint honours them")
            if refused.code in NOT_KNOWN:
                return Finding(what, Health.WEAK, f"the endpoint has none ({refused.code})", why, remedy)
            return Finding(what, Health.UNSEEN, f"the write was refused ({refused.code})")
        return Finding(what, Health.WEAK, "the endpoint ignores them", why, remedy)

    def _lifecycle(self) -> Finding:
        what = "s3 lifecycle"
        try:
            found = self._asked(lambda client: client.get_bucket_lifecycle_configuration(**self._bucket))
        except Refused as refused:
            if refused.code in NO_RULES:
                return rules_tell((), self._settings.prefix)
            return Finding(
                what, Health.UNSEEN, f"its rules are not told ({refused.code}): s3:GetLifecycleConfiguration"
            )  # fmt: skip
        return rules_tell(found.get("Rules", ()), self._settings.prefix)


def rules_tell(rules: Sequence[Mapping[str, Any]], prefix: str) -> Finding:
    """Check a bucket's lifecycle rules: none may delete or move what lies below ``prefix``."""
    what, ours = "s3 lifecycle", f"{prefix}/"
    enabled = [each for each in rules if each.get("Status") == "Enabled" and _meets(each, ours)]
    for rule in enabled:
        name = str(rule.get("ID") or "without an ID")
        for action, said in (("Expiration", "deletes"), ("Transitions", "moves to slow storage")):
            if rule.get(action) and not _is_marker(rule[action]):
                return Finding(
                    what, Health.BAD, f"the rule {name[:80]} {said} what lies below {ours}",
                    "chunks go although stores were told that they are in the bucket",
                    f"end the rule, or leave {ours} out of it; kvstore scan --delete removes what is old",
                )  # fmt: skip
    if not any("AbortIncompleteMultipartUpload" in each for each in enabled):
        return Finding(
            what, Health.WEAK, "no rule ends incomplete uploads", "parts of uploads that broke off stay, and cost",
            f"add a rule for {ours} with AbortIncompleteMultipartUpload after 1 day",
        )  # fmt: skip
    return Finding(what, Health.GOOD, f"no rule takes what lies below {ours}")


def _is_marker(action: Any) -> bool:
    """True for an expiration of delete markers alone."""
    return isinstance(action, Mapping) and set(action) == {"ExpiredObjectDeleteMarker"}


def _meets(rule: Mapping[str, Any], ours: str) -> bool:
    """True when some object below ``ours`` may be meant. A rule by tags or sizes counts, for it may meet ours."""
    named = rule.get("Filter") or {}
    theirs = str(named.get("Prefix") or named.get("And", {}).get("Prefix") or rule.get("Prefix") or "")
    return theirs.startswith(ours) or ours.startswith(theirs)
