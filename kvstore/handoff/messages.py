"""The messages between the two ends of a hand-off: each message is a value, and each field has its limit.

A field with a default may be missing in a packet. It also gets its default where the packet has a value that the field
does not allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from kvstore.errors import KVStoreError, from_status

PROTOCOL_VERSION = 1
REGIONS_MAX = 64
"""Regions per packet, each with its descriptor; the kernel's own limit is 253."""
COUNTED_MAX = 1 << 32
"""The largest count in one packet: the server's counters are 64 bits on the wire."""
FETCHED_BYTES_MAX = 1 << 40
"""The largest number of copied bytes in one packet: a packet stands for a second, and no machine copies so fast."""
TOKENS_MAX = 1 << 40
"""The largest number of tokens fetched of one chain in one packet."""
USED_MAX = 128
"""Chains named in one packet: each takes some 150 bytes of its 64 KiB."""
NUMBER_MAX = (1 << 62) - 1
MESSAGE_CHARACTERS_MAX = 500
"""Characters of a refusal's message: it quotes the peer's packet, and this bounds the quote."""


class Shape(NamedTuple):
    """The values that a field allows. ``most``: its largest number or length. ``wanted``: the same in words, for
    refusals. ``wire``: its name in packets, if that differs from the field's name."""

    most: int
    wanted: str
    allows: Callable[[object], bool]
    wire: str = ""


def number(most: int = NUMBER_MAX, wire: str = "") -> Shape:
    """Return the shape of a whole number from 0 to ``most``."""
    return Shape(most, f"a whole number up to {most}", lambda value: _is_number(value, most), wire)


def flag(wire: str) -> Shape:
    """Return the shape of a yes or no."""
    return Shape(1, "true or false", lambda value: isinstance(value, bool), wire)


def text(most: int) -> Shape:
    return Shape(most, f"a text of at most {most} characters", lambda value: _is_text(value, most))


def rows(most: int, wanted: str, is_row: Callable[[object], bool]) -> Shape:
    def allows(value: object) -> bool:
        return isinstance(value, list | tuple) and len(value) <= most and all(map(is_row, value))

    return Shape(most, f"at most {most} {wanted}", allows)


def _is_number(value: object, most: int = NUMBER_MAX) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_text(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most


def _is_region(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_chain(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 4:
        return False
    name, exactness, provenance, digest = value
    return _is_name(name) and _is_number(exactness, 2) and _is_number(provenance, 2) and _is_name(digest)


def _is_amount(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return _is_number(value[0], COUNTED_MAX) and _is_number(value[1], TOKENS_MAX)


def _is_version(value: object) -> bool:
    return type(value) is int and value == PROTOCOL_VERSION  # true == 1 == 1.0


def _is_name(value: object) -> bool:
    """True for 32 bytes in lower-case hexadecimal digits."""
    return _is_hexadecimal(value, 64)


def _is_ticket(value: object) -> bool:
    return _is_hexadecimal(value, 32)


def _is_hexadecimal(value: object, digit_count: int) -> bool:
    return isinstance(value, str) and len(value) == digit_count and set(value) <= set("0123456789abcdef")


_VERSION = f"{PROTOCOL_VERSION}: this server speaks hand-off version {PROTOCOL_VERSION}; use a client of its release"

Number = Annotated[int, number()]
Counted = Annotated[int, number(COUNTED_MAX)]
FetchedBytes = Annotated[int, number(FETCHED_BYTES_MAX)]
ByteCount = Annotated[int, number(wire="bytes")]
Version = Annotated[int, Shape(PROTOCOL_VERSION, _VERSION, _is_version)]
Secret = Annotated[str, Shape(64, "64 hexadecimal digits", _is_name)]
TicketDigits = Annotated[str, Shape(32, "32 hexadecimal digits", _is_ticket)]
Offers = Annotated[tuple[str, ...], rows(8, "short texts", lambda value: _is_text(value, 32))]
RegionRows = Annotated[tuple[tuple[int, int], ...], rows(REGIONS_MAX, "pairs of numbers", _is_region)]
"""(index, bytes) of each region; their descriptors travel in the same order."""
ChainRows = Annotated[tuple[tuple[str, int, int, str], ...], rows(USED_MAX, "names of chains", _is_chain)]
"""For each chain: its model's fingerprint, the wire's numbers of its exactness and provenance, its last digest."""

AmountRows = Annotated[tuple[tuple[int, int], ...], rows(USED_MAX, "pairs of counts", _is_amount)]

# ------------------------------------------------------------ from the client


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session. It must be the first packet, and only the first. The answer is ``Welcome``."""

    op: ClassVar[str] = "hello"
    version: Version
    is_operator: Annotated[bool, flag(wire="operator")] = False
    """The session is an operator's command's: it may be one of the few that are kept for operators."""


@dataclass(frozen=True, slots=True)
class RegionsQuestion:
    """Asks for the arena's regions from index ``have`` on. The answer has the first few of them."""

    op: ClassVar[str] = "regions"
    have: Number


@dataclass(frozen=True, slots=True)
class StagingQuestion:
    """Asks for memory that the client may write and the server reads."""

    op: ClassVar[str] = "staging"
    byte_count: ByteCount


@dataclass(frozen=True, slots=True)
class StagingClose:
    """Gives staging back. The answer is ``Done``."""

    op: ClassVar[str] = "staging_close"
    staging_id: Number


@dataclass(frozen=True, slots=True)
class PresenceQuestion:
    """Asks for the presence table, where ``Welcome`` offers it."""

    op: ClassVar[str] = "presence"


@dataclass(frozen=True, slots=True)
class DeviceQuestion:
    """Asks for the pool on a device, where ``Welcome`` offers it."""

    op: ClassVar[str] = "device"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Counts of the client's work without calls, named as the server's counters. It is never answered."""

    op: ClassVar[str] = "looked_up"
    lookup_calls: Counted = 0
    lookup_hit_chunks: Counted = 0
    lookup_miss_chunks: Counted = 0
    fetch_calls: Counted = 0
    fetch_hit_chunks: Counted = 0
    fetch_miss_chunks: Counted = 0
    fetch_bytes: FetchedBytes = 0
    used: ChainRows = ()
    """Chains that were fetched. Sent to a server that offers "uses": it evicts used chunks last."""
    used_amounts: AmountRows = ()
    """For each chain in ``used``: the number of its fetches, and the tokens that they brought."""


@dataclass(frozen=True, slots=True)
class Redeemed:
    """Says that a reader has copied the chunks of a ticket from their places. It is never answered."""

    op: ClassVar[str] = "redeemed"
    ticket: TicketDigits


# ------------------------------------------------------------ from the server


@dataclass(frozen=True, slots=True)
class Welcome:
    """Opens the session, with the descriptors of the generations and of the first regions."""

    op: ClassVar[str] = "welcome"
    session_id: Annotated[int, number(wire="session")]
    secret: Secret
    server_pid: Number
    generations_bytes: Number
    regions: RegionRows
    offers: Offers = ()

    @property
    def descriptor_count(self) -> int:
        return 1 + len(self.regions)


@dataclass(frozen=True, slots=True)
class RegionsAnswer:
    """Some regions with their descriptors; none where the client has all of them."""

    op: ClassVar[str] = "regions"
    regions: RegionRows

    @property
    def descriptor_count(self) -> int:
        return len(self.regions)


@dataclass(frozen=True, slots=True)
class StagingAnswer:
    """Staging of the length that was asked for, by its descriptor."""

    op: ClassVar[str] = "staging"
    descriptor_count: ClassVar[int] = 1
    staging_id: Number
    byte_count: ByteCount


@dataclass(frozen=True, slots=True)
class Done:
    """Confirms a question that needs no other answer."""

    op: ClassVar[str] = "ok"
    descriptor_count: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class PresenceAnswer:
    """The presence table in use now, by its descriptor. ``token_count_max``: longer lookups are refused.
    ``tail_tokens_max``: for models with larger chunks the table has no partial chunks; 0 from old releases."""

    op: ClassVar[str] = "presence"
    descriptor_count: ClassVar[int] = 1
    byte_count: ByteCount
    token_count_max: Number
    tail_tokens_max: Number = 0


@dataclass(frozen=True, slots=True)
class DeviceAnswer:
    """The pool on a device, by the descriptors of its generations and of its memory. ``device``: the device's name for
    all processes of the machine."""

    op: ClassVar[str] = "device"
    descriptor_count: ClassVar[int] = 2
    device: Annotated[str, text(64)]
    generations_bytes: Number
    byte_count: ByteCount


@dataclass(frozen=True, slots=True)
class Refusal:
    """Stands in place of any answer: the error, by its status."""

    op: ClassVar[str] = "error"
    descriptor_count: ClassVar[int] = 0
    status: Annotated[str, text(32)]
    message: Annotated[str, text(MESSAGE_CHARACTERS_MAX)]

    @classmethod
    def of(cls, error: KVStoreError) -> Refusal:
        return cls(error.status, error.message[:MESSAGE_CHARACTERS_MAX])

    @property
    def error(self) -> KVStoreError:
        return from_status(self.status, self.message)


Question = (
    Hello | RegionsQuestion | StagingQuestion | StagingClose | PresenceQuestion | DeviceQuestion | LookedUp | Redeemed
)
Answer = Welcome | RegionsAnswer | StagingAnswer | Done | PresenceAnswer | DeviceAnswer | Refusal
