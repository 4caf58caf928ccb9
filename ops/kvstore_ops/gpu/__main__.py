"""``python -m kvstore_ops.gpu``: the GPU's tests and benchmarks, in one command that ends in time.

Exit status: 0 when every part ran to its end and no test failed, whatever the figures are, and on a machine without a
GPU, where nothing runs; 1 when a part failed or was cut; 2 for arguments that do not fit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore_ops.bench.origin import origin
from kvstore_ops.gpu.hardware import hardware, missing
from kvstore_ops.gpu.parts import PARTS, Part, chosen, outcomes
from kvstore_ops.gpu.process import Outcome
from kvstore_ops.gpu.report import show, write
from kvstore_ops.options import failed

BUDGET_S = 510.0
"""Nine minutes, less what the ends of parts and the table take."""


def main() -> int:
    """Run what was asked for. Returns the exit status."""
    began_s = time.monotonic()
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(prog="python -m kvstore_ops.gpu", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=f"one of {names}; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("kvstore-gpu.json"), help="where the results go")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts together")
    parser.add_argument("--scale", choices=("quick", "full", "tiny"), default="quick", help="of the benchmarks")
    parser.add_argument("--without-gpu", action="store_true", help="run all the same: proves the command, not a GPU")
    given = parser.parse_args()
    try:
        parts = chosen(given.only)
    except KVStoreError as error:
        return failed(error)
    found = hardware()
    lacks = missing(found)
    for name, untested in lacks.items():
        print(f"no {name}; untested: {untested}", flush=True)
    told = {**origin(given.scale), "hardware": found, "missing": lacks}
    if "GPU" in lacks and not given.without_gpu:
        write(given.json, told, [])
        print("no GPU: nothing ran")
        return 0
    return _run(parts, given, told, began_s + given.budget_s)


def _run(parts: tuple[Part, ...], given: argparse.Namespace, told: dict[str, object], until_s: float) -> int:
    done: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-gpu-") as place:
        for each in outcomes(parts, given.scale, Path(place), lambda: until_s - time.monotonic()):
            done.append(each)
            write(given.json, told, done)
            print(f"{each.name}: {each.state} after {each.seconds:.0f} s", flush=True)
    show(told, done)
    return 0 if all(each.state == "done" for each in done) else 1


if __name__ == "__main__":
    sys.exit(main())
