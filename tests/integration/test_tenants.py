"""Tenants and their API keys: made and revoked by the command, asked for at the gateway, kept apart everywhere."""

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from headrace.bus.configuration import ConfigView, StoredEntry, read_entries
from headrace.bus.connection import Bus
from headrace.bus.keyvalue import Bucket
from headrace.bus.occupancy import num_messages
from headrace.bus.provision import ensure_jobs_stream
from headrace.cli import tenant_set
from headrace.client import Client
from headrace.errors import BrokerUnavailableError, RequestError
from headrace.schemas.keys import hash_of
from headrace.schemas.subjects import Tenant
from tests.commands import Headrace
from tests.deployment import MODEL, Deployment, Gateway, deployment, until

HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix) as started:
        yield started


@pytest.fixture
def headrace(broker_url: str, prefix: str) -> Headrace:
    return Headrace(broker_url, prefix)


@pytest_asyncio.fixture
async def gateway(running: Deployment) -> Gateway:
    return await running.gateway()


async def ask(
    gateway: Gateway, path: str, key: str | None = None, *, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, Any]:
    """Status and body of an answer; no key is no such header."""
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
        session.request(method, gateway.url + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def is_let_in(gateway: Gateway, key: str | None) -> bool:
    return (await ask(gateway, "/v1/models", key))[0] == 200


async def refused_soon(gateway: Gateway, key: str | None = None) -> None:
    async def is_refused() -> bool:
        return not await is_let_in(gateway, key)

    await until(is_refused)


async def let_in_soon(gateway: Gateway, key: str | None) -> None:
    await until(lambda: is_let_in(gateway, key))


async def new_tenant(headrace: Headrace, gateway: Gateway, name: str, *options: str) -> str:
    """The key of a new tenant, once the gateway knows it."""
    made = await headrace.json("tenant", "add", name, *options)
    await let_in_soon(gateway, made["key"])
    return str(made["key"])


async def test_without_keys_any_key_is_the_default_tenants_and_with_one_no_other_is(
    running: Deployment, gateway: Gateway, headrace: Headrace
) -> None:
    await running.worker()
    for key in (None, "sk-any"):
        assert (await ask(gateway, CHAT, key, method="POST", body=HELLO))[0] == 200
    await headrace.run("tenant", "add", "quiet", "--no-key")
    assert await is_let_in(gateway, None)
    key = await new_tenant(headrace, gateway, "acme")
    await refused_soon(gateway)
    assert (await ask(gateway, CHAT, key, method="POST", body=HELLO))[0] == 200
    for path in ("/healthz", "/readyz"):
        assert (await ask(gateway, path))[0] == 200


async def test_a_wrong_key_is_told_nothing_and_is_nowhere(
    running: Deployment, gateway: Gateway, headrace: Headrace, caplog: pytest.LogCaptureFixture
) -> None:  # SEC-3
    caplog.set_level(logging.DEBUG)
    good = await new_tenant(headrace, gateway, "acme")
    await refused_soon(gateway)
    wrong = ["hr-canary", good[:-1], f"{good} x", hash_of(good.encode()), "acme", "ü", "a" * 5_000]
    answers = [
        await ask(gateway, path, key, method=method, body=HELLO if method == "POST" else None)
        for key in (None, "", *wrong)
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/jobs/x"), ("GET", "/v1/nothing"))
    ]
    answers += [
        await ask(gateway, "/v1/models", Authorization=text) for text in ("Basic YTpi", good, "Bearer", f"hr {good}")
    ]
    answers.append(await ask(gateway, f"/v1/models?api_key={good}"))
    for status, body in answers:
        assert status == 401
        assert body == answers[0][1]
    assert answers[0][1]["error"]["code"] == "invalid_api_key"
    told = json.dumps(answers[0][1]) + caplog.text
    for secret in (*wrong[:4], good, good[3:20], hash_of(good.encode())[:12]):
        assert secret not in told


async def test_a_large_body_with_a_wrong_key_is_not_kept_and_its_answer_arrives(
    gateway: Gateway, headrace: Headrace
) -> None:
    key = await new_tenant(headrace, gateway, "acme")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        for _ in range(3):  # over one connection, which goes on
            data = io.BytesIO(b"x" * (9 << 20))
            headers = {"Authorization": "Bearer hr-wrong"}
            async with session.post(gateway.url + CHAT, data=data, headers=headers) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
        async with session.get(f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 200


async def test_the_openai_client_with_a_key_and_with_a_bad_one(
    running: Deployment, gateway: Gateway, headrace: Headrace
) -> None:
    await running.worker()
    key = await new_tenant(headrace, gateway, "acme")
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        answer = await client.chat.completions.create(**HELLO)
        assert answer.choices[0].finish_reason == "length"
        assert [model.id async for model in client.models.list()] == [MODEL]
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-bad", max_retries=2, timeout=20) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(**HELLO)
        assert caught.value.code == "invalid_api_key"


async def test_a_key_is_rotated_without_a_gap(gateway: Gateway, headrace: Headrace) -> None:
    first = await new_tenant(headrace, gateway, "acme")
    second = (await headrace.json("tenant", "key", "add", "acme", "--key-name", "next"))["key"]
    await let_in_soon(gateway, second)
    assert await is_let_in(gateway, first)
    (listed,) = await headrace.json("tenant", "list")
    assert [key["name"] for key in listed["keys"]] == ["default", "next"]
    await headrace.run("tenant", "key", "revoke", "acme", listed["keys"][0]["id"])
    await refused_soon(gateway, first)
    assert await is_let_in(gateway, second)
    only = await headrace.run("tenant", "key", "revoke", "acme", "next", code=1)
    assert "it is the only key of the deployment" in only.output
    assert await is_let_in(gateway, second)
    opened = await headrace.run("tenant", "key", "revoke", "acme", "next", "--open-gateway")
    assert "the gateway takes every request" in opened.stderr
    await let_in_soon(gateway, None)


async def test_a_model_that_nobody_knows_is_told(running: Deployment, headrace: Headrace) -> None:
    await ensure_jobs_stream(running.bus, MODEL)
    assert "No tenant is configured" in (await headrace.run("tenant", "list")).stdout
    added = await headrace.run("tenant", "add", "acme", "--model", MODEL, "--model", "mistyped", "--no-key")
    assert added.stderr == "headrace: no model or alias mistyped is known yet\n"
    assert added.stdout == "tenant acme is added\n"


async def test_the_key_is_shown_once_and_only_its_hash_is_kept(
    running: Deployment, gateway: Gateway, headrace: Headrace, tmp_path: Path
) -> None:
    added = await headrace.run("tenant", "add", "acme", "--weight", "2", "--pool", "gold", "--model", MODEL)
    key = added.stdout.strip()
    assert key.startswith("hr-")
    assert len(key) == 46
    entry = await Bucket(running.bus, running.bus.names.config_bucket).get("tenants.acme")
    assert entry is not None
    assert json.loads(entry.value or b"") == {
        "weight": 2.0,
        "pool": "gold",
        "models": [MODEL],
        "keys": [{"name": "default", "sha256": hash_of(key.encode())}],
    }
    shown = await headrace.run("config", "get")
    listing = await headrace.run("tenant", "list")
    assert hash_of(key.encode())[:8] in listing.output
    assert key not in shown.output + listing.output
    for command in (
        ("tenant", "add", "acme"),
        ("tenant", "remove", "nobody"),
        ("tenant", "key", "revoke", "acme", "x"),
    ):
        await headrace.run(*command, code=1)
    for command in (
        ("tenant", "add", "A"),
        ("tenant", "add", "b", "--weight", "0"),
        ("tenant", "add", "b", "--model", ""),
    ):
        await headrace.run(*command, code=2)

    file = tmp_path / "config.toml"
    file.write_text(shown.output)
    assert {change["action"] for change in await headrace.json("config", "apply", str(file))} == {"unchanged"}
    file.write_text("[tenants.acme]\nweight = 3\n")  # a file that names no keys leaves them
    await headrace.run("config", "apply", str(file))
    (listed,) = await headrace.json("tenant", "list")
    assert (listed["weight"], listed["models"], len(listed["keys"])) == (3.0, None, 1)
    await let_in_soon(gateway, key)
    file.write_text("[tenants.acme]\nkeys = []\n")
    opened = await headrace.run("config", "apply", str(file))
    assert "the gateway takes every request" in opened.stderr
    await let_in_soon(gateway, None)


async def test_a_tenant_sees_and_uses_its_models_alone_over_http_and_nats(
    running: Deployment, gateway: Gateway, headrace: Headrace, tmp_path: Path
) -> None:
    for name in (MODEL, "secret"):
        await running.worker(model=name)
    file = tmp_path / "config.json"
    targets = [{"model": "secret"}]
    file.write_text(json.dumps({"aliases": {"fast": {"targets": targets}, "other": {"targets": targets}}}))
    await headrace.run("config", "apply", str(file))
    key = await new_tenant(headrace, gateway, "acme", "--model", MODEL, "--model", "fast", "--model", "planned")
    every = await new_tenant(headrace, gateway, "every")

    async def names(key: str) -> list[str]:
        return [model["id"] for model in (await ask(gateway, "/v1/models", key))[1]["data"]]

    assert await names(key) == ["fast", MODEL]
    assert await names(every) == ["fast", "other", "secret", MODEL]
    assert (await ask(gateway, "/v1/models/secret", key))[0] == 404
    assert (await ask(gateway, CHAT, key, method="POST", body={**HELLO, "model": "fast"}))[0] == 200
    wordings = set()
    for name, asking in (("secret", key), ("other", key), ("nothing", key), ("nothing", every)):
        status, body = await ask(gateway, CHAT, asking, method="POST", body={**HELLO, "model": name})
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        wordings.add(body["error"]["message"].replace(name, "…"))
    assert len(wordings) == 1  # one it may not use is told from an unknown one by nothing
    with pytest.raises(RequestError) as caught:
        await Client(running.bus, Tenant("acme")).complete(model="secret", messages=HELLO["messages"])
    assert caught.value.refusal.code == "model_not_found"


async def test_jobs_of_other_tenants_are_not_found(running: Deployment, gateway: Gateway, headrace: Headrace) -> None:
    await running.worker()
    key, other = [await new_tenant(headrace, gateway, name) for name in ("acme", "bcme")]
    named = {"X-Headrace-Id": "mine"}
    assert (await ask(gateway, CHAT, key, method="POST", body=HELLO, **named))[0] == 200
    assert (await ask(gateway, "/v1/jobs/mine", key))[1]["state"] == "done"
    for method, path in (("GET", "mine"), ("DELETE", "mine"), ("GET", "mine/stream")):
        status, body = await ask(gateway, f"/v1/jobs/{path}", other, method=method)
        assert (status, body["error"]["code"]) == (404, "job_not_found")
    other_body = {**HELLO, "max_tokens": 2}  # the same id is another job there
    assert (await ask(gateway, CHAT, other, method="POST", body=other_body, **named))[0] == 200


async def test_a_tenant_is_changed_and_keeps_its_keys(
    gateway: Gateway, headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await new_tenant(headrace, gateway, "acme", "--weight", "2", "--max-in-flight", "5", "--pool", "gold")
    (before,) = await headrace.json("tenant", "list")
    changed = await headrace.json(
        "tenant", "set", "acme", "--no-max-in-flight", "--no-pool", "--tokens-per-minute", "100", "--model", "later"
    )
    expected = {**before, "max_in_flight": None, "pool": None, "tokens_per_minute": 100, "models": ["later"]}
    assert changed == expected
    assert await headrace.json("tenant", "list") == [expected]
    assert await is_let_in(gateway, key)
    opened = await headrace.run("tenant", "set", "acme", "--all-models", "--weight", "3")
    assert "acme" in opened.stdout
    assert await headrace.json("tenant", "list") == [{**expected, "models": None, "weight": 3.0}]
    assert "'later' is known yet" not in opened.stderr

    await headrace.run("tenant", "set", "nobody", "--weight", "1", code=1)
    for wrong in ((), ("--weight", "0"), ("--pool", "x", "--no-pool"), ("--model", "m", "--all-models")):
        await headrace.run("tenant", "set", "acme", *wrong, code=2)

    async def read_and_be_overtaken(bus: Bus) -> dict[str, StoredEntry]:
        stored = await read_entries(bus)
        known = stored["tenants.acme"]
        await Bucket(bus, bus.names.config_bucket).put(
            "tenants.acme", b'{"weight":7}', expected_revision=known.revision
        )
        return stored

    monkeypatch.setattr(tenant_set, "read_entries", read_and_be_overtaken)
    overtaken = await headrace.run("tenant", "set", "acme", "--weight", "4", code=1)
    assert "was changed by somebody else just now" in overtaken.stderr
    assert [each["weight"] for each in await headrace.json("tenant", "list")] == [7.0]


async def test_removing_a_tenant_says_what_goes_on(running: Deployment, gateway: Gateway, headrace: Headrace) -> None:
    keeper = await new_tenant(headrace, gateway, "keeper")
    key = await new_tenant(headrace, gateway, "acme")
    await ensure_jobs_stream(running.bus, "later")
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        waiting = await _queued_request(running, client, "later")
        removed = await headrace.run("tenant", "remove", "acme")
        assert "1 of its requests are queued or running and go on" in removed.output
        await refused_soon(gateway, key)
        assert await is_let_in(gateway, keeper)
        await running.worker(model="later")
        assert (await waiting).choices[0].finish_reason == "length"


async def _queued_request(running: Deployment, client: AsyncOpenAI, model: str) -> "asyncio.Task[ChatCompletion]":
    """A request that waits in its tenant's queue: asked again until the router has heard of tenant and model too."""
    while True:
        waiting = asyncio.create_task(client.chat.completions.create(**{**HELLO, "model": model}))
        with contextlib.suppress(TimeoutError):
            await until(lambda: _has_queued(running, model), timeout_s=2.0)
            return waiting
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _has_queued(running: Deployment, model: str) -> bool:
    return await num_messages(running.bus, model, "acme") == 1


async def test_a_tenant_that_cannot_be_read_may_have_keys(
    running: Deployment, gateway: Gateway, headrace: Headrace
) -> None:
    bucket = Bucket(running.bus, running.bus.names.config_bucket)
    await bucket.put("tenants.newer", b'{"made_by":"a later version"}', expected_revision=0)
    await refused_soon(gateway)
    key = await new_tenant(headrace, gateway, "acme")
    assert await is_let_in(gateway, key)
    removed = await headrace.json("tenant", "remove", "newer")
    assert removed == {"tenant": "newer", "num_requests": 0, "num_batches": 0, "num_files": 0}
    await headrace.run("tenant", "remove", "acme")
    await let_in_soon(gateway, None)
    assert (await read_entries(running.bus))["tenants.newer"].problem == ""


async def test_before_the_configuration_was_read_nobody_is_let_in(
    running: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ConfigView._read

    async def fails(view: ConfigView) -> None:
        raise BrokerUnavailableError("away")

    monkeypatch.setattr(ConfigView, "_read", fails)
    gateway = await running.gateway()
    assert (await ask(gateway, "/readyz"))[0] == 503
    assert (await ask(gateway, "/healthz"))[0] == 200
    status, body = await ask(gateway, "/v1/models")
    assert (status, body["error"]["code"]) == (500, "internal")
    monkeypatch.setattr(ConfigView, "_read", read)
    await let_in_soon(gateway, None)
    assert (await ask(gateway, "/readyz"))[0] == 200
