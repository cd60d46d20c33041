"""The served OpenAPI document: it is valid and complete, and it holds for requests that nobody thought of."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest
from openai import AsyncOpenAI

from headrace.batch import BatchKeeper
from headrace.bus.configuration import ConfigView
from headrace.gateway.app import routes_of
from headrace.gateway.openapi import document
from headrace.gateway.watching import OpenRequests
from headrace.schemas.refusals import CODES
from tests.deployment import MODEL, deployment, sim

SEED = "20261130"
CONFIG = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503", "504"]
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance"
)
LIMIT_S = 60.0
JOB = "known"
NEED_OTHERS = ("stream_options", "best_of", "tool_choice", "function_call", "top_logprobs")


async def served(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as response:
        assert response.status == 200
        document: dict[str, Any] = await response.json()
        return document


async def kept(url: str) -> dict[str, str]:
    """A file and a batch of it."""
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "p"}}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        file = await client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return {"file": file.id, "batch": batch.id}


def narrowed(document: dict[str, Any], known_ids: dict[str, str]) -> dict[str, Any]:
    """The document with ids that are there, by their names in paths, so that requests come further than to these.

    Parameters that need others beside them are left out: a schema of single ones makes hardly a pair that fits.
    """
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"enum": [MODEL]}
            for parameter in NEED_OTHERS:
                schema["properties"].pop(parameter, None)
            if "stream" in schema["properties"]:
                schema["required"].append("stream")
    for methods in document["paths"].values():
        for operation in methods.values():
            body = operation.get("requestBody", {"content": {}})["content"].get("application/json", {})
            for example in body.get("examples", {}).values():
                example["value"]["model"] = MODEL
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    known = {"enum": [known_ids[parameter["name"]]]}
                    parameter["schema"] = {"anyOf": [known, parameter["schema"]]}
    return document


@pytest.mark.timeout(LIMIT_S + 30)
async def test_no_request_finds_a_500_or_what_is_not_documented(broker_url: str, prefix: str, tmp_path: Path) -> None:
    async with deployment(broker_url, prefix, queue_timeout_s=10, deadline_s=20) as running:
        await running.worker(sim(tokens_per_second=0, max_model_len=256, default_tokens=8), max_concurrency=16)
        url = (await running.gateway()).url
        await running.client.complete(model=MODEL, prompt="hello", max_tokens=4, job_id=JOB)
        known_ids = {"model": MODEL, "job": JOB, **await kept(url)}
        (tmp_path / "openapi.json").write_text(json.dumps(narrowed(await served(url), known_ids)))
        (tmp_path / "schemathesis.toml").write_text(CONFIG)
        argv = (
            "--config-file", "schemathesis.toml", "run", "openapi.json", "--url", url, "--checks", CHECKS,
            "--seed", SEED, "--max-examples", "20", "--phases", "examples,fuzzing", "--mode", "all",
            "--generation-database", "none", "--suppress-health-check", "all", "--no-color", "--workers", "1",
            "--max-time", "20",
        )  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", *argv,
            cwd=tmp_path, env={**os.environ, "NO_PROXY": "127.0.0.1"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(LIMIT_S):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()


async def test_what_the_document_names_is_served_and_no_other_method(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        url = (await running.gateway()).url
        assert await served(url) == json.loads(json.dumps(document()))
        async with aiohttp.ClientSession() as session:
            for path, methods in document()["paths"].items():
                asked = re.sub(r"\{\w+\}", "none", path)
                async with session.options(url + asked) as response:
                    assert response.status == 405, path
                    allowed = {method.strip().lower() for method in response.headers["allow"].split(",")}
                    assert allowed - {"head"} == set(methods), path


async def test_every_url_that_is_served_is_in_the_document(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        bus = running.bus
        routes = routes_of(bus, ConfigView(bus), OpenRequests(limit=1), BatchKeeper(bus, is_served=bool))
        served_paths = {each.path.replace(":path}", "}") for each in routes}
        assert served_paths == set(document()["paths"])


def test_the_document_is_a_valid_one_and_its_schemas_are_schemas() -> None:
    described = document()
    jsonschema_rs.validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema", **described["components"]})
    for schema in described["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    text = json.dumps(described)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(described["components"]["schemas"])


def test_every_code_is_an_answer_somewhere() -> None:
    text = json.dumps(document())
    assert [code for code in CODES if f"`{code}`" not in text] == []
