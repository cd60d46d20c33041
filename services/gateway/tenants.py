"""Whose request it is: the tenant of the API key that it brings."""

from collections.abc import Iterable
from typing import Final

from starlette.requests import Request
from starlette.types import Scope

from headrace.bus.configuration import ConfigView
from headrace.errors import BrokerUnavailableError, RequestError
from headrace.schemas.keys import hash_of
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import DEFAULT_TENANT, Tenant

__all__ = ["Tenants", "tenant_of"]

_AUTHORIZATION: Final = b"authorization"
_SCHEME: Final = b"bearer"
_STATE: Final = "state"
_TENANT: Final = "tenant"

_INVALID: Final = Refusal(code="invalid_api_key", message="The API key is missing or not valid.")
"""For every key that is not good, in the same words: nobody learns which one nearly was."""


class Tenants:
    """Finds tenants by their keys, as configured at the moment.

    Where no tenant has a key, everybody is the tenant `default`. A tenant whose configuration cannot be read may have
    one, so then only good keys are let in; and nobody is, before the configuration was read at all.
    """

    def __init__(self, view: ConfigView) -> None:
        self._view = view

    @property
    def are_many(self) -> bool:
        """Whether requests are told apart at all."""
        return self._view.config.has_keys

    def authenticate(self, scope: Scope) -> Tenant:
        """The tenant of a request, which is kept in its state for `tenant_of`. Reads nothing but its headers.

        Raises RequestError (`invalid_api_key`), BrokerUnavailableError where the configuration was not read yet.
        """
        if not self._view.is_read:
            raise BrokerUnavailableError("the configuration was not read yet")
        tenant = self._tenant(scope["headers"])
        if tenant is None:
            raise RequestError(_INVALID)
        scope.setdefault(_STATE, {})[_TENANT] = tenant
        return tenant

    def _tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        config = self._view.config
        if not config.has_keys and not self._is_unsure:
            return DEFAULT_TENANT
        key = _key(headers)
        owner = config.key_owners.get(hash_of(key)) if key is not None else None
        return Tenant(owner) if owner is not None else None

    @property
    def _is_unsure(self) -> bool:
        return any(key.startswith("tenants.") for key in self._view.unreadable)


def tenant_of(request: Request) -> Tenant:
    """The tenant whose key came with the request, which was authenticated before any handler saw it."""
    tenant: Tenant = request.state.tenant
    return tenant


def _key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key of `Authorization: Bearer KEY`; None for anything else, more than one such header included."""
    values = [value for name, value in headers if name == _AUTHORIZATION]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].strip().partition(b" ")
    return key.strip() or None if scheme.lower() == _SCHEME else None
