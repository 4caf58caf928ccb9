"""Registers mapped memory with CUDA: nine times the rate of memory that CUDA does not know."""

from __future__ import annotations

import logging
import threading
from functools import partial
from weakref import WeakKeyDictionary

from kvstore.seams.mapping import Bytes, MappedPages, pages_of
from kvstore_client.cuda.runtime import REGISTER_PORTABLE, REGISTER_READ_ONLY, runtime

_log = logging.getLogger("kvstore.client")
_lock = threading.Lock()
_pinned: WeakKeyDictionary[MappedPages, bool] = WeakKeyDictionary()
"""The mappings that were tried, and whether CUDA took them."""


def pin(memory: Bytes) -> None:
    """Register the mapping that ``memory`` is a view of, once: it stays so until it is unmapped. Where CUDA refuses, or
    for other memory, nothing changes: copies are slower then, and as right."""
    pages = pages_of(memory)
    if pages is None or pages in _pinned:
        return
    with _lock:
        if pages not in _pinned:
            _pinned[pages] = _registered(pages)


def _registered(pages: MappedPages) -> bool:
    library = runtime()
    if library is None:
        return False
    if not pages.back():  # what is registered stays where it is: the kernel makes no huge pages of it any more
        return _refused(pages, "the machine has no memory left to back it with")
    # Before the addresses are given back: CUDA would go on with the pages that lay there. And before CUDA takes them:
    # that may take seconds, after which an interrupt would leave them registered for ever. For others it does nothing.
    pages.before_unmapping.append(partial(library.unregister, pages.address, library.gpu))
    flags = REGISTER_PORTABLE if pages.writable else REGISTER_PORTABLE | REGISTER_READ_ONLY
    reason = library.register(pages.address, pages.byte_count, flags)
    if reason:
        return _refused(pages, reason)
    return True


def _refused(pages: MappedPages, reason: str) -> bool:
    found = f"{pages.byte_count} bytes of the sidecar's memory cannot be copied by the GPU itself: {reason}"
    _log.warning("%s. The processor copies them, at a tenth of the rate", found)
    return False
