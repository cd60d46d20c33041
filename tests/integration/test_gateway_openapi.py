"""The served OpenAPI document: it is valid and complete, and it holds for requests that nobody thought of."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

from headrace.gateway.openapi import document
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


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the model and a job that are there, so that requests come further than to their names.

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
            body = operation.get("requestBody", {"content": {"application/json": {}}})["content"]["application/json"]
            for example in body.get("examples", {}).values():
                example["value"]["model"] = MODEL
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    known = {"enum": [{"model": MODEL, "job": JOB}[parameter["name"]]]}
                    parameter["schema"] = {"anyOf": [known, parameter["schema"]]}
    return document


@pytest.mark.timeout(LIMIT_S + 30)
async def test_no_request_finds_a_500_or_what_is_not_documented(broker_url: str, prefix: str, tmp_path: Path) -> None:
    async with deployment(broker_url, prefix, queue_timeout_s=10, deadline_s=20) as running:
        await running.worker(sim(tokens_per_second=0, max_model_len=256, default_tokens=8), max_concurrency=16)
        url = (await running.gateway()).url
        await running.client.complete(model=MODEL, prompt="hello", max_tokens=4, job_id=JOB)
        (tmp_path / "openapi.json").write_text(json.dumps(narrowed(await served(url))))
        (tmp_path / "schemathesis.toml").write_text(CONFIG)
        argv = (
            "--config-file", "schemathesis.toml", "run", "openapi.json", "--url", url, "--checks", CHECKS,
            "--seed", SEED, "--max-examples", "20", "--phases", "examples,fuzzing", "--mode", "all",
            "--generation-database", "none", "--suppress-health-check", "all", "--no-color", "--workers", "1",
            "--max-time", "35",
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
                asked = path.replace("{job}", "none").replace("{model}", "none")
                async with session.options(url + asked) as response:
                    assert response.status == 405, path
                    allowed = {method.strip().lower() for method in response.headers["allow"].split(",")}
                    assert allowed - {"head"} == set(methods), path


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
