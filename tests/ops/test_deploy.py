"""Files of ops/deploy: what they name exists in the service, and they fit each other and its settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvstore_ops.pages.metrics import all_counters
from kvstore_ops.sidecar import Sidecar

from kvstore.config import LoadedSettings, load
from kvstore.server.app import DETACH_TIMEOUT_S
from kvstore.server.metrics import metric_rows
from kvstore.server.web.listener import ANSWER_S_MAX
from kvstore.server.web.site import gate_of
from kvstore.units import is_loopback, parse_bytes
from tests.conftest import ROOT
from tests.fakes.redis_server import RedisServer
from tests.ops.test_commands import kvstore
from tests.server.test_web import ask, port_of

PLACE = ROOT / "ops" / "deploy"
ROWS = {row.name: row for row in metric_rows(all_counters().descriptions)}
NAME = re.compile(r"\bkvstore_\w+")


def settings(environment: dict[str, str], text: str, place: Path) -> LoadedSettings:
    """As a service has them with this environment and this file."""
    file = place / "kvstore.toml"
    file.write_text(text)
    return load(file, environment, {})


# ---------------------------------------------------------------- metrics


def expressions() -> Iterator[tuple[str, str]]:
    """Where each query stands, and the query."""
    for group in yaml.safe_load((PLACE / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
            assert rule["annotations"].keys() == {"summary", "remedy"}
            yield rule["alert"], rule["expr"]
    board = json.loads((PLACE / "grafana.json").read_text())
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in board["panels"]]
    assert len(set(places)) == len({each["id"] for each in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def test_a_service_exposes_the_metrics_of_the_page_and_no_other(tmp_path: Path) -> None:
    with RedisServer() as redis:
        environment = {**os.environ, "KVSTORE__TIERS__REDIS__URL": redis.url}
        with Sidecar("--capacity", "16 MiB", "--metrics-port", "0", nvme="32 MiB", environment=environment) as sidecar:
            text = ask(port_of(sidecar), "/metrics")[2]
    exposed = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    exposed = {name for name in exposed if not name.endswith("_created")}
    assert exposed == {name for name in ROWS if not name.startswith("kvstore_s3_")}
    for name, said in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        if name in ROWS:
            assert ROWS[name].description == said


@pytest.mark.parametrize(("title", "query"), list(expressions()))
def test_queries_ask_for_metrics_that_there_are(title: str, query: str) -> None:
    named = NAME.findall(query)
    assert named or query.startswith("up{")
    assert set(named) <= ROWS.keys()
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")
    for function, name in re.findall(r"(\w+)\((kvstore_\w+)", query):
        kinds = {"rate": "counter", "increase": "counter", "deriv": "gauge", "min_over_time": "gauge", "sum": "gauge"}
        assert function == "label_values" or ROWS[name].kind == kinds[function], query
    if "tier)" in query or "$labels.tier" in query:
        assert all(ROWS[name].labels == "tier" for name in named)


PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: apt-get install prometheus")
FIRES: dict[str, tuple[dict[str, str], str, str]] = {
    "KVStoreDown": ({"up": "1 0x9"}, "5m", 'job="kvstore"'),
    "KVStoreTierDown": ({"kvstore_tier_up": "1 0x9"}, "5m", 'tier="nvme"'),
    "KVStoreDamage": ({"kvstore_quarantined_chunks_total": "0 0 1x9"}, "5m", ""),
    "KVStoreCanaryFails": ({"kvstore_canary_failures_total": "0 0 1x9"}, "5m", ""),
    "KVStoreWritesRefused": ({"kvstore_nvme_refused_chunks_total": "0+9x60"}, "40m", ""),
    "KVStoreBacklogGrows": ({"kvstore_backlog_chunks": "2000+10x30"}, "20m", ""),
    "KVStoreStoresRefused": ({"kvstore_store_refused_chunks_total": "0+9x60"}, "40m", ""),
    "KVStoreLeasesRevoked": ({"kvstore_leases_revoked_total": "0 0 1x30"}, "20m", ""),
    "KVStoreSharedTierLate": ({"kvstore_redis_late_answers_total": "0+600x60"}, "40m", ""),
    "KVStoreCallsFail": ({"kvstore_requests_failed_total": "0+600x60"}, "40m", ""),
}
"""Series in which each alert fires, a value a minute; when; and the labels that they have beside the instance."""
WELL = {name: "0x60" for series, _, _ in FIRES.values() for name in series} | {"up": "1x60", "kvstore_tier_up": "1x60"}


def series_of(values: dict[str, str], labels: str) -> list[dict[str, str]]:
    inside = ", ".join(each for each in ('instance="n"', labels) if each)
    return [{"series": f"{name}{{{inside}}}", "values": said} for name, said in values.items()]


def rule_test(alert: str, rules: dict[str, Any]) -> dict[str, Any]:
    """One alert and what it says, in promtool's form."""
    values, when, labels = FIRES[alert]
    rule = rules[alert]
    said = dict(re.findall(r'(\w+)="(\w+)"', labels)) | {"instance": "n"}
    wanted = {
        name: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: said[found[1]], text)
        for name, text in rule["annotations"].items()
    }
    fired = {"exp_labels": {**said, **rule["labels"]}, "exp_annotations": wanted}
    return {
        "interval": "1m", "input_series": series_of(values, labels),
        "alert_rule_test": [{"eval_time": when, "alertname": alert, "exp_alerts": [fired]}],
    }  # fmt: skip


def rules_by_alert() -> dict[str, Any]:
    groups = yaml.safe_load((PLACE / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_every_alert_has_series_in_which_it_fires() -> None:
    assert FIRES.keys() == rules_by_alert().keys()


@needs_promtool
def test_each_alert_fires_when_it_should_and_none_where_all_is_well(tmp_path: Path) -> None:
    rules = rules_by_alert()
    calm = {
        "interval": "1m", "input_series": series_of(WELL, 'job="kvstore", tier="nvme"'),
        "alert_rule_test": [{"eval_time": "50m", "alertname": alert, "exp_alerts": []} for alert in rules],
    }  # fmt: skip
    tests = [calm, *(rule_test(alert, rules) for alert in rules)]
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(PLACE / "alerts.yaml")], "tests": tests}))
    for command in (["check", "rules", str(PLACE / "alerts.yaml")], ["test", "rules", str(file)]):
        done = subprocess.run([PROMTOOL or "", *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_reads_what_a_service_exposes(sidecar: Sidecar) -> None:
    text = ask(port_of(sidecar), "/metrics")[2]
    command = [PROMTOOL or "", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 3), done.stderr  # 3: it would name something otherwise
    assert "error" not in done.stderr.lower(), done.stderr


def test_every_metric_has_a_unit_that_its_name_says() -> None:
    for name, row in ROWS.items():
        assert row.unit == "number" or f"_{row.unit}" in name
        assert (row.kind == "counter") == name.endswith("_total")
        assert row.description


# ---------------------------------------------------------------- systemd


def unit() -> dict[str, list[str]]:
    """Each key's values, in order."""
    found: dict[str, list[str]] = {}
    for line in (PLACE / "kvstore.service").read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_fits_the_settings(tmp_path: Path) -> None:
    found = unit()
    environment = dict(each.split("=", 1) for each in found["Environment"])
    server = settings(environment, "", tmp_path).settings.server
    assert str(server.state_directory) == f"/var/lib/{found['StateDirectory'][0]}"
    assert str(server.socket_directory) == f"/run/{found['RuntimeDirectory'][0]}"
    assert found["RuntimeDirectoryMode"] == ["0700"]
    assert int(found["TimeoutStopSec"][0]) > 2 * server.shutdown_grace_s + DETACH_TIMEOUT_S
    assert shlex.split(found["ExecStart"][0])[1:3] == ["serve", "--config"]
    assert shlex.split(found["ExecReload"][0])[1:] == ["reload", "--socket", f"{server.socket_directory}/kvstore.sock"]
    assert found["LimitMEMLOCK"] == ["infinity"], "as the doctor has it"


def test_the_units_reload_is_a_command_that_a_sidecar_answers(sidecar: Sidecar) -> None:
    command = shlex.split(unit()["ExecReload"][0])[1:-1]
    done = kvstore(*command, sidecar.socket_address.removeprefix("unix://"))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    text = (PLACE / "kvstore.service").read_text()
    program = str(Path(sys.executable).with_name("kvstore"))
    copy = tmp_path / "kvstore.service"
    copy.write_text(text.replace("/opt/kvstore/bin/kvstore", program).replace("=kvstore\n", "=root\n"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "kvstore.service" in line]
    assert (done.returncode, said) == (0, [])


# ---------------------------------------------------------------- containers


def test_the_container_file_copies_what_there_is_and_sets_what_is_known(tmp_path: Path) -> None:
    text = (PLACE / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in lines} == known
    for word, rest in lines:
        if word == "COPY" and "--from" not in rest:
            assert all((ROOT / each).exists() for each in rest.split()[:-1])
    environment = dict(each.split("=", 1) for word, rest in lines if word == "ENV" for each in rest.split())
    found = settings({name: value for name, value in environment.items() if name != "PATH"}, "", tmp_path)
    for directory in (found.settings.server.state_directory, found.settings.server.socket_directory):
        assert f" {directory}" in text  # it is made, for the user alone
    assert (
        f"{found.settings.server.metrics_host}:{found.settings.server.metrics_port}" in text
    )  # where it says they are
    command = [*json.loads(dict(lines)["ENTRYPOINT"]), *json.loads(dict(lines)["CMD"])]
    assert command == ["kvstore", "serve"]
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["where"]
    copied = {part for word, rest in lines if word == "COPY" for part in rest.split()[:-1]}
    assert {"kvstore" if each == "." else each for each in packages} <= copied


def manifest() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]:
    """The pod, its sidecar, its engine, and the sidecar's file of settings."""
    config, deployment = yaml.safe_load_all((PLACE / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    return pod, sidecar, engine, config["data"]["kvstore.toml"]


def test_the_pods_probes_reach_paths_that_there_are(tmp_path: Path, sidecar: Sidecar) -> None:
    pod, beside, _, text = manifest()
    loaded = settings({}, text, tmp_path)
    ports = {each["name"]: each["containerPort"] for each in beside["ports"]}
    assert not is_loopback(loaded.settings.server.metrics_host)  # probes come from the node
    gate_of(loaded)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = beside[name]["httpGet"]
        assert ports[asked["port"]] == loaded.settings.server.metrics_port
        assert ask(port_of(sidecar), asked["path"])[0] == 200
        assert name == "startupProbe" or beside[name]["timeoutSeconds"] > ANSWER_S_MAX
    assert pod["terminationGracePeriodSeconds"] > 2 * loaded.settings.server.shutdown_grace_s + DETACH_TIMEOUT_S
    assert beside["restartPolicy"] == "Always"


def test_the_pods_memory_and_places_fit_the_settings(tmp_path: Path) -> None:
    pod, sidecar, engine, text = manifest()
    found = settings({}, text, tmp_path).settings
    needed = found.arena.capacity_bytes + found.limits.staging_bytes_total_max + (1 << 30)
    limit = parse_bytes(sidecar["resources"]["limits"]["memory"].replace("Gi", " GiB"))
    assert limit >= needed
    assert sidecar["resources"]["requests"]["memory"] == sidecar["resources"]["limits"]["memory"]
    mounts = {each["mountPath"]: each["name"] for each in sidecar["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert set(mounts.values()) <= volumes.keys()
    # The server makes the directory of its sockets in the volume itself, so that it is the user's own, with mode 0700.
    assert mounts[str(found.server.socket_directory.parent)] == "run"
    assert mounts[str(found.server.state_directory)] == "state"
    assert found.tiers.nvme.directory.is_relative_to(found.server.state_directory)
    assert sidecar["args"] == ["serve", "--config", f"{Path('/etc/kvstore')}/kvstore.toml"]
    assert pod["securityContext"]["runAsUser"] > 0
    theirs = {each["mountPath"]: each["name"] for each in engine["volumeMounts"]}
    assert theirs[str(found.server.socket_directory.parent)] == "run"
    socket = next(each["value"] for each in engine["env"] if each["name"] == "KVSTORE_SOCKET")
    assert socket == str(found.server.socket_directory / "kvstore.sock")
    own = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    page = re.search(r"CONFIG='(\{.*?\})'", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL)
    assert page is not None
    assert own == json.loads(page[1])
