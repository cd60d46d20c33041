"""Credentials of the parts that one command runs against a secured embedded broker."""

from pathlib import Path
from typing import Final

import msgspec

from headrace.bus.members import MONITOR, NOTICES, OPERATOR, Member
from headrace.bus.securing import SecureDirectory
from headrace.cli.secure import SECURE_DIR, reload_embedded
from headrace.errors import ConfigError
from headrace.schemas.subjects import Names
from headrace.settings import Settings

__all__ = ["Guard"]

_WORKER_ID: Final = "up"


class Guard:
    """The secured broker's directory, in the state directory. Made before the broker starts; writes to it at once.

    `operator_settings` are the settings with the operator's credential. Raises ConfigError where it cannot be written.
    """

    def __init__(self, settings: Settings, *, model: str, num_workers: int) -> None:
        self._make_state_dir(Path(settings.state_dir))
        self.directory = SecureDirectory(Path(settings.state_dir) / SECURE_DIR)
        self._worker_id = settings.worker_id or _WORKER_ID
        self._model = model
        self._names = Names(settings.prefix)
        self.directory.enrol(self._names, [self._worker(number) for number in range(1, num_workers + 1)])
        file = str(self.directory.file_of(OPERATOR))
        self.operator_settings = msgspec.structs.replace(settings, nats_credentials=file)

    @staticmethod
    def _make_state_dir(path: Path) -> None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # parents of what is made below are open to all
        except OSError as error:
            raise ConfigError(f"the state directory {path} cannot be used: {error.strerror}") from None

    def worker(self, number: int) -> Member:
        """A worker of the model, known to the broker from now on."""
        member = self._worker(number)
        done = self.directory.enrol(self._names, [member])
        if any(each.action != "kept" for each in done):
            reload_embedded(self.operator_settings, self.directory)
        return member

    def _worker(self, number: int) -> Member:
        return Member(role="worker", worker=f"{self._worker_id}-{number}", model=self._model)

    def credentials_of(self, member: Member) -> dict[str, str]:
        """Variables that give a part its credential."""
        own = {"HEADRACE_NATS_CREDENTIALS": str(self.directory.file_of(member))}
        if member.role == MONITOR.role:
            own["HEADRACE_NATS_SYSTEM_CREDENTIALS"] = str(self.directory.file_of(NOTICES))
        return own
