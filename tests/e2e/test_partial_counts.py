"""What prefetch and warm tell of a prompt's partial last chunk."""

from __future__ import annotations

from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import LayerSpec
from tests.e2e.stored import Stored, chunks_of
from tests.ops.command import Done, run


def test_a_partial_last_chunk_counts_the_bytes_that_it_takes() -> None:
    wide = (LayerSpec(kv_heads=2, k_dim=64, v_dim=64),) * 8
    with Sidecar("--capacity", "8 MiB", nvme="8 MiB") as hot, Sidecar("--capacity", "8 MiB") as other:

        def say(*arguments: str) -> Done:
            return run(*arguments, "--socket", hot.address.removeprefix("unix://"))

        with connect(hot.address) as client:
            stored = Stored(client, 2, tail=4, layers=wide)
            there = chunks_of(say, stored.name)
            (last,) = [digest for digest, each in there.items() if each["token_count"] == 4]
            whole = {"chunk_count": 3, "byte_count": sum(each["byte_count"] for each in there.values())}
            assert say("move", "--model", stored.name, "--to", "nvme", "--yes").code == 0
            for what in ("brought into memory", "in memory already"):
                for more in (["--dry-run"], []):
                    told = say("prefetch", "--digest", last, "--json", *more).json["outcomes"]
                    assert told == {what: whole}, more
            assert stored.hit_count == len(stored.tokens)
        warm = run("warm", "--from", hot.address, "--json", "--socket", other.address.removeprefix("unix://"))
        assert warm.json["outcomes"] == {"left out: model not registered here yet": whole}
