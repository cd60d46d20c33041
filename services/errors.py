"""Every exception Headrace raises, as one tree.

    HeadraceError                    anything of ours; has `code`, `status`, `is_retryable`
    ├── ConfigError                  a setting is unknown or out of range; the start stops
    ├── BrokerError                  the broker cannot be used
    │   ├── BrokerUnavailableError   nothing answers, or not in time
    │   │   ├── BrokerDeniedError    it answers, but does not know the credential or does not permit it that
    │   │   └── BrokerTlsError       it answers, but no encrypted connection comes about
    │   ├── BrokerUnsuitableError    too old, without JetStream, or a stream that cannot be changed
    │   └── NotProvisionedError      a stream or bucket is missing; run `headrace provision`
    ├── ObjectGoneError              a file in the broker, or a part of it, was removed or has expired
    ├── EngineError                  the inference engine failed
    │   ├── EngineStartError         it did not come up
    │   ├── EngineRequestError       it refused this one request (HTTP 4xx); counts as no fault
    │   └── EngineBusyError          it has no room now; backpressure, not a failure
    └── RequestError                 a refusal or a bad end, as the client sees it
        ├── JobFailedError           terminal event `failed`
        ├── JobExpiredError          terminal event `expired`
        ├── JobCancelledError        terminal event `cancelled`
        └── StreamGapError           tokens are missing and the log no longer has them

Losing a compare-and-set is not here: it is a normal return value.
"""

from headrace.schemas.refusals import CODES, Refusal

__all__ = [
    "BrokerDeniedError",
    "BrokerError",
    "BrokerTlsError",
    "BrokerUnavailableError",
    "BrokerUnsuitableError",
    "ConfigError",
    "EngineBusyError",
    "EngineError",
    "EngineRequestError",
    "EngineStartError",
    "HeadraceError",
    "JobCancelledError",
    "JobExpiredError",
    "JobFailedError",
    "NotProvisionedError",
    "ObjectGoneError",
    "RequestError",
    "StreamGapError",
]


class HeadraceError(Exception):
    """Root of the tree. `code` is stable and a row of the wire contract."""

    code: str = "internal"

    @property
    def status(self) -> int:
        """HTTP status of the code."""
        return CODES.get(self.code, CODES["internal"]).status

    @property
    def is_retryable(self) -> bool:
        """Whether sending the same request again can help."""
        return CODES.get(self.code, CODES["internal"]).is_retryable


class ConfigError(HeadraceError):
    """A setting is unknown or cannot be used; the message names key, value and allowed range."""

    code = "invalid_value"


class BrokerError(HeadraceError):
    """The broker cannot be used."""


class BrokerUnavailableError(BrokerError):
    """Nothing answers at the broker's address, or not in time."""


class BrokerDeniedError(BrokerUnavailableError):
    """The broker does not know the credential, asks for one, or does not permit it what was asked."""


class BrokerTlsError(BrokerUnavailableError):
    """No encrypted connection comes about: a certificate is not trusted, not shown, or not what was expected."""


class BrokerUnsuitableError(BrokerError):
    """The broker answers but is too old, lacks JetStream, or holds something that cannot be changed."""


class NotProvisionedError(BrokerError):
    """A stream or bucket is missing; `headrace provision` makes it."""


class ObjectGoneError(HeadraceError):
    """A file in the broker, or a part of it, is not there: it was removed, or has expired."""

    code = "file_not_found"


class EngineError(HeadraceError):
    """The inference engine failed while it had the request; counts as a fault of the engine."""

    code = "engine_error"


class EngineStartError(EngineError):
    """The engine did not come up; the message has the end of its output."""


class EngineRequestError(EngineError):
    """The engine refused this one request; it is the request's fault, never the engine's."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.code = refusal.code


class EngineBusyError(EngineError):
    """The engine has no room now; hand the request back, nothing failed."""


class RequestError(HeadraceError):
    """A request was refused or ended badly; `refusal` is the wire form."""

    def __init__(self, refusal: Refusal, *, job: str | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.job = job
        self.code = refusal.code

    @property
    def param(self) -> str | None:
        """The part of the request that is wrong, where one is."""
        return self.refusal.param

    @property
    def retry_after_s(self) -> int | None:
        """Seconds to wait before a retry, where the refusal says."""
        return self.refusal.retry_after_s


class JobFailedError(RequestError):
    """The job ended in `failed`."""


class JobExpiredError(RequestError):
    """The job ended in `expired`."""


class JobCancelledError(RequestError):
    """The job ended in `cancelled`."""


class StreamGapError(RequestError):
    """Tokens are missing and the log no longer has them."""
