"""What commands decide about the gateway: whether there is one, and on which port."""

import logging
import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from headrace.cli import http, up
from headrace.cli.app import command
from headrace.errors import ConfigError
from headrace.settings import Settings, load

HOST = "127.0.0.1"


@pytest.fixture
def busy() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server((HOST, 0)) as listening:
        yield listening.getsockname()[1]


def test_a_free_port_is_taken_as_it_is() -> None:
    port = http.free_port(HOST, 0)
    assert port is not None
    assert up._http_port(Settings(http_port=port)) == port


def test_a_port_that_was_chosen_must_be_free(busy: int) -> None:
    assert http.free_port(HOST, busy) is None
    with pytest.raises(ConfigError, match="HEADRACE_HTTP_PORT"):
        up._http_port(Settings(http_port=busy))


def test_another_port_is_taken_where_the_usual_one_is_in_use(
    busy: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = load({}, environ={})
    monkeypatch.setattr(up, "load", lambda *_, **__: Settings(state_dir=usual.state_dir, http_port=busy))
    with caplog.at_level(logging.WARNING, logger="headrace"):
        port = up._http_port(Settings(http_port=busy))
    assert port not in (None, busy)
    assert f"port {busy} is in use; the gateway listens on {port} instead" in caplog.text


def test_without_its_packages_there_is_no_gateway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "_PACKAGES", ("a_package_that_is_not_there",))
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert up._http_port(Settings()) is None
    assert http.INSTALL in caplog.text
    result = CliRunner().invoke(command, ("serve", "gateway", "--nats-url", "nats://127.0.0.1:1"))
    assert result.exit_code == 1
    assert http.INSTALL in result.stderr
