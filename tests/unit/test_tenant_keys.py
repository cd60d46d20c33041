"""Keys of the HTTP edge without a network: made, kept as hashes, found by the header that brings them."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from headrace.errors import BrokerUnavailableError, RequestError
from headrace.gateway.errors import as_response
from headrace.gateway.tenants import Tenants, tenant_of
from headrace.schemas.config import Config, TenantConfig
from headrace.schemas.config_text import InvalidConfig, decode_entry, decode_file, encode_entry
from headrace.schemas.keys import KEY_BYTES, ApiKey, hash_of, key_from

KEY = key_from(bytes(range(KEY_BYTES)))
HASH = hash_of(KEY.encode())


def kept(key: str, name: str = "k") -> ApiKey:
    return ApiKey(name=name, sha256=hash_of(key.encode()))


def tenants(config: Config, *, unreadable: frozenset[str] = frozenset(), is_read: bool = True) -> Tenants:
    view: Any = SimpleNamespace(config=config, unreadable=unreadable, is_read=is_read)
    return Tenants(view)


def found(edge: Tenants, *authorization: bytes) -> str | None:
    """The tenant that a handler sees; None where the request is refused."""
    scope = {"type": "http", "headers": [(b"host", b"x"), *((b"authorization", value) for value in authorization)]}
    try:
        edge.authenticate(scope)
    except RequestError as error:
        if error.refusal.code != "invalid_api_key":
            raise
        return None
    return tenant_of(Request(scope))


ACME = Config(tenants={"acme": TenantConfig(keys=(kept(KEY), kept("hr-2", "two"))), "b": TenantConfig()})


def test_a_key_is_of_a_form_that_can_be_told_and_its_hash_is_known() -> None:
    assert KEY == "hr-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert HASH == "24c8f746e03172312c6619b1fc728dc5f0fef4058606e7790d0276488fb26c7b"
    assert kept(KEY).id == HASH[:8]


@pytest.mark.parametrize(
    "header", [b"Bearer %s", b"bearer %s", b"BEARER  %s", b"  Bearer %s  "], ids=["usual", "lower", "spaces", "around"]
)
def test_a_good_key_is_found_however_its_header_is_written(header: bytes) -> None:
    assert found(tenants(ACME), header % KEY.encode()) == "acme"
    assert found(tenants(ACME), header % b"hr-2") == "acme"


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (b"",),
        (b"Bearer",),
        (b"Bearer ",),
        (KEY.encode(),),
        (b"Basic " + KEY.encode(),),
        (b"Bearer " + KEY.encode()[:-1],),
        (b"Bearer " + KEY.encode() + b"=",),
        (b"Bearer " + KEY.lower().encode(),),
        (b"Bearer " + HASH.encode(),),
        (b"Bearer \xff\x00",),
        (b"Bearer " + KEY.encode(), b"Bearer " + KEY.encode()),
        (b"Bearer " + KEY.encode(), b"Bearer hr-2"),
    ],
)
def test_anything_else_is_refused(headers: tuple[bytes, ...]) -> None:
    assert found(tenants(ACME), *headers) is None


def test_without_any_key_everybody_is_the_default_tenant() -> None:
    for config in (Config(), Config(tenants={"a": TenantConfig(), "b": TenantConfig(keys=())})):
        assert found(tenants(config)) == found(tenants(config), b"Bearer x") == "default"


def test_an_entry_that_cannot_be_read_closes_the_edge_and_one_of_a_model_does_not() -> None:
    assert found(tenants(Config(), unreadable=frozenset({"models.m"}))) == "default"
    closed = frozenset({"tenants.newer"})
    assert found(tenants(Config(), unreadable=closed)) is None
    assert found(tenants(ACME, unreadable=closed), b"Bearer " + KEY.encode()) == "acme"


def test_nobody_is_let_in_before_the_configuration_was_read() -> None:
    with pytest.raises(BrokerUnavailableError):
        found(tenants(Config(), is_read=False))


def test_a_handler_that_nobody_authenticated_for_fails() -> None:
    with pytest.raises(AttributeError):
        tenant_of(Request({"type": "http", "headers": []}))


def test_a_key_of_two_tenants_is_nobodys() -> None:
    both = Config(tenants={name: TenantConfig(keys=(kept(KEY), kept(f"hr-{name}", "own"))) for name in "ab"})
    assert found(tenants(both), b"Bearer " + KEY.encode()) is None
    assert found(tenants(both), b"Bearer hr-b") == "b"
    file = {name: {"keys": [{"name": "k", "sha256": HASH}]} for name in "ab"}
    with pytest.raises(InvalidConfig, match=r"tenants.a has the key 'k' of another tenant"):
        decode_file(json.dumps({"tenants": file}), is_json=True)


def test_the_refusal_says_what_it_wants_and_no_more() -> None:
    with pytest.raises(RequestError) as caught:
        tenants(ACME).authenticate({"type": "http", "headers": []})
    response = as_response(caught.value.refusal)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert json.loads(bytes(response.body))["error"]["message"] == "The API key is missing or not valid."


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            {"keys": [{"name": "k", "sha256": "hr-canary"}]},
            "tenants.a.keys[0].sha256 is not that; allowed: a SHA-256 in",
        ),
        ({"keys": ["hr-canary"]}, "tenants.a.keys[0] is not that; allowed: a table with the keys name, sha256"),
        ({"keys": "hr-canary"}, "tenants.a.keys is not that; allowed: a list of 0 to 16 entries"),
        (
            {"keys": [{"name": "K", "sha256": HASH}]},
            "tenants.a.keys[0].name is not that; allowed: 1 to 40 of a-z 0-9 -",
        ),
        (
            {"keys": [{"name": "k", "sha256": HASH}] * 2},
            "tenants.a: keys has the name 'k' twice; allowed: each name once",
        ),
        ({"models": [""]}, "tenants.a: models has '', no model name; allowed: 1 to 100 bytes"),
    ],
)
def test_an_error_does_not_repeat_what_may_be_a_key(value: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        decode_entry("tenants.a", json.dumps(value).encode())
    assert str(caught.value).startswith(told)
    assert "canary" not in str(caught.value)


def test_keys_and_models_come_back_as_they_were() -> None:
    entry = TenantConfig(models=("org/m-3.1", "chat"), keys=(kept(KEY),))
    assert decode_entry("tenants.a", encode_entry(entry)) == entry
    assert entry.may_name("chat")
    assert not entry.may_name("other")
    assert TenantConfig().may_name("other")
    assert not TenantConfig(models=()).may_name("chat")
