"""Sizes and durations as people write them. They are parsed once, at the edge; inside, they are numbers. And the sizes
that are counted with everywhere."""

from __future__ import annotations

import ipaddress
import re

from kvstore.errors import InvalidRequest

MIB = 1 << 20
GIB = 1 << 30
PAGE_BYTES = 4096
"""Extents, staging, headers and slots of a device are whole pages. The stored format has this number, too."""
_BYTES = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1 << 10,
    "m": 1000**2, "mb": 1000**2, "mib": 1 << 20,
    "g": 1000**3, "gb": 1000**3, "gib": 1 << 30,
    "t": 1000**4, "tb": 1000**4, "tib": 1 << 40,
}  # fmt: skip
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
NUMBER_STOP = 1 << 62
"""Sizes and counts are below this: messages have whole numbers of 64 bits, packets of the hand-off 62 bits."""
DURATION_S_MAX = 36500 * 86400.0
"""A hundred years. The waits of threads and sockets end at three hundred, and an expiry in Redis has a largest time."""
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def _parse(text: str, units: dict[str, int] | dict[str, float], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidRequest(f"{text!r} is not a {what}; write it like {example!r}")
    return float(match[1]) * factor


def parse_bytes(value: str | int) -> int:
    """Return the bytes of "64 GiB", "1.5 GB" or a plain number. Raises InvalidRequest for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest(f"{value!r} is not a size; write it like '64 GiB'")
    size = value if isinstance(value, int) else _parse(value, _BYTES, "size", "64 GiB")
    if not -NUMBER_STOP < size < NUMBER_STOP:
        raise InvalidRequest(f"{value!r:.40} is too large for a size")
    return round(size)


def parse_duration(value: str | float) -> float:
    """Return the seconds of "30 s", "250 ms", "5 min" or a plain number. Raises InvalidRequest for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidRequest(f"{value!r} is not a duration; write it like '30 s'")
    seconds = _parse(value, _SECONDS, "duration", "30 s") if isinstance(value, str) else value
    if not -DURATION_S_MAX <= seconds <= DURATION_S_MAX:  # NaN is not either
        raise InvalidRequest(f"{value!r:.40} is too large for a duration, or no number: use 36500 d or less")
    return float(seconds)


def format_bytes(count: float) -> str:
    """Return a size in words: 1536 gives "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def is_port(text: str) -> bool:
    """True for the number of a TCP port, in ASCII digits."""
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and int(text) <= 65535


def split_address(address: str, name: str) -> tuple[str, int]:
    """Return HOST and PORT of ``HOST:PORT`` or ``[V6]:PORT``. Raises InvalidRequest naming the setting ``name``."""
    host, colon, port = address.rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    if not (colon and host and is_port(port)) or (":" in host and not is_v6):
        raise InvalidRequest(f"{name} = {address}: use HOST:PORT, like 127.0.0.1:9500 or [::1]:9500", setting=name)
    return host[1:-1] if is_v6 else host, int(port)


def is_loopback(host: str) -> bool:
    """True when traffic to ``host`` stays on this machine. Names other than localhost count as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
