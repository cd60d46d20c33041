"""A page in somebody's browser does not get at a gateway on loopback, under any name; configured pages do."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.deployment import MODEL, Deployment, deployment

PAGE = "https://chat.example.com"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str, request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix, http_origins=getattr(request, "param", "")) as started:
        await started.worker()
        yield started


@pytest_asyncio.fixture
async def url(running: Deployment) -> str:
    return (await running.gateway()).url


async def asked(
    url: str, headers: dict[str, str], *, method: str = "POST", path: str = "/v1/chat/completions"
) -> tuple[int, Any, dict[str, str]]:
    """Status, error code if there is one, and headers of one request."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        body = HELLO if method == "POST" else None
        async with session.request(method, url + path, json=body, headers=headers) as response:
            answer = await response.json() if response.content_type == "application/json" else {}
            code = answer.get("error", {}).get("code")
            return response.status, code, {name.lower(): value for name, value in response.headers.items()}


async def test_a_page_is_refused_whatever_it_sends(running: Deployment, url: str) -> None:
    for origin in (PAGE, "http://localhost:3000", url, "null", ""):
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("DELETE", "/v1/jobs/any"),
            ("OPTIONS", "/v1/chat/completions"),
        ):
            headers = {"Origin": origin, "Access-Control-Request-Method": method}
            status, code, got = await asked(url, headers, method=method, path=path)
            assert (status, code) == (403, "origin_not_allowed"), (origin, method)
            assert not any(name.startswith("access-control") for name in got)
            assert got["x-request-id"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[::ffff", "10.0.0.1"])
async def test_a_name_that_was_rebound_to_loopback_is_refused(url: str, host: str) -> None:
    for path in ("/v1/models", "/healthz"):
        status, code, _ = await asked(url, {"Host": host}, method="GET", path=path)
        assert (status, code) == (403, "origin_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "127.1.2.3", "[::1]:8080", "a.localhost"])
async def test_names_of_loopback_are_let_in(url: str, host: str) -> None:
    assert (await asked(url, {"Host": host}))[0] == 200


async def test_without_a_configured_page_no_answer_is_readable_by_one(url: str) -> None:
    _, _, headers = await asked(url, {})
    assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("running", [f"http://localhost:3000, {PAGE}", "*"], indirect=True)
async def test_a_configured_page_may_use_it(running: Deployment, url: str) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    status, _, headers = await asked(url, preflight, method="OPTIONS")
    assert status == 204
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    status, _, headers = await asked(url, {"Origin": PAGE})
    assert status == 200
    assert headers["access-control-allow-origin"] == PAGE
    assert "origin" in headers["vary"].lower()
    assert "x-headrace-job" in headers["access-control-expose-headers"]
    assert (await asked(url, {"Host": "chat.example.com"}))[0] == 200
    if running.settings.http_origins != "*":
        assert (await asked(url, {"Origin": f"{PAGE}.evil.example"}))[0] == 403
        assert (await asked(url, {"Host": "evil.example"}))[0] == 403
