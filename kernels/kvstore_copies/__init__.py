"""Copies of many alike blocks of memory in one call of compiled code, which lets other threads run.

torch and numpy copy one tensor at a time: a view of each costs more than 100 KB of bytes, and rows of 32 KiB come at
half of what memcpy moves. A thread of the compiled code's own helps the caller's. Needs a C compiler when it is
installed; without one ``batch_of`` returns None, and callers copy by torch or numpy. ``copy_checked`` also digests what
it writes, and ``digests_of`` what lies there; they and their seeds take a processor with AVX2, and return None
elsewhere. ``alike_columns`` tells where many tensors lie. ``KVSTORE_COPIES=plain`` in the environment does as no
compiler.
"""

from kvstore_copies.batch import HELPED_BYTES, Batch, Blocks, address_of, batch_of, is_compiled
from kvstore_copies.checked import copy_checked, digests_of, is_checked_compiled, keyed_words
from kvstore_copies.tensors import Alike, Questions, alike_columns

__all__ = [
    "HELPED_BYTES",
    "Alike",
    "Batch",
    "Blocks",
    "Questions",
    "address_of",
    "alike_columns",
    "batch_of",
    "copy_checked",
    "digests_of",
    "is_checked_compiled",
    "is_compiled",
    "keyed_words",
]
