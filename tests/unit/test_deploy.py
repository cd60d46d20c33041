"""What is deployed, looked at without a container engine: the compose file by its schema and its brokers, the units."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

import headrace
from headrace import settings
from headrace.bus.server import find_nats_server

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
FOREIGN = {"vllm", "collector"}


def resolved(value: str, **given: str) -> str:
    """As compose makes it: every `${NAME:-default}` by what is given or its default, and `$$` one dollar."""
    filled = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: given.get(match[1], match[2]), value)
    return filled.replace("$$", "$")


def compose_schema() -> dict[str, Any]:
    spec = importlib.util.find_spec("check_jsonschema")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "builtin_schemas/vendor/compose-spec.json"
    schema: dict[str, Any] = json.loads(file.read_text())
    return schema


def test_the_compose_file_is_one_by_the_specifications_schema() -> None:
    validator = jsonschema_rs.validator_for(compose_schema())
    assert [f"{list(error.instance_path)}: {error.message}" for error in validator.iter_errors(COMPOSE)] == []
    assert not validator.is_valid({**COMPOSE, "services": {"router": {"imagee": "x"}}}), "it would see a slip"


def test_it_has_the_parts_in_the_numbers_that_survive_one() -> None:
    own = {name: service for name, service in SERVICES.items() if name not in FOREIGN}
    assert {name for name in own if name.startswith("broker-")} == {"broker-1", "broker-2", "broker-3"}
    assert {name: service["deploy"]["replicas"] for name, service in own.items() if "deploy" in service} == {
        "router": 2, "monitor": 2,
    }  # fmt: skip
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
        "worker": ["cpu"], "worker-gpu": ["gpu"], "vllm": ["gpu"],
    }  # fmt: skip
    assert {service["image"] for service in own.values()} == {f"headrace:{headrace.__version__}"}, "one image for all"
    assert all(service["security_opt"] == ["no-new-privileges:true"] for service in own.values())


def test_containers_wait_for_what_exists_and_use_what_is_declared() -> None:
    for service in SERVICES.values():
        waits = service.get("depends_on", {})
        assert set(waits) <= set(SERVICES)
        for name, wait in waits.items():
            assert wait["condition"] != "service_healthy" or "healthcheck" in SERVICES[name]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
        for config in service.get("configs", []):
            assert config["source"] in COMPOSE["configs"]
    assert SERVICES["provision"]["depends_on"].keys() == {"broker-1", "broker-2", "broker-3"}


def test_ports_are_published_on_loopback_alone_and_enough_for_every_replica() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", []):
            host, first, *_ = re.split("[:-]", port)
            assert host == "127.0.0.1"
            last = re.match(r"[\d.]+:\d+-(\d+):", port)
            number = int(last[1]) - int(first) + 1 if last else 1
            assert number >= service.get("deploy", {}).get("replicas", 1)


def test_containers_settings_are_known_and_allowed() -> None:
    for name, service in SERVICES.items():
        environ = {key: resolved(value) for key, value in service.get("environment", {}).items()}
        read = settings.load(environ=environ)
        if name not in FOREIGN and not name.startswith("broker-"):
            assert (read.nats_url, read.replicas) == ("nats://broker:4222", 3)


@pytest.mark.parametrize("password", ["change-me", "aB9-x.y_z"])
def test_nats_server_accepts_the_brokers_configuration(password: str, tmp_path: Path) -> None:
    given = {"BROKER_SYSTEM_PASSWORD": password, "BROKER_ROUTE_PASSWORD": password}
    content = resolved(COMPOSE["configs"]["broker"]["content"], **given).replace("/var/lib/headrace", str(tmp_path))
    (tmp_path / "nats.conf").write_text(content)
    result = subprocess.run(
        [str(find_nats_server()), "-t", "-c", "nats.conf"], check=False, cwd=tmp_path, capture_output=True, text=True,
        env={"BROKER_NAME": "broker-1"}, timeout=30,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_the_collectors_configuration_has_what_its_pipelines_name() -> None:
    config = yaml.safe_load(resolved(COMPOSE["configs"]["collector"]["content"]))
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])
    port = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    assert SERVICES["router"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://collector:{port}"


@pytest.mark.parametrize("name", [name for name in SERVICES if SERVICES[name]["command"][:1] == ["serve"]])
def test_every_command_is_one_of_headraces(name: str) -> None:
    check_command([resolved(word) for word in SERVICES[name]["command"]])


def check_command(words: list[str]) -> None:
    """Whether `headrace` knows the command and each of its options."""
    help_text = subprocess.run(
        [sys.executable, "-m", "headrace.cli", *words[:2], "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", help_text))


def environment_of(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_there_is_a_unit_for_every_part_and_each_starts_it() -> None:
    starts = {
        unit.name: re.findall(r"^ExecStart=/opt/headrace/bin/(.+)$", unit.read_text(), re.MULTILINE) for unit in UNITS
    }
    assert starts == {
        "headrace-broker.service": ["nats-server -c /etc/headrace/nats-server.conf"],
        "headrace-gateway.service": ["headrace serve gateway"],
        "headrace-host.service": ["headrace serve host"],
        "headrace-monitor.service": ["headrace serve monitor"],
        "headrace-router.service": ["headrace serve router"],
        "headrace-worker@.service": ["headrace serve worker $WORKER_ARGS"],
    }
    worker = environment_of(ROOT / "deploy/systemd/worker.env")
    check_command(["serve", "worker", *worker["WORKER_ARGS"].split()])
    settings.load(environ={**worker, **environment_of(ROOT / "deploy/systemd/headrace.env")})


def test_a_part_is_given_longer_to_stop_than_it_takes() -> None:
    grace_s = settings.Settings(state_dir="s").grace_s
    for unit in UNITS:
        stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)[0])
        if any(part in unit.name for part in ("worker", "gateway", "host")):
            assert stop_s > grace_s
    for name in ("worker", "worker-gpu", "gateway"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > grace_s


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze here to check units with")
    commands = Path(sys.executable).parent
    text = unit.read_text().replace("/opt/headrace/bin", str(commands))
    copy = tmp_path / unit.name.replace("@.", "@one.")
    copy.write_text(text)
    (tmp_path / unit.name).write_text(text)
    result = subprocess.run(
        [tool, "verify", "--man=no", str(copy)], check=False, capture_output=True, text=True, timeout=30
    )
    problems = [line for line in result.stderr.splitlines() if unit.name.partition(".")[0].rstrip("@") in line]
    assert problems == []
