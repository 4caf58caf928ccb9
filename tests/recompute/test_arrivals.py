"""The transfers of a plan's runs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.recompute.arrivals import Arrivals
from kvstore_client.recompute.sources import FetchedRun

from kvstore.planning import Plan, PlannedRun, StoredCache
from tests.specs import small_spec

DOCUMENTS = 50
COMPARED: list[None] = []


@dataclass(frozen=True, eq=False)
class Document(StoredCache):
    """A cache that counts with how many others it is compared."""

    def __eq__(self, other: object) -> bool:
        COMPARED.append(None)
        return self is other

    def __hash__(self) -> int:
        return self.token_start


def test_a_prompt_of_many_documents_looks_at_each_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document was compared with all others: of a thousand that took half a second."""
    runner: Any = SimpleNamespace(spec=small_spec(), device=None)
    arrivals = Arrivals(SimpleNamespace(), SimpleNamespace(runner=runner), 1.0)  # type: ignore[arg-type]  # stand-ins
    asked: list[StoredCache] = []

    def begun(cache: StoredCache, *_: object) -> Any:
        asked.append(cache)
        return SimpleNamespace(token_count=16)

    monkeypatch.setattr(arrivals, "_asked", begun)
    monkeypatch.setattr(FetchedRun, "follow", lambda *_: None)
    caches = [Document(16 * number, 16 * number + 16, is_standalone=True) for number in range(DOCUMENTS)]
    plan = Plan(16 * DOCUMENTS, tuple(PlannedRun(each.token_start, 16, (0, 1), each) for each in caches))
    runs, _ = arrivals.run(plan)
    assert len(runs) == len(asked) == DOCUMENTS
    assert len(COMPARED) <= DOCUMENTS
