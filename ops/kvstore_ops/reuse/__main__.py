"""``python -m kvstore_ops.reuse``: ask the pretrained model all prompts of the benchmark reuse, or go on with that."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore_ops.options import exit_code_of


def default_path() -> Path:
    """Return the file of the answers in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kvstore" / "reuse" / "answers.jsonl"


def main() -> int:
    """Ask what has not been asked. Return 0 when nothing is left."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_ops.reuse", description=__doc__)
    parser.add_argument("--out", type=Path, default=default_path(), help="the run's file; default: %(default)s")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    given = parser.parse_args()
    from kvstore_ops.reuse.answers import answered, run_file
    from kvstore_ops.reuse.settings import rounds_of
    from kvstore_ops.reuse.subject import Caches, Subject
    from kvstore_ops.testbed.trial import one_thread

    try:
        subject = Subject("full")
        rounds = rounds_of(subject.scale, subject.runner.spec.layer_count)
        with one_thread(), run_file(given.out, subject, rounds, fresh=given.fresh) as file:
            answered(subject, rounds, Caches(subject.runner), file)
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return exit_code_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
