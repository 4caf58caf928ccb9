"""Settings of the S3 tier: the bucket, the access to it, and the limits on its cost."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvstore.config.fields import Duration, Size, checks_of
from kvstore.spec import ENVELOPES, SHARED_ENCODING_SETTINGS
from kvstore.units import MIB

WRITES = ("reuse", "demote", "back", "never")
ADDRESSINGS = ("auto", "path", "virtual")
_check = checks_of("tiers.s3")


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """A bucket of any S3 endpoint ([cluster.md](cluster.md)). Credentials come as botocore finds them (environment,
    ``profile``, ``credentials_file``, instance role), and never from here. The limits on cost hold for each server
    process and tenant separately; reads and writes count together."""

    bucket: str = ""
    """The bucket's name. Empty: off."""
    prefix: str = "kvstore"
    """Prefix of all object names; it may have parts, like `kvstore/production`."""
    endpoint_url: str = ""
    """`https://...` of a provider other than AWS."""
    region: str = ""
    """The bucket's region. Empty: as the AWS tools find it."""
    profile: str = ""
    """A profile of the AWS configuration."""
    credentials_file: str = ""
    """A file of credentials, as the AWS tools write it. It is read anew when the endpoint refuses what it had."""
    addressing: str = "auto"
    """The place of the bucket's name in requests: `path`, `virtual` (in the host's name), or `auto`."""
    expected_owner: str = ""
    """The account that must own the bucket; a bucket of another account is refused."""
    sse_kms_key_id: str = ""
    """The key with which the provider encrypts objects."""
    proxy: str = ""
    """`http://...` of a proxy, without a user or password."""
    ca_file: str = ""
    """The authority that signed the endpoint's certificate, PEM. Empty: the authorities that the system trusts."""
    write: str = "reuse"
    """The chunks that are written there: `reuse`, a chunk at its second use; `demote`, a chunk that is about to leave
    its last local tier; `back`, every stored chunk, at once; `never`, none."""
    lookup_s_max: Duration = 0.05
    """Longest wait of a lookup for an answer."""
    timeout_s: Duration = 5.0
    """A request without an answer for this time has failed."""
    chunk_bytes_min: Size = 256 << 10
    """Smaller chunks are not sent: each object costs a request."""
    range_bytes: Size = 8 * MIB
    """Bytes of an object that one request reads at most; 8 to 16 MiB are best. Loads of less than eight times as much
    are read by smaller requests, of 4 MiB at least, so that all connections share them."""
    reader_count: int = 8
    """Threads of the byte movers that read, 1 to 64."""
    writer_count: int = 4
    """Threads of the byte movers that write, 1 to 64."""
    bytes_per_s_max: Size = 0
    """Highest rate of bytes read and written; 0: no limit."""
    day_bytes_max: Size = 0
    """Bytes per day; beyond them the tier is not used until the next day. 0: no limit."""
    day_request_count_max: int = 0
    """Requests per day; beyond them the tier is not used until the next day. 0: no limit."""
    encoding: str = "raw"
    """`raw`, `lz4` or `auto`. `lz4` takes a sixth less room and traffic for bf16 caches, and more processor time;
    `auto` measures each model and chooses ([cluster.md](cluster.md)). Nodes read both."""
    paid_bytes_per_s: Size = 64 * MIB
    """With `encoding = "auto"`: as many bytes that are not stored are worth a second of encoding and decoding, because
    room and traffic are paid for. 0: only time counts."""
    envelope: str = ""
    """The envelope that proves copies there to be ours, as `tiers.redis.envelope`."""

    def __post_init__(self) -> None:
        words = self.prefix.split("/")
        clean = self.prefix.isascii() and self.prefix.isprintable() and not {"", ".", ".."} & set(words)
        _check(clean, "prefix", self.prefix, "use plain words with single / between them, like kvstore/production")
        _check("/" not in self.bucket, "bucket", self.bucket, "use a bucket's name; what follows it is tiers.s3.prefix")
        named = re.fullmatch(r"[A-Za-z0-9._-]{1,255}|arn:.+|", self.bucket) is not None
        _check(named, "bucket", self.bucket, "use a bucket's name: letters, digits and . _ -, no blanks")
        for name in ("endpoint_url", "proxy"):
            url = getattr(self, name)
            _check(not url or url.startswith(("http://", "https://")), name, url, "use http://... or https://...")
            remedy = "no user or password here: put HTTPS_PROXY into the service's environment"
            _check("@" not in url, name, "(hidden)", remedy)  # ``kvstore config`` would print it
        _check(self.addressing in ADDRESSINGS, "addressing", self.addressing, f"use one of {', '.join(ADDRESSINGS)}")
        _check(self.write in WRITES, "write", self.write, f"use one of {', '.join(WRITES)}")
        _check(self.encoding in SHARED_ENCODING_SETTINGS, "encoding", self.encoding, "use raw, lz4 or auto")
        _check(self.envelope in ("", *ENVELOPES), "envelope", self.envelope, f"use one of {', '.join(ENVELOPES)}")
        for name in ("lookup_s_max", "timeout_s"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "use more than 0")
        for name in (
            "chunk_bytes_min",
            "paid_bytes_per_s",
            "bytes_per_s_max",
            "day_bytes_max",
            "day_request_count_max",
        ):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "use 0 or more")
        _check(self.range_bytes >= 4096, "range_bytes", self.range_bytes, "use at least 4 KiB; 8 to 16 MiB are best")
        for name in ("reader_count", "writer_count"):
            _check(1 <= getattr(self, name) <= 64, name, getattr(self, name), "use 1..64")
