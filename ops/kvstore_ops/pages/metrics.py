"""docs/metrics.md: every metric with its unit, from the service's counters."""

from __future__ import annotations

from kvstore.server.metrics import metric_rows
from kvstore.telemetry import Counters

HEAD = """# Metrics

Made by `make docs` from the code. `http://127.0.0.1:9464/metrics` (`server.metrics_port`) has them all, in Prometheus'
form or OpenMetrics'. Where there are several tenants each sample has a label `tenant`, too. Counters count from the
start of the service. A tier's counters are there while the tier is in use. `ops/deploy` has a dashboard for Grafana and
alert rules.

| metric | kind | unit | labels | what it is |
|---|---|---|---|---|
"""


def all_counters() -> Counters:
    """Return the counters of a service that uses every tier."""
    counters = Counters()
    counters.add_tier("nvme")
    for name in ("redis", "s3"):
        counters.add_tier(name, is_shared=True)
    return counters


def render_metrics() -> str:
    """Return the page's text."""
    rows = metric_rows(all_counters().descriptions)
    return HEAD + "".join(
        f"| `{row.name}` | {row.kind} | {row.unit} | {row.labels} | {row.description} |\n" for row in rows
    )
