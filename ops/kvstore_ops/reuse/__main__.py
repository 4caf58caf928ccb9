"""``python -m kvstore_ops.reuse``: ask the pretrained model all prompts of the benchmark reuse, or go on with that."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore_ops.options import failed


def main() -> int:
    """Ask what has not been asked. Return 0 when nothing is left."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_ops.reuse", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--sibling", dest="asking", action="store_const", const="reuse-sibling",
        help="ask the sibling, over the pretrained model's caches",
    )  # fmt: skip
    which.add_argument(
        "--anew", dest="asking", action="store_const", const="reuse-anew",
        help="ask other prompts, with the rows that the benchmark's table led to",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="the run's file; default: in the user's cache directory")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--times", action="store_true", help="ask nothing: time the rows, and show what the file has")
    given = parser.parse_args()
    from kvstore_ops.reuse.settings import Asking
    from kvstore_ops.reuse.whole import Whole
    from kvstore_ops.testbed.trial import one_thread

    try:
        with one_thread():
            whole = Whole(Asking(given.asking or "reuse"), "full", path=given.out)
            if given.times:
                print(json.dumps(whole.table(asks=False).as_dict()))
            else:
                whole.ask(fresh=given.fresh)
    except KVStoreError as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
