"""Files of ops/deploy: what they name exists in the service, and they fit each other and its settings."""

from __future__ import annotations

import json
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
        environment = {"KVSTORE__TIERS__REDIS__URL": redis.url}
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
