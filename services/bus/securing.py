"""The directory of a secured broker: its configuration, who its users are, and a credentials file for each of them.

    members.json        users by role, with their public keys
    accounts.conf       the accounts and TLS of nats-server's configuration, made anew from the members each time
    nats-server.conf    a whole configuration that includes it; made once, then the operator's to change
    credentials/*.nk    one secret each, mode 0600; may be moved to where it is used

A secret is made once and never changed or shown. The broker takes a new `accounts.conf` on SIGHUP, without a restart.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from headrace.bus.credentials import new_credential, public_key, read_credential
from headrace.bus.members import STANDING, Member, Tls, accounts, as_text, check
from headrace.bus.private_files import write_private
from headrace.bus.server import MAX_PAYLOAD_BYTES
from headrace.errors import ConfigError
from headrace.schemas.subjects import Names

__all__ = ["SecureDirectory", "Secured"]

_ENTROPY_BYTES: Final = 32

Action = Literal["created", "changed", "kept", "removed"]


class Secured(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one user's credential; `file` is where it was written when it was made."""

    name: str
    file: str
    action: Action


class _Roll(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `members.json`."""

    prefix: str
    members: tuple[Member, ...] = ()
    tls: Tls | None = None


class SecureDirectory:
    """One broker's directory. Every operation holds its lock, so any number may run at once."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.config = self.path / "nats-server.conf"
        self.accounts = self.path / "accounts.conf"
        self._members = self.path / "members.json"
        self._credentials = self.path / "credentials"

    def file_of(self, member: Member) -> Path:
        """The credentials file of a user."""
        return self._credentials / f"{member.name}.nk"

    def enrol(
        self, names: Names, wanted: Iterable[Member], *, tls: Tls | None = None, removed: Iterable[str] = ()
    ) -> list[Secured]:
        """Give each wanted user, and those that every deployment has, a credential unless it has one; write all files.

        Without `tls` what was told before stays. A user in `removed`, by name, is none from the broker's next reload
        on. Raises ConfigError for a directory that cannot be used, is another deployment's, or knows no such user.
        """
        asked = {member.name: member for member in (*STANDING, *wanted)}
        for member in asked.values():
            check(member)
        removed = set(removed)
        with self._locked():
            roll = self._read(names)
            known = {member.name: member for member in roll.members}
            if unknown := removed - known.keys():
                raise ConfigError(f"{self.path} has no user {min(unknown)!r}; it has {', '.join(sorted(known))}")
            done = [self._enrolled(known, member) for name, member in asked.items() if name not in removed]
            for name in sorted(removed):
                self.file_of(known.pop(name)).unlink(missing_ok=True)
                done.append(Secured(name=name, file="", action="removed"))
            members = tuple(sorted(known.values(), key=lambda member: member.name))
            roll = _Roll(prefix=names.prefix, members=members, tls=tls or roll.tls)
            self._write(names, roll)
        return done

    def _enrolled(self, known: dict[str, Member], member: Member) -> Secured:
        file, before = self.file_of(member), known.get(member.name)
        action: Action = "created"
        if before is not None:
            key = before.key
            member = msgspec.structs.replace(member, key=key)
            action = "kept" if member == before else "changed"
        elif file.exists():  # its secret was made, but we ended before it was written down
            key = public_key(read_credential(str(file), setting="--dir"))
            action = "kept"
        else:
            seed, key = new_credential(secrets.token_bytes(_ENTROPY_BYTES))
            write_private(file, seed.encode())  # nothing else, not even a line's end: nats-py signs with the whole file
        known[member.name] = msgspec.structs.replace(member, key=key)
        return Secured(name=member.name, file=str(file), action=action)

    def _read(self, names: Names) -> _Roll:
        try:
            roll = msgspec.json.decode(self._members.read_bytes(), type=_Roll)
        except FileNotFoundError:
            return _Roll(prefix=names.prefix)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._members} cannot be read: {error}") from None
        if roll.prefix != names.prefix:
            raise ConfigError(
                f"{self.path} is of the deployment {roll.prefix}, not {names.prefix}; choose another with --dir"
            )
        return roll

    def _write(self, names: Names, roll: _Roll) -> None:
        write_private(self._members, msgspec.json.format(msgspec.json.encode(roll)))
        text = as_text(accounts(names, roll.members, roll.tls))
        write_private(self.accounts, f"# Made by `headrace provision --secure`; changes are lost.\n{text}".encode())
        if not self.config.exists():
            write_private(self.config, self._server_config(is_tls=roll.tls is not None).encode())

    def _server_config(self, *, is_tls: bool) -> str:
        host = "0.0.0.0" if is_tls else "127.0.0.1"  # without TLS, prompts and tokens pass in clear
        settings = as_text(
            {
                "server_name": "headrace",
                "host": host,
                "port": 4222,
                "pid_file": str(self.path / "nats-server.pid"),
                "max_payload": MAX_PAYLOAD_BYTES,
                "jetstream": {"store_dir": str(self.path / "jetstream"), "sync_interval": "1s"},
            }
        )
        head = "# Made once by `headrace provision --secure`; yours to change. Who may do what is in accounts.conf.\n"
        return f"{head}{settings}include ./accounts.conf\n"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            for directory in (self.path, self._credentials):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self.path / ".lock").open("a", encoding="ascii") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ConfigError(f"the directory {self.path} cannot be used: {error.strerror}") from None
