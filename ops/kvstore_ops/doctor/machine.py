"""Checks of this machine for the settings: the kernel, open files, memory, the clock and certificates."""

from __future__ import annotations

import os
import re
import resource
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvstore_copies import is_checked_compiled, is_compiled

from kvstore.config import LoadedSettings, Settings
from kvstore.config.machine import memory_limit_bytes
from kvstore.errors import InvalidRequest
from kvstore.server.descriptors import SOFT_LIMIT_MAX, check_needs
from kvstore.server.tiers import TIERS
from kvstore.units import format_bytes
from kvstore_ops.doctor.finding import Finding, Health
from kvstore_ops.doctor.kernel import accelerators, huge_pages, is_synchronized, locked_memory, time_source

KERNEL_MIN, KERNEL_HUGE = (5, 3), (6, 1)
EXPIRY_WARNING_S = 14 * 86400.0
EARLIEST_S = datetime(2024, 1, 1, tzinfo=UTC).timestamp()
_UTC_TIME, _GENERAL_TIME = 0x17, 0x18


def look_at_machine(loaded: LoadedSettings) -> Iterator[Finding]:
    """Run all checks that need no sidecar and no device."""
    yield kernel(os.uname().release)
    yield open_files(loaded)
    yield memory(loaded)
    yield huge_pages()
    yield locked_memory(loaded.settings.arena.capacity_bytes, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield compiled_copies(is_compiled(), is_checked_compiled())
    yield clock(time.time())
    yield time_source(is_synchronized())
    yield from accelerators(Path("/"))
    yield from certificates(loaded.settings, time.time())


def kernel(release: str) -> Finding:
    """Check the version of the kernel. ``release``: as uname has it."""
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < KERNEL_MIN:
        return Finding(
            "kernel", Health.BAD, f"Linux {release}", "the service uses calls that came with Linux 5.3",
            "use a kernel of 5.3 or newer",
        )  # fmt: skip
    if version < KERNEL_HUGE:
        return Finding(
            "kernel", Health.WEAK, f"Linux {release}",
            "huge pages for the arena come with Linux 6.1: with small ones copies of large prompts are slower",
            "use a kernel of 6.1 or newer where prompts are long",
        )  # fmt: skip
    return Finding("kernel", Health.GOOD, f"Linux {release}")


def compiled_copies(are_there: bool, are_checked: bool) -> Finding:
    """Check if this installation copies by compiled code. ``are_checked``: the sidecar's copies, too, which are
    checksummed in the same pass."""
    if are_there and are_checked:
        return Finding("copies", Health.GOOD, "clients and sidecar of this installation copy by compiled code")
    if are_there:
        return Finding(
            "copies", Health.GOOD,
            "clients of this installation copy by compiled code, the sidecar by numpy: that code takes AVX2",
        )  # fmt: skip
    return Finding(
        "copies", Health.WEAK, "this installation copies by torch or numpy",
        "stores and fetches take about half as long again",
        "install a C compiler (gcc), then kvstore again; and unset KVSTORE_COPIES where it says plain",
    )  # fmt: skip


def open_files(loaded: LoadedSettings) -> Finding:
    """Check that this user may open as many descriptors as the settings need."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = SOFT_LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_LIMIT_MAX)
    try:
        check_needs({name: loaded.of_tenant(name) for name in loaded.settings.tenant_names}, limit, TIERS.needs)
    except InvalidRequest as error:
        return Finding(
            "open files", Health.BAD, error.message, "the service does not start with these settings",
            "LimitNOFILE=1048576 in its systemd unit, or ulimit -Hn; or change the setting that is named",
        )  # fmt: skip
    return Finding("open files", Health.GOOD, f"this user may open {limit:,}, and the settings need no more")


def memory(loaded: LoadedSettings) -> Finding:
    """Check that the arenas of all tenants fit this machine's memory, or its control group's limit."""
    settings = loaded.settings
    wanted = sum(loaded.of_tenant(name).arena.capacity_bytes for name in settings.tenant_names)
    limit = memory_limit_bytes()
    said = f"the arenas take {format_bytes(wanted)} of {format_bytes(limit)}"
    if wanted > limit:
        return Finding(
            "memory", Health.BAD, said, "the kernel ends the service when the arena fills",
            f"set arena.capacity_bytes, or a tenant's, so that all stay below {format_bytes(limit * 3 // 4)}",
        )  # fmt: skip
    if wanted > limit * 3 // 4:
        return Finding(
            "memory", Health.WEAK, said, "engines beside the service may have too little when the arena is full",
            f"set arena.capacity_bytes so that all stay below {format_bytes(limit * 3 // 4)}",
        )  # fmt: skip
    return Finding("memory", Health.GOOD, said)


def clock(now_s: float) -> Finding:
    """Check that the wall clock is plausible. No guarantee depends on it, but ages and certificates do."""
    said = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds")
    if now_s < EARLIEST_S:
        return Finding(
            "clock", Health.BAD, said, "certificates seem not valid yet, S3 refuses calls, ages are wrong",
            "set the clock: timedatectl set-ntp true",
        )  # fmt: skip
    return Finding("clock", Health.GOOD, said)


def certificates(settings: Settings, now_s: float) -> Iterator[Finding]:
    """Check the validity of all certificates that the settings name."""
    redis = settings.tiers.redis
    named = {
        "remote.certificate_file": settings.remote.certificate_file, "remote.client_ca_file":
        settings.remote.client_ca_file, "tiers.redis.ca_file": redis.ca_file,
        "tiers.redis.certificate_file": redis.certificate_file, "tiers.s3.ca_file": settings.tiers.s3.ca_file,
    }  # fmt: skip
    for setting, name in named.items():
        if name:
            yield certificate(setting, name, now_s)


def certificate(setting: str, name: str, now_s: float) -> Finding:
    """Check the validity of a file's first certificate."""
    remedy = f"renew it, put the new one into {name}, and start the service again"
    why = "connections that need it are refused"
    try:
        begins_s, ends_s = validity_of(Path(name).expanduser().read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        return Finding(setting, Health.BAD, f"{name} cannot be read as a certificate: {error}", why, remedy)
    said = f"{name} is valid until {datetime.fromtimestamp(ends_s, UTC):%Y-%m-%d %H:%M} UTC"
    if now_s >= ends_s:
        return Finding(setting, Health.BAD, f"{name} ended {datetime.fromtimestamp(ends_s, UTC):%Y-%m-%d}", why, remedy)
    if now_s < begins_s:
        return Finding(setting, Health.BAD, f"{name} is not valid yet", why, "set the clock, or wait")
    if ends_s - now_s < EXPIRY_WARNING_S:
        return Finding(setting, Health.WEAK, said, f"soon {why}", remedy)
    return Finding(setting, Health.GOOD, said)


def validity_of(text: str) -> tuple[float, float]:
    """Return the begin and the end of the first certificate of a PEM text, in seconds since 1970. Raises ValueError.

    Source: RFC 5280, 4.1: Certificate = SEQUENCE of tbsCertificate = SEQUENCE of [0] version, serialNumber, signature,
    issuer, validity = SEQUENCE of two times.
    """
    mark, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start = text.find(mark)
    stop = text.find(end, start)
    if start < 0 or stop < 0:
        raise ValueError("it is no PEM certificate")
    data = ssl.PEM_cert_to_DER_cert(text[start : stop + len(end)])
    _, body, _ = _element(data, 0)
    _, place, _ = _element(data, body)
    tag, inside, after = _element(data, place)
    if tag == 0xA0:  # a version
        _, inside, after = _element(data, after)
    for _ in range(3):  # behind the serial number: signature, issuer, validity
        _, inside, after = _element(data, after)
    first_tag, first, second_at = _element(data, inside)
    second_tag, second, behind = _element(data, second_at)
    return _time(first_tag, data[first:second_at]), _time(second_tag, data[second:behind])


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at ``at``, the start of its content, and its end. Raises ValueError."""
    if at + 2 > len(data):
        raise ValueError("it ends too early")
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length, start = int.from_bytes(data[start : start + count], "big"), start + count
    if count_beyond := start + length - len(data):
        if count_beyond > 0:
            raise ValueError("it ends too early")
    return tag, start, start + length


def _time(tag: int, text: bytes) -> float:
    if tag not in (_UTC_TIME, _GENERAL_TIME):
        raise ValueError("its times cannot be read")
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # the year has two digits; from 50 on they mean 1950 to 1999
        digits = ("19" if digits >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
