"""API keys of the HTTP edge: how one is made, and what is kept of it.

A key is 256 random bits, so nobody can guess it, nor find it from its hash: one round of SHA-256 keeps it as well as a
slow password hash would, which is there to make guessing of what people invent dear. And it must be fast: every request
pays for it, with a good key or a bad one.

Finding a key's tenant is one look into a table by the hash. How long that takes tells nothing: to be near a stored hash
on purpose, one would have to know a key with such a hash.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

__all__ = ["KEY_BYTES", "MAX_KEYS", "ApiKey", "hash_of", "key_from", "owners_of"]

KEY_BYTES: Final = 32
"""Random bytes of a key."""

MAX_KEYS: Final = 16
"""Keys of a tenant at most: one in use, the next one, and one for each application."""

_PREFIX: Final = "hr-"
_ID_CHARS: Final = 8


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is kept of a key: a name people give it, and its SHA-256 in hex."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z", description="1 to 40 of a-z 0-9 -")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="a SHA-256 in 64 lower-case hex digits")]

    @property
    def id(self) -> str:
        """A short id for lists, the beginning of the hash; of the key itself it tells nothing."""
        return self.sha256[:_ID_CHARS]


def key_from(random_bytes: bytes) -> str:
    """The key of `KEY_BYTES` random bytes: `hr-` and 43 characters of base64url."""
    assert len(random_bytes) == KEY_BYTES
    return _PREFIX + base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()


def hash_of(key: bytes) -> str:
    """What is stored of a key, and looked up for one that a request brings."""
    return hashlib.sha256(key).hexdigest()


def owners_of(keys: Mapping[str, Iterable[ApiKey]]) -> dict[str, str]:
    """Whose each hash is, from the keys of each tenant. One that several have is nobody's."""
    owners: dict[str, str] = {}
    shared: set[str] = set()
    for tenant, held in keys.items():
        for key in held:
            if owners.setdefault(key.sha256, tenant) != tenant:
                shared.add(key.sha256)
    return {sha256: tenant for sha256, tenant in owners.items() if sha256 not in shared}
