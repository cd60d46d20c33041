"""What a host lends, how its workers are started, and what is made of how they end."""

import pytest
from click.testing import CliRunner

from headrace.cli.app import command
from headrace.errors import EngineStartError
from headrace.hardware.gpu import Gpu
from headrace.hardware.memory import Memory
from headrace.host.devices import find_devices
from headrace.host.launching import Order, command_of, environment_of
from headrace.host.naming import earlier_workers, worker_id
from headrace.schemas.instances import Device
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.subjects import is_worker_id
from headrace.settings import Settings

GIB = 1 << 30


def gpu(uuid: str, *, is_unified: bool = False, is_split: bool = False, error: str = "") -> Gpu:
    return Gpu(
        uuid=uuid, number=0, name="n", total_bytes=8 * GIB, is_unified=is_unified, is_split=is_split, error=error
    )


def found(*gpus: Gpu, memory_bytes: int | None = None, total_gib: int = 16, **environ: str) -> tuple[Device, ...]:
    return find_devices(
        memory_bytes,
        gpus=lambda: list(gpus),
        visible=lambda: environ["CUDA_VISIBLE_DEVICES"].split(","),
        memory=lambda: Memory(total_bytes=total_gib * GIB, free_bytes=GIB, source="system"),
        environ=environ,
    )


def test_a_host_lends_its_gpus_and_all_of_its_memory_but_a_reserve() -> None:
    assert found(gpu("GPU-a"), gpu("GPU-b")) == (
        Device(name="GPU-a", kind="gpu", total_bytes=8 * GIB),
        Device(name="GPU-b", kind="gpu", total_bytes=8 * GIB),
        Device(name="host", kind="host", total_bytes=14 * GIB),
    )
    assert found(total_gib=4) == (Device(name="host", kind="host", total_bytes=3 * GIB),)
    assert found(memory_bytes=GIB) == (Device(name="host", kind="host", total_bytes=GIB),)
    assert found(memory_bytes=0) == ()


def test_lost_and_split_cards_are_left_out_and_only_shown_ones_are_lent() -> None:
    gpus = (gpu("GPU-a", error="lost"), gpu("GPU-b", is_split=True), gpu("MIG-1"), gpu("MIG-2"))
    assert [device.name for device in found(*gpus)] == ["MIG-1", "MIG-2", "host"]
    assert [device.name for device in found(*gpus, CUDA_VISIBLE_DEVICES="MIG-2")] == ["MIG-2", "host"]


def test_memory_that_gpu_and_machine_share_is_lent_once() -> None:
    assert [device.name for device in found(gpu("GPU-a", is_unified=True))] == ["GPU-a"]
    shared = found(gpu("GPU-a", is_unified=True), memory_bytes=2 * GIB)
    assert [device.name for device in shared] == ["GPU-a", "host"]


def test_without_a_driver_there_is_no_gpu() -> None:
    def none() -> list[Gpu]:
        raise EngineStartError("no driver")

    assert find_devices(GIB, gpus=none) == (Device(name="host", kind="host", total_bytes=GIB),)


def test_memory_that_the_machine_does_not_have_is_lent_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found(memory_bytes=16 * GIB)
    assert not caplog.records
    assert found(memory_bytes=17 * GIB) == (Device(name="host", kind="host", total_bytes=17 * GIB),)
    assert "17408 MiB are lent of a machine that has 16384 MiB" in caplog.text


def order(uses: str) -> Order:
    group = ReplicaGroup(
        engine="sim", pool="gold", args=("-o", "seed=1", "--model", "other"), uses="gpu" if uses == "gpu" else "host"
    )
    return Order(worker="h-1-1", model="org/m-1", group=group, device="GPU-a" if uses == "gpu" else "host")


def test_the_agents_own_flags_come_last() -> None:
    words = command_of(order("gpu"), log_format="json")
    assert words[words.index("serve") :] == [
        "serve", "worker", "-o", "seed=1", "--model", "other",
        "--engine", "sim", "--model=org/m-1", "--pool=gold", "--worker-id=h-1-1", "--log-format", "json",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["--nats-url=nats://elsewhere:1", "--nats-url", "--prefix=q", "--state-dir"])
def test_no_worker_is_led_to_another_broker_with_our_credential(word: str) -> None:
    group = ReplicaGroup(engine="sim", args=(word, "nats://elsewhere:1"))
    with pytest.raises(ValueError, match=word.partition("=")[0]):
        command_of(Order(worker="h-1-1", model="m", group=group, device="GPU-a"), log_format="json")


@pytest.mark.parametrize(("uses", "visible"), [("gpu", "GPU-a"), ("host", "")])
def test_a_worker_sees_its_gpu_alone_and_this_deployment(uses: str, visible: str) -> None:
    settings = Settings(prefix="p.v1", state_dir="s", nats_credentials="c")
    inherited = {"PATH": "x", "HEADRACE_WORKER_ID": "w", "CUDA_VISIBLE_DEVICES": "0,1", "HEADRACE_PREFIX": "q"}
    environ = environment_of(order(uses), "nats://h:1", settings, inherited=inherited)
    assert environ == {
        "PATH": "x",
        "HEADRACE_NATS_URL": "nats://h:1",
        "HEADRACE_PREFIX": "p.v1",
        "HEADRACE_STATE_DIR": "s",
        "HEADRACE_LOG_LEVEL": "info",
        "HEADRACE_NATS_CREDENTIALS": "c",
        "CUDA_VISIBLE_DEVICES": visible,
    }


@pytest.mark.parametrize(
    ("words", "says"), [(["--host-id", "a b"], "--host-id is 'a b'"), (["--memory", "8 GB"], "'8 GB': expected")]
)
def test_wrong_options_are_told_before_anything_is_connected_to(words: list[str], says: str) -> None:
    result = CliRunner().invoke(command, ["--nats-url", "nats://127.0.0.1:1", "serve", "host", *words])
    assert result.exit_code == 2
    assert says in result.output


def test_hosts_whose_long_names_begin_alike_do_not_wait_for_each_others_workers() -> None:
    first, second = (f"node-of-the-gpu-pool-in-eu-west-1a-number-{number}-of-{'x' * 18}" for number in (1, 2))
    names = [worker_id(host, "0badcafe", number) for host in (first, second, "a", "a-0badcafe") for number in (1, 2)]
    assert len(set(names)) == len(names)
    assert all(map(is_worker_id, names))
    assert earlier_workers(first, "12345678", names) == names[:2]
    assert earlier_workers("a", "12345678", names) == names[4:6]
    assert earlier_workers("a", "0badcafe", names) == []
