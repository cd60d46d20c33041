"""What Kubernetes puts into every container of a namespace is no misspelt setting; all else that is unknown is."""

import pytest

from headrace.errors import ConfigError
from headrace.settings import Settings, describe, load

OF_HEADRACE = {
    "HEADRACE_SERVICE_HOST": "10.0.0.11",
    "HEADRACE_SERVICE_PORT": "4222",
    "HEADRACE_SERVICE_PORT_CLIENT": "4222",
    "HEADRACE_PORT": "tcp://10.0.0.11:4222",
    "HEADRACE_PORT_4222_TCP": "tcp://10.0.0.11:4222",
    "HEADRACE_PORT_4222_TCP_PROTO": "tcp",
    "HEADRACE_PORT_4222_TCP_PORT": "4222",
    "HEADRACE_PORT_4222_TCP_ADDR": "10.0.0.11",
}
"""What a kubelet writes for a Service `headrace` with a port called `client`."""


def of(service: str, number: int = 4222, address: str = "10.0.0.11", protocol: str = "tcp") -> dict[str, str]:
    def renamed(text: str) -> str:
        shown = f"[{address}]" if ":" in address and "://" in text else address
        return text.replace("4222", str(number)).replace("10.0.0.11", shown).replace("tcp", protocol)

    name = "HEADRACE_" + service.upper().replace("-", "_")
    return {
        renamed(key.replace("TCP", protocol.upper())).replace("HEADRACE", name): renamed(value)
        for key, value in OF_HEADRACE.items()
    }


@pytest.mark.parametrize(
    "links",
    [
        OF_HEADRACE,
        of("gateway", 80),
        of("gateway-http", 8080, "fd00::1"),
        of("monitor", 8081),
        of("http", 65_535),
        of("broker", 1, protocol="udp"),
        of("service"),
        of("a-port-1-tcp", 9, "::1", protocol="sctp"),
    ],
)
def test_what_kubernetes_writes_is_ignored(links: dict[str, str]) -> None:
    assert load(environ=links) == Settings()
    assert load(environ={**links, "HEADRACE_QUEUE_LIMIT": "5"}).queue_limit == 5


def test_each_of_them_is_ignored_alone_unless_it_has_the_name_of_a_setting() -> None:
    settings = {variable for variable, _, _ in describe()}
    for service in ("gateway", "router-2", "monitor"):
        for variable, text in of(service).items():
            if variable not in settings:
                assert load(environ={variable: text}) == Settings()
    with pytest.raises(
        ConfigError, match=r"^HEADRACE_MONITOR_PORT is 'tcp://10\.0\.0\.11:4222'; allowed: a whole number"
    ):
        load(environ={"HEADRACE_MONITOR_PORT": "tcp://10.0.0.11:4222"})


def test_a_setting_is_heard_beside_links() -> None:
    links = {**of("http"), **of("monitor"), **of("broker")}
    ports = {"HEADRACE_HTTP_PORT": "9000", "HEADRACE_MONITOR_PORT": "9001", "HEADRACE_BROKER_PORT": "9002"}
    told = load(environ={**links, **ports})
    assert (told.http_port, told.monitor_port, told.broker_port) == (9000, 9001, 9002)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HEADRACE_PORT", "8080"),
        ("HEADRACE_PORT", "tcp://broker:4222"),
        ("HEADRACE_PORT", "tcp://10.0.0.11"),
        ("HEADRACE_PORT", "tcp://10.0.0.11:0"),
        ("HEADRACE_PORT", "http://10.0.0.11:80"),
        ("HEADRACE_PORT", "tcp://"),
        ("HEADRACE_HTP_PORT", "8080"),
        ("HEADRACE_GATEWAY_SERVICE_HOST", "gateway.example"),
        ("HEADRACE_GATEWAY_SERVICE_PORT", "70000"),
        ("HEADRACE_GATEWAY_SERVICE_PORT", "٣"),
        ("HEADRACE_GATEWAY_SERVICE_HOSTS", "10.0.0.11"),
        ("HEADRACE_GATEWAY_PORT_80_TCP_PROTO", "80"),
        ("HEADRACE_GATEWAY_PORT_80_TCP_ADDR", "80"),
        ("HEADRACE_GATEWAY_PORT_80_TCP_NAME", "tcp"),
        ("HEADRACE__SERVICE_HOST", "10.0.0.11"),
        ("HEADRACE_SERVICE_HOST_", "10.0.0.11"),
        ("HEADRACE_SERVICE", "10.0.0.11"),
    ],
)
def test_what_it_does_not_write_is_still_named(variable: str, text: str) -> None:  # OPS-2
    with pytest.raises(ConfigError, match=f"^unknown variable {variable}; "):
        load(environ={**of("gateway"), variable: text})
