"""Settings of the Redis tier: its servers, our credentials, and our use of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from kvstore.config.fields import Duration, Size, checks_of, without_password
from kvstore.errors import InvalidRequest
from kvstore.spec import ENVELOPES, SHARED_ENCODING_SETTINGS
from kvstore.units import GIB, MIB, split_address

SCHEMES = {
    "redis": ("server", False), "rediss": ("server", True), "unix": ("server", False),
    "redis+sentinel": ("sentinel", False), "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False), "rediss+cluster": ("cluster", True),
}  # fmt: skip
"""Scheme -> (kind of server, whether the connection is encrypted)."""
ENVELOPE_SETTINGS = ("", *ENVELOPES)
PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}
EXAMPLE = (
    "use redis://HOST:PORT, rediss://HOST:PORT, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or "
    "redis+cluster://HOST:PORT,HOST:PORT"
)
_check = checks_of("tiers.redis")


@dataclass(frozen=True, kw_only=True)
class RedisAddress:
    """The parsed ``tiers.redis.url``. ``kind``: "server", "sentinel" or "cluster". ``places``: (host, port) of each
    named server; empty for a server at a socket's ``path``. ``service``: the Sentinels' name of the server."""

    kind: str
    is_tls: bool = False
    places: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    @staticmethod
    def of(url: str) -> RedisAddress:
        """Parse a URL. Raises InvalidRequest, which never shows a password."""
        try:
            return _parsed(url)
        except ValueError as error:
            shown = without_password(url).partition("?")[0]
            raise InvalidRequest(f"tiers.redis.url = {shown}: {error}", setting="tiers.redis.url") from None


def _parsed(url: str) -> RedisAddress:
    """Parse a URL. Raises ValueError with the remedy."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(EXAMPLE) from None  # its own message may show the password
    if parts.scheme not in SCHEMES:
        raise ValueError(EXAMPLE)
    kind, is_tls = SCHEMES[parts.scheme]
    unknown = parse_qs(parts.query, keep_blank_values=True).keys() - ({"db"} if parts.scheme == "unix" else set())
    if unknown:
        raise ValueError("what follows ? means nothing here: use the settings of tiers.redis, and %3F in a password")
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    path, service = "", ""
    places: tuple[tuple[str, int], ...] = ()
    if parts.scheme == "unix":
        path = unquote(parts.path)
        if not path.startswith("/"):
            raise ValueError("a socket is named by its whole path: unix:///run/redis.sock")
    else:
        places = tuple(_place(each, PORTS[kind]) for each in hosts.split(","))
    if kind == "sentinel":
        service, _, _ = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError("name the service, too: redis+sentinel://HOST:PORT/SERVICE")
    elif kind == "server" and len(places) > 1:
        raise ValueError("these are several servers: use redis+cluster:// or redis+sentinel://")
    return RedisAddress(
        kind=kind, is_tls=is_tls, places=places, path=path, service=service, database=_database(kind, parts),
        username=unquote(username), password=unquote(password),
    )  # fmt: skip


def _place(text: str, port: int) -> tuple[str, int]:
    is_bare = ":" not in text.rpartition("]")[2]
    try:
        return split_address(f"{text}:{port}" if is_bare else text, "tiers.redis.url")
    except InvalidRequest:
        raise ValueError(EXAMPLE) from None


def _database(kind: str, parts: SplitResult) -> int:
    """Return the number of the database: /1 after the host, ?db=1 after a socket's path. A cluster has only 0."""
    words = parts.path.strip("/").split("/")
    text = {"server": words[0], "sentinel": "".join(words[1:2]), "cluster": ""}[kind]
    if parts.scheme == "unix":
        text = parse_qs(parts.query).get("db", [""])[0]
    if text and not text.isdecimal():
        raise ValueError("a database is a number: redis://HOST:PORT/0")
    return int(text or 0)


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """A Redis or Valkey server that nodes share ([cluster.md](cluster.md)). Off while ``url`` is empty and ``embedded``
    is false."""

    url: str = field(default="", repr=False)
    """`redis://HOST:PORT`, `rediss://` (TLS), `unix:///path`, `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE` or
    `redis+cluster://HOST:PORT,...`. Empty: off."""
    embedded: bool = False
    """`true`: the sidecar starts a server of its own, one for each tenant."""
    embedded_bytes: Size = GIB
    """Memory of each embedded server, at least 16 MiB."""
    prefix: str = "kvstore"
    """Prefix of all keys."""
    ttl_s: Duration = 7 * 86400.0
    """Unused chunks expire after this time. Managed services often evict only keys that have an expiry."""
    lookup_s_max: Duration = 0.005
    """Longest wait of a lookup for an answer."""
    write: str = "back"
    """The chunks that are written there: `back`, every stored chunk, at once; `reuse`, a chunk at its second use;
    `never`, none."""
    username: str = ""
    """The ACL user."""
    password_file: str = ""
    """A file with the password, read at each connect: it can be changed while the service runs, and come after its
    start."""
    sentinel_username: str = ""
    """The ACL user at the Sentinels of `redis+sentinel://`."""
    sentinel_password_file: str = ""
    """A file with the Sentinels' password, as `password_file`. Empty: they are asked without one."""
    ca_file: str = ""
    """For `rediss://`: the authority that signed the server's certificate, PEM."""
    certificate_file: str = ""
    """For `rediss://`: the sidecar's own certificate, PEM."""
    key_file: str = ""
    """For `rediss://`: the key of that certificate, PEM."""
    reader_count: int = 2
    """Threads of the byte movers that read, 1 to 64."""
    writer_count: int = 2
    """Threads of the byte movers that write, 1 to 64."""
    control_count: int = 8
    """Connections for all commands that move no chunk bytes, 1 to 64."""
    encoding: str = "raw"
    """`raw`, `lz4` or `auto`. `lz4` takes a sixth less room and traffic for bf16 caches, and more processor time;
    `auto` measures each model and chooses ([cluster.md](cluster.md)). Nodes read both."""
    envelope: str = ""
    """The envelope that proves copies there to be ours: `none`, `mac`, or `aead`, which also encrypts them
    ([trust.md](trust.md)). Empty: `mac` where the tenant has a key, else `none`."""

    def __post_init__(self) -> None:
        if self.url:
            address = RedisAddress.of(self.url)
            is_once = not (address.password and self.password_file)
            _check(is_once, "password_file", self.password_file, "the URL has a password, too: name one of them")
            user, named = self.username, address.username
            _check(not user or named in ("", user), "username", user, "the URL has another user: name one of them")
            has_password = bool(address.password or self.password_file or not (user or named))
            _check(has_password, "username", user or named, "the server asks for a password, too: set password_file")
            for name in ("sentinel_username", "sentinel_password_file"):
                told = getattr(self, name)
                fits = address.kind == "sentinel" or not told
                _check(fits, name, told, "use redis+sentinel:// in tiers.redis.url, or leave it out")
            files = self.ca_file or self.certificate_file
            fits = address.is_tls or not files
            _check(fits, "ca_file or certificate_file", files, "use rediss:// in tiers.redis.url, or leave it out")
        _check(not (self.url and self.embedded), "embedded", True, "leave out tiers.redis.url, or this")
        _check(self.embedded_bytes >= 16 * MIB, "embedded_bytes", self.embedded_bytes, "use at least 16 MiB")
        plain = bool(self.prefix) and not set(self.prefix) & set("{}")
        _check(plain, "prefix", self.prefix, "braces in it would put all chunks on one node: use none")
        _check(self.ttl_s >= 1, "ttl_s", self.ttl_s, "use at least 1 s")
        _check(self.lookup_s_max > 0, "lookup_s_max", self.lookup_s_max, "use more than 0")
        _check(self.write in ("back", "reuse", "never"), "write", self.write, "use back, reuse or never")
        _check(self.encoding in SHARED_ENCODING_SETTINGS, "encoding", self.encoding, "use raw, lz4 or auto")
        _check(self.envelope in ENVELOPE_SETTINGS, "envelope", self.envelope, "use none, mac or aead")
        is_both = bool(self.certificate_file) == bool(self.key_file)
        _check(is_both, "certificate_file", self.certificate_file, "set tiers.redis.key_file with it, or neither")
        for name in ("reader_count", "writer_count", "control_count"):
            count = getattr(self, name)
            _check(1 <= count <= 64, name, count, "use 1..64")

    @property
    def is_on(self) -> bool:
        """True when the Redis tier is on."""
        return bool(self.url) or self.embedded
