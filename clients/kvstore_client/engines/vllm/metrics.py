"""vLLM's statistics of this connector: a line in its log now and then, and metrics at its /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore_client.engines.vllm.moved import COUNTS, TIMES, in_few_numbers, summed

PREFIX = "vllm:kvstore_"
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class MovedStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Carries what workers moved in an interval: ``data`` is as ``Moved.take`` returns it."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: MovedStats) -> MovedStats:
        return MovedStats(summed(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return in_few_numbers(self.data)

    def is_empty(self) -> bool:
        return not self.data


class MovedMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Adds the same to Prometheus metrics, by engine."""

    def __init__(self, config: Any, kinds: Any, label_names: list[str], label_values: dict[int, list[object]]) -> None:
        super().__init__(config, kinds, label_names, label_values)
        made = {
            count.name: kinds[Counter](name=PREFIX + count.name, documentation=count.words, labelnames=label_names)
            for count in COUNTS
        }
        made |= {
            each.name: kinds[Histogram](
                name=PREFIX + each.name, documentation=each.words, labelnames=label_names, buckets=BUCKETS_S
            )
            for each in TIMES
        }
        self._of_engine = {
            engine: {name: metric.labels(*values) for name, metric in made.items()}
            for engine, values in label_values.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        metrics = self._of_engine[engine_idx]
        for count in COUNTS:
            metrics[count.name].inc(transfer_stats_data.get(count.name, 0))
        for each in TIMES:
            for seconds in transfer_stats_data.get(each.name, ()):
                metrics[each.name].observe(seconds)
