"""Checks of the kernel's services: huge pages, locked memory, the clock's source, GPUs."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore.seams.mapping import HUGE_BYTES, SharedMap
from kvstore.units import format_bytes
from kvstore_ops.doctor.finding import Finding, Health

NAME = "kvstore-doctor"
STA_UNSYNC = 0x40
_STATUS_AT = 40
"""Offset of ``status`` in the kernel's struct timex on 64-bit machines: modes, offset, freq, maxerror, esterror."""


def huge_pages() -> Finding:
    """Check that the kernel backs memory of the arena's kind with huge pages, by some of it."""
    return huge_pages_tell(_huge_kib())


def huge_pages_tell(kib: int) -> Finding:
    """Check what became of two huge pages. ``kib``: KiB of them that are backed by huge ones."""
    if kib:
        return Finding("huge pages", Health.GOOD, "the kernel makes them for shared memory")
    return Finding(
        "huge pages", Health.WEAK, "the kernel makes none for shared memory",
        "copies of long prompts are slower, and the arena takes long to be backed",
        "Linux 6.1 or newer, and echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled where it says deny",
    )  # fmt: skip


def _huge_kib() -> int:
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 2 * HUGE_BYTES)
        mapped = SharedMap(descriptor, 2 * HUGE_BYTES, writable=True)
        mapped.back(0, 2 * HUGE_BYTES)
        found = re.search(
            rf"memfd:{NAME}.*?ShmemPmdMapped:\s+(\d+) kB", Path("/proc/self/smaps").read_text(), re.DOTALL
        )  # fmt: skip
        mapped.close()
        return int(found[1]) if found else 0
    except (OSError, KVStoreError):
        return 0
    finally:
        os.close(descriptor)


def locked_memory(capacity_bytes: int, limit: int) -> Finding:
    """Check that engines may lock the arena's memory: what registers memory with a GPU or a network card locks it.
    ``limit``: of this user, in bytes."""
    if limit == resource.RLIM_INFINITY or limit >= capacity_bytes:
        return Finding("locked memory", Health.GOOD, "this user may lock the arena")
    return Finding(
        "locked memory", Health.WEAK, f"this user may lock {format_bytes(limit)} of {format_bytes(capacity_bytes)}",
        "an engine that registers the arena with its GPU or network card is refused, and copies once more",
        "LimitMEMLOCK=infinity in the units of service and engines, or ulimit -l unlimited",
    )  # fmt: skip


def is_synchronized() -> bool | None:
    """Return True when the kernel's clock follows a time source; None where the kernel does not say."""
    timex = ctypes.create_string_buffer(256)  # all zeros: modes 0 only reads
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return not int.from_bytes(timex.raw[_STATUS_AT : _STATUS_AT + 4], "little") & STA_UNSYNC


def time_source(is_synced: bool | None) -> Finding:
    """Check that the clock follows time servers."""
    if is_synced is None:
        return Finding("clock source", Health.UNSEEN, "the kernel does not say whether the clock follows time servers")
    if is_synced:
        return Finding("clock source", Health.GOOD, "the clock follows a time source")
    return Finding(
        "clock source", Health.WEAK, "the clock follows no time source",
        "it drifts: S3 refuses calls of clocks that are 15 minutes off, and nodes of a Redis misjudge who lives",
        "timedatectl set-ntp true, or start chrony; in a container: on its host",
    )  # fmt: skip


def accelerators(root: Path) -> Iterator[Finding]:
    """Tell whether there is a GPU, and GPUDirect Storage. The latter is not used. ``root``: of the file system."""
    version = root / "proc/driver/nvidia/version"
    gpus = sorted((root / "dev").glob("nvidia[0-9]*"))
    if gpus:
        said = version.read_text().splitlines()[0] if version.exists() else "no driver says its version"
        yield Finding("GPU", Health.GOOD, f"{len(gpus)} of NVIDIA; {said.strip()[:80]}")
    else:
        yield Finding("GPU", Health.UNSEEN, "there is none: engines here compute on CPUs, or elsewhere")
    if (root / "proc/driver/nvidia-fs").exists():
        yield Finding("GPUDirect Storage", Health.UNSEEN, "nvidia-fs is loaded; this release does not use it")
    else:
        yield Finding("GPUDirect Storage", Health.UNSEEN, "absent (no nvidia-fs); this release does not use it")
