"""``python -m kvstore_ops.pages [FILE ...]``: add results of ``kvstore bench --json``, and write the pages."""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore_ops.pages import benchmarks, page

try:
    for name in sys.argv[1:]:
        benchmarks.take_in(page.ROOT, Path(name))
    for path in page.write():
        print(f"wrote {path}")
except KVStoreError as error:
    sys.exit(error.message)
