"""Configuration: strict decoding with errors that tell what is allowed, and the pure choices made from it."""

import json
from collections import Counter
from typing import Any

import msgspec
import pytest

from headrace.router.routing import choose_pool, choose_queue
from headrace.schemas.config import (
    MAX_QUEUES,
    AliasConfig,
    AliasTarget,
    Config,
    ModelConfig,
    PoolConfig,
    PoolRule,
    TenantConfig,
)
from headrace.schemas.config_text import (
    InvalidConfig,
    decode_entry,
    decode_file,
    encode_entry,
    entries_of,
    key_of,
    parse_key,
)
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import QueueName

WHOLE = """
[tenants.acme]
weight = 3
max_in_flight = 20
requests_per_minute = 100
tokens_per_minute = 50_000

[models."org/m-3.1"]
on_no_worker = "refuse"
queue_limit = 500
fallback = "chat"
pools = [{ name = "long", lends_to = ["default"] }, { name = "acme", tenants = ["acme"] }]

[[models."org/m-3.1".rules]]
pool = "long"
op = "chat"
min_prompt_tokens = 8192

[aliases.chat]
targets = [{ model = "m", version = "1", weight = 9 }, { model = "m", version = "2" }]
"""


def request(**fields: Any) -> InferenceRequest:
    return InferenceRequest(**{"op": "chat", "body": {}, **fields})


def test_a_file_is_decoded_and_its_entries_come_back_the_same() -> None:
    config = decode_file(WHOLE, is_json=False)
    assert config.tenant("acme") == TenantConfig(
        weight=3, max_in_flight=20, requests_per_minute=100, tokens_per_minute=50_000
    )
    assert config.model("org/m-3.1").rules == (PoolRule(pool="long", op="chat", min_prompt_tokens=8192),)
    sections = {name: msgspec.to_builtins(getattr(config, name)) for name in ("tenants", "models", "aliases")}
    entries = entries_of(config)
    assert set(entries) == {"tenants.acme", "models.org=2Fm-3=2E1", "aliases.chat"}
    for key, entry in entries.items():
        assert decode_entry(key, encode_entry(entry)) == entry
        parsed = parse_key(key)
        assert parsed is not None
        assert key_of(*parsed) == key
    assert decode_file(json.dumps(sections), is_json=True) == config


@pytest.mark.parametrize(
    ("section", "value", "told"),
    [
        (
            "tenants.a",
            {"max_in_fligth": 1},
            "tenants.a.max_in_fligth is unknown; allowed: a table with the keys weight,",
        ),
        ("tenants.a", {"weight": 0}, "tenants.a.weight is 0; allowed: a number from 0.01 to 1000"),
        ("tenants.a", {"max_in_flight": "x"}, 'tenants.a.max_in_flight is "x"; allowed: a whole number from 1 to'),
        ("models.m", {"on_no_worker": "wait"}, 'models.m.on_no_worker is "wait"; allowed: queue, refuse'),
        ("models.m", {"pools": [{"name": "A"}]}, 'models.m.pools[0].name is "A"; allowed: 1 to 40 of a-z 0-9 -'),
        ("models.m", {"rules": [{"pool": "x"}]}, "models.m: rules name the pool 'x'; allowed: default"),
        ("models.m", {"rules": [{}]}, "models.m.rules[0]: Object missing required field `pool`; allowed: a table"),
        (
            "models.m",
            {"rules": [{"pool": "default", "op": "speak"}]},
            'models.m.rules[0].op is "speak"; allowed: chat, completions, embeddings',
        ),
        (
            "models.m",
            {"rules": [{"pool": "default", "min_prompt_tokens": 9, "max_prompt_tokens": 8}]},
            "models.m.rules[0]: min_prompt_tokens is 9; allowed: at most max_prompt_tokens (8)",
        ),
        (
            "models.m",
            {"pools": [{"name": "a"}, {"name": "a"}]},
            "models.m: pools has 'a' twice; allowed: each name once",
        ),
        (
            "models.m",
            {"pools": [{"name": "a", "lends_to": ["b"]}]},
            "models.m: lends_to of the pool 'a' is 'b'; allowed: default",
        ),
        ("models.m", {"fallback": ""}, "models.m: fallback is no model name; allowed: 1 to 100 bytes"),
        ("aliases.c", {"targets": []}, "aliases.c.targets is []; allowed: a list of 1 to 16 entries"),
        ("aliases.c", {"targets": [{"model": "m", "weight": 0}]}, "aliases.c: targets have the weight 0 all; allowed:"),
        ("aliases.c", {"targets": [{"model": ""}]}, "aliases.c.targets[0]: '' is no model name; allowed:"),
        ("tenants.a", 7, "tenants.a is 7; allowed: a table with the keys weight"),
    ],
)
def test_an_error_names_the_key_and_what_is_allowed(section: str, value: Any, told: str) -> None:
    head, _, name = section.partition(".")
    with pytest.raises(InvalidConfig) as caught:
        decode_file(json.dumps({head: {name: value}}), is_json=True)
    assert str(caught.value).startswith(told)
    with pytest.raises(InvalidConfig):
        decode_entry(section, json.dumps(value).encode())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tenant = 1", "unknown key 'tenant'; allowed: tenants, models, aliases"),
        ("tenants = 1", "tenants is not a table"),
        ("[tenants.A]", "tenants.'A' is no tenant name; allowed: 1 to 40 of a-z 0-9 -"),
        ('[models."\\u0007"]', "models.'\\x07' is no model name"),
        ("[tenants", "not TOML: "),
        ("[aliases]\na={targets=[{model='b'}]}\nb={targets=[{model='m'}]}", "aliases.a has the target 'b', an alias"),
    ],
)
def test_a_bad_file_is_refused_as_a_whole(text: str, told: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        decode_file(text, is_json=False)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("key", ["tenants", "tenants.A", "models.a.b", "models.=zz", "other.a", ""])
def test_keys_of_others_are_none_of_ours(key: str) -> None:
    assert parse_key(key) is None
    with pytest.raises(InvalidConfig, match="unknown key"):
        decode_entry(key, b"{}")


MODEL = ModelConfig(
    pools=(
        PoolConfig(name="long", lends_to=("default", "stream")),
        PoolConfig(name="stream"),
        PoolConfig(name="code"),
        PoolConfig(name="theirs", tenants=("acme",)),
    ),
    rules=(
        PoolRule(pool="theirs", tenant="acme"),
        PoolRule(pool="long", min_prompt_tokens=8192),
        PoolRule(pool="code", op="completions"),
        PoolRule(pool="code", header="editor"),
        PoolRule(pool="stream", op="chat", stream=True, max_prompt_tokens=100),
    ),
)


@pytest.mark.parametrize(
    ("fields", "tenant", "header", "pool"),
    [
        ({"num_prompt_tokens_estimate": 8192}, "t", None, "long"),
        ({"num_prompt_tokens_estimate": 8191}, "t", None, "default"),
        ({"num_prompt_tokens_estimate": 100}, "t", None, "stream"),
        ({"num_prompt_tokens_estimate": 100, "stream": False}, "t", None, "default"),
        ({"op": "completions", "num_prompt_tokens_estimate": 9000}, "t", None, "long"),
        ({"op": "completions"}, "t", None, "code"),
        ({"num_prompt_tokens_estimate": 9000}, "acme", None, "theirs"),
        ({"num_prompt_tokens_estimate": 9000}, "t", "editor", "code"),
        ({"num_prompt_tokens_estimate": 9000}, "t", "stream", "stream"),
        ({}, "acme", "default", "default"),
        ({}, "acme", "theirs", "theirs"),
        ({}, "t", "served", "served"),
    ],
)
def test_the_first_rule_that_matches_chooses_the_pool(
    fields: dict[str, Any], tenant: str, header: str | None, pool: str
) -> None:
    served = frozenset({"served"})
    assert choose_pool(MODEL, request(**fields), tenant=tenant, header=header, served=served) == pool


@pytest.mark.parametrize(("tenant", "header"), [("t", "nowhere"), ("t", "theirs")])
def test_a_pool_that_does_not_exist_is_refused_and_so_is_one_of_somebody_else(tenant: str, header: str) -> None:
    refusal = choose_pool(MODEL, request(), tenant=tenant, header=header, served=frozenset())
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == ("invalid_value", "Headrace-Pool")
    assert refusal.message == "Headrace-Pool names a pool that does not exist"


def test_lenders_serve_the_pools_they_lend_to() -> None:
    assert MODEL.servers_of("default") == {"default", "long"}
    assert MODEL.servers_of("long") == {"long"}
    assert ModelConfig().servers_of("default") == {"default"}


def test_an_alias_is_spread_by_weight_and_always_the_same_for_an_id() -> None:
    alias = AliasConfig(
        targets=(AliasTarget(model="m", version="1", weight=9), AliasTarget(model="m", version="2", weight=1))
    )
    ids = [f"job-{number}" for number in range(20_000)]
    chosen = [alias.choose(job) for job in ids]
    assert chosen == [alias.choose(job) for job in ids]
    counts = Counter(chosen)
    assert set(counts) == {"m@1", "m@2"}
    assert counts["m@2"] / len(ids) == pytest.approx(0.1, abs=0.01)
    assert Config(aliases={"c": alias}).resolve("c", "job-1") == alias.choose("job-1")
    assert Config().resolve("c", "job-1") == "c"


def test_where_weights_change_only_as_many_ids_move_as_must() -> None:
    old, new = AliasTarget(model="old", weight=9), AliasTarget(model="new", weight=1)
    more = msgspec.structs.replace(new, weight=3)
    before, after = AliasConfig(targets=(old, new)), AliasConfig(targets=(old, more))
    moves = Counter((before.choose(f"{n}"), after.choose(f"{n}")) for n in range(5_000))
    assert moves["new", "old"] == 0
    assert moves["old", "new"] / 5_000 == pytest.approx(0.25 - 0.1, abs=0.02)
    out = AliasConfig(targets=(msgspec.structs.replace(old, weight=0), new))
    assert {out.choose(f"{n}") for n in range(100)} == {"new"}


def test_a_configured_tenant_has_its_own_queue_and_the_rest_share_one() -> None:
    config = Config(tenants={"a": TenantConfig(weight=3), "default": TenantConfig(weight=2)})
    assert config.queue_of("a") == "a"
    assert config.queue_of("b") == config.queue_of("default") == "default"
    assert [config.weight_of(queue) for queue in ("a", "default", "other")] == [3, 2, 1]


def test_there_are_never_more_than_64_queues_and_a_limited_tenant_shares_with_nobody() -> None:
    tenants = {f"t{number:03}": TenantConfig(weight=2) for number in range(200)}
    limited = {f"z{number}": TenantConfig(max_in_flight=1) for number in range(20)}
    config = Config(tenants={**tenants, **limited})
    queues = Counter(config.queue_of(tenant) for tenant in config.tenants)
    assert len(queues) <= MAX_QUEUES
    assert all(queues[tenant] == 1 for tenant in limited)
    assert max(queues.values()) < 12


def test_a_queue_has_pool_lane_and_name() -> None:
    config = Config(models={"m": MODEL}, tenants={"a": TenantConfig()})
    long = request(num_prompt_tokens_estimate=9000)
    queue = choose_queue(config, "m", long, tenant="a", header=None, lane="high", served=frozenset())
    assert queue == QueueName("long", "high", "a")


@pytest.mark.parametrize(
    ("own", "fields", "header", "pool"),
    [
        ("served", {}, None, "served"),
        ("code", {}, None, "code"),
        ("code", {}, "stream", "stream"),
        ("code", {"num_prompt_tokens_estimate": 9000}, None, "long"),
        ("nowhere", {}, None, "default"),
        ("theirs", {}, None, "default"),  # reserved for another tenant
    ],
)
def test_a_tenants_own_pool_is_used_where_the_model_has_it_and_nothing_else_is_said(
    own: str, fields: dict[str, Any], header: str | None, pool: str
) -> None:
    config = Config(models={"m": MODEL}, tenants={"a": TenantConfig(pool=own)})
    asked = request(**{"stream": False, **fields})
    served = frozenset({"served"})
    queue = choose_queue(config, "m", asked, tenant="a", header=header, lane="low", served=served)
    assert queue == QueueName(pool, "low", "a")
