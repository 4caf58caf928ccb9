"""The refusals of an endpoint, or of the way to it, and their meaning for a caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.errors import DataLoss, Exhausted, KVStoreError, PermissionDenied, Unavailable
from kvstore.tiers.contract import IS_FULL

ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
ARCHIVED = "InvalidObjectState"
"""A rule moved the object to a storage class that gives its bytes only once they were restored."""
NO_BUCKET = "NoSuchBucket"
"""Only an answer with a body has this code: to a HEAD it is "404", as for a missing object."""
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "MethodNotAllowed"})
UNMATCHED = frozenset({"412", "PreconditionFailed"})
CHANGED = UNMATCHED | {"409", "ConditionalRequestConflict", "OperationAborted", "NoSuchUpload"}
"""A condition on the object there does not hold, or another node writes it at this moment, or an upload has ended
already: its last answer was lost."""
TOO_SHORT = frozenset({"416", "InvalidRange"})
UNCONDITIONAL = frozenset({"501", "NotImplemented"})
FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "507", "InsufficientStorage"})
WORDLESS = frozenset({"301", "307", "400", "401", "403"})
"""Codes of a HEAD that say too little: its answer has no body."""
RETRIED = frozenset({
    "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "503", "InternalError", "500", "502", "504",
    "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests", "429", "RequestLimitExceeded",
    "BadDigest", "XAmzContentChecksumMismatch", "ConnectionClosedError", "HTTPClientError", "CutShort",
})  # fmt: skip
"""The same request may well succeed a moment later."""
CLOSED = frozenset({"ConnectionClosedError", "EndpointConnectionError"})
"""A kept connection is gone: another connection may work, at once."""
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired")
STALE = frozenset({*_EXPIRED, "SignatureDoesNotMatch", "NoCredentialsError", "CredentialRetrievalError"})
"""Credentials that were good once, or are wrong, or missing: they are read anew, as others may be there by now."""

_CREDENTIALS = (
    "set tiers.s3.profile, tiers.s3.credentials_file or AWS_ACCESS_KEY_ID in the service's environment to credentials "
    "that the endpoint knows"
)
ODD = "OddAnswer"
"""An answer that lacks what every S3 store says: of a login page, or of a proxy that alters answers."""
_ENDPOINT = "check tiers.s3.endpoint_url, tiers.s3.proxy, and whether the endpoint runs"
_REGION = (
    "set tiers.s3.region to the bucket's region, or tiers.s3.endpoint_url to that region's endpoint, or to https:// "
    "where http:// is sent there"
)
_REMEDIES = {
    NO_BUCKET: "there is no such bucket: create it, or set tiers.s3.bucket to the name of one that is there",
    "InvalidBucketName": "set tiers.s3.bucket to a valid name",
    "ParamValidationError": "set tiers.s3.bucket to a valid name, tiers.s3.expected_owner to an account's 12 digits",
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "307": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidRequest": "where tiers.s3.sse_kms_key_id is set, the endpoint may take keys over https only, or have no "
    "such key; else see its log",
    **dict.fromkeys(UNCONDITIONAL, "the endpoint does not know a part of the request: where tiers.s3.sse_kms_key_id is "
                    "set, perhaps encryption by a key; else see its log"),
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it (NTP)",
    "SignatureDoesNotMatch": f"the secret key is wrong: {_CREDENTIALS}",
    "NoCredentialsError": f"no credentials were found: {_CREDENTIALS}",
    "PartialCredentialsError": f"half of the credentials is missing: {_CREDENTIALS}",
    "CredentialRetrievalError": f"the credentials could not be had: {_CREDENTIALS}",
    "ProfileNotFound": "set tiers.s3.profile to a profile of tiers.s3.credentials_file or ~/.aws",
    "SSLError": "set tiers.s3.ca_file to the authority of the endpoint's certificate, or mend the certificate",
    "FileNotFoundError": "tiers.s3.ca_file names no file",
    **dict.fromkeys((ODD, "ResponseParserError", "404"), "what answers is no S3 store, or a proxy alters its answers: "
                    "check tiers.s3.endpoint_url and tiers.s3.proxy"),
    "304": "the answer is an old one's: a proxy or cache that keeps answers must not stand before the store",
    "ProxyConnectionError": "check tiers.s3.proxy, or HTTPS_PROXY in the service's environment",
    "InvalidEndpoint": "set tiers.s3.endpoint_url to http://HOST:PORT or https://HOST:PORT",
    **dict.fromkeys(("SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "503", "429", "TooManyRequests",
                     "Throttling", "ThrottlingException", "RequestLimitExceeded"),
                    "the store is busy and asks for fewer requests: lower tiers.s3.reader_count and writer_count, or "
                    "share less"),
    "ReadTimeoutError": f"{_ENDPOINT}; raise tiers.s3.timeout_s for one that takes longer to answer",
    **dict.fromkeys(("EndpointConnectionError", "ConnectTimeoutError", "CutShort", "ConnectionClosedError",
                     "HTTPClientError"), _ENDPOINT),
    **dict.fromkeys(_EXPIRED, f"the endpoint does not take the credentials any more: {_CREDENTIALS}"),
}  # fmt: skip
_RIGHTS = {
    "read": "it needs the right s3:GetObject, and s3:ListBucket to tell what is not there",
    "write": "it needs the right s3:PutObject",
    "remove": "it needs the right s3:DeleteObject",
}


class Refused(Exception):
    """One request failed. ``code``: the endpoint's code, or the name of the error on the way; ``status``: of HTTP, 0
    without one. Never leaves this package."""

    def __init__(self, code: str, status: int = 0) -> None:
        super().__init__(code, status)
        self.code = code
        self.status = status


def told(answer: Mapping[str, Any], what: str) -> Any:
    """Return a part that every store's answer has. Raises Refused where this one lacks it."""
    if what not in answer:
        raise Refused(ODD)
    return answer[what]


def refusal_of(error: Exception) -> Refused:
    """Return the refusal that a client's error means. Raises the error where it is not the client's: a bug of ours."""
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    if isinstance(error, Refused):
        return error
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return Refused(str(error.response.get("Error", {}).get("Code") or status), status)
    if isinstance(error, BotoCoreError):
        inner = error.kwargs.get("error")
        code = type(inner if isinstance(inner, FileNotFoundError) else error).__name__  # a file of ``verify``
        return Refused("CutShort" if code in ("ResponseStreamingError", "IncompleteReadError") else code)
    if isinstance(error, ValueError) and "nvalid endpoint" in str(error):
        return Refused("InvalidEndpoint")
    if isinstance(error, FileNotFoundError):
        return Refused("FileNotFoundError")
    if isinstance(error, TimeoutError):
        return Refused("ReadTimeoutError")
    if isinstance(error, aiohttp.ClientError | OSError):
        return Refused("CutShort")
    raise error


def error_of(refused: Refused, action: str) -> KVStoreError:
    """Return the contract's error. ``action``: "read", "write" or "remove". Only the endpoint's code is repeated: its
    text may name keys."""
    code = refused.code
    if code in FULL:
        return Exhausted(
            f"tiers.s3: the store is full ({code}): raise its quota, or remove what is old", **{IS_FULL: True}
        )
    if code == "EntityTooLarge":
        return Exhausted("tiers.s3: the store takes no object as large as this chunk (EntityTooLarge): raise its limit")
    if code in DENIED or (refused.status == 403 and code not in _REMEDIES):
        what = (
            "where they are set, tiers.s3.expected_owner must be the bucket's owner, and tiers.s3.sse_kms_key_id a key "
            "on which it has kms:GenerateDataKey and kms:Decrypt"
        )
        return PermissionDenied(f"tiers.s3: {action} is denied ({code}): {_RIGHTS[action]}; {what}")
    if code in TOO_SHORT:
        return DataLoss("the object ends before the chunk does", reason="truncated")
    if code.startswith("KMS"):
        return Unavailable(f"tiers.s3: {action} failed ({code}): check tiers.s3.sse_kms_key_id, and the rights on it")
    remedy = _REMEDIES.get(code, _REGION if 300 <= refused.status < 400 else "see the endpoint's log")
    return Unavailable(f"tiers.s3: {action} failed ({code}): {remedy}", code=code)
