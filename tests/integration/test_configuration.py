"""The config bucket: written by the command, followed live, never deaf, never led astray by a bad value."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from headrace.bus.configuration import ConfigView, read_entries, read_model
from headrace.bus.connection import Bus, Refused, Stored
from headrace.bus.keyvalue import Bucket
from headrace.bus.provision import apply_queue_limit, ensure_jobs_stream, provision
from headrace.cli.app import command
from headrace.schemas.config import ModelConfig, TenantConfig

WITHIN_S = 30.0
FILE = """
[tenants.acme]
weight = 3
max_in_flight = 20

[models."org/m-3.1"]
queue_limit = 500
pools = [{ name = "long", lends_to = ["default"] }]
rules = [{ pool = "long", min_prompt_tokens = 8192 }]

[aliases.chat]
targets = [{ model = "org/m-3.1" }]
"""


@pytest_asyncio.fixture
async def view(bus: Bus) -> AsyncIterator[ConfigView]:
    following = ConfigView(bus)
    async with following.running():
        yield following


async def write(bus: Bus, key: str, value: bytes | None) -> None:
    bucket = Bucket(bus, bus.names.config_bucket)
    seen = await bucket.get(key)
    revision = seen.revision if seen is not None else 0
    if value is None:
        result = await bucket.remove(key, expected_revision=revision)
    else:
        result = await bucket.put(key, value, expected_revision=revision)
    assert isinstance(result, Stored)


async def changed(view: ConfigView) -> None:
    async with asyncio.timeout(WITHIN_S):
        await view.changed.wait()
    view.changed.clear()


async def max_messages(bus: Bus, model: str) -> int:
    info = json.loads(await bus.api(f"STREAM.INFO.{bus.names.jobs_stream(model)}"))
    return int(info["config"]["max_msgs"])


async def run(bus: Bus, *words: str) -> Result:
    """The command in a thread: it has an event loop of its own."""
    options = ["--nats-url", bus.url, "--prefix", bus.names.prefix]
    return await asyncio.to_thread(CliRunner().invoke, command, [*options, *words])


async def test_a_change_is_seen_at_once_and_so_is_its_removal(bus: Bus, view: ConfigView) -> None:
    assert view.config.tenants == {}
    await write(bus, "tenants.a", b'{"weight":3}')
    await changed(view)
    assert view.config.tenant("a") == TenantConfig(weight=3)
    assert view.tenants == {"default", "a"}
    await write(bus, "tenants.a", None)
    await changed(view)
    assert view.config.tenants == {}


async def test_what_is_there_before_the_start_is_seen(bus: Bus) -> None:
    await write(bus, "models.a=2Fb", b'{"on_no_worker":"refuse"}')
    for weight in range(1, 20):  # more than the history of a key
        await write(bus, "tenants.a", b'{"weight":%d}' % weight)
    following = ConfigView(bus)
    async with following.running():
        assert following.config.models == {"a/b": ModelConfig(on_no_worker="refuse")}
        assert following.config.tenant("a").weight == 19


async def test_a_bad_value_is_logged_with_its_key_and_the_one_before_stays(
    bus: Bus, view: ConfigView, caplog: pytest.LogCaptureFixture
) -> None:
    await write(bus, "tenants.a", b'{"weight":3}')
    await changed(view)
    with caplog.at_level(logging.ERROR):
        await write(bus, "tenants.a", b'{"weight":0}')
        await changed(view)
        await write(bus, "tenants.b", b"{")
        await changed(view)
        await write(bus, "people.b", b"{}")
        await changed(view)
    assert view.config.tenants == {"a": TenantConfig(weight=3)}
    assert [record.getMessage() for record in caplog.records] == [
        "configuration: tenants.a.weight is 0; allowed: a number from 0.01 to 1000; the value before it stays",
        "configuration: tenants.b is not JSON; it is left out",
        "configuration: unknown key 'people.b'; allowed: tenants.NAME, models.NAME, aliases.NAME; it is left out",
    ]
    await write(bus, "tenants.a", b'{"weight":4}')
    await changed(view)
    assert view.config.tenant("a").weight == 4


async def test_a_lost_push_is_made_up_for(bus: Bus, view: ConfigView, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(message: Any) -> None:
        pass

    monkeypatch.setattr(view, "_on_push", deaf)
    following = ConfigView(bus)
    monkeypatch.setattr(following, "_on_push", deaf)
    async with following.running():
        await write(bus, "tenants.a", b"{}")
        await changed(following)
        assert set(following.config.tenants) == {"a"}


async def test_more_keys_than_one_listing_holds_are_all_seen(bus: Bus) -> None:
    bucket = Bucket(bus, bus.names.config_bucket)
    await asyncio.gather(*(bucket.put(f"tenants.t{n}", b"{}", expected_revision=0) for n in range(1_100)))
    following = ConfigView(bus)
    async with following.running():
        assert len(following.config.tenants) == 1_100


async def test_a_write_on_an_old_revision_loses(bus: Bus) -> None:
    await write(bus, "tenants.a", b"{}")
    result = await Bucket(bus, bus.names.config_bucket).put("tenants.a", b"{}", expected_revision=0)
    assert isinstance(result, Refused)
    assert result.is_lost_race


async def test_queue_limits_reach_the_streams(bus: Bus) -> None:
    await write(bus, "models.new", b'{"queue_limit":7}')
    assert (await read_model(bus, "new")).queue_limit == 7
    await ensure_jobs_stream(bus, "new")
    assert await max_messages(bus, "new") == 7
    assert await apply_queue_limit(bus, "new", 9)
    assert await max_messages(bus, "new") == 9
    assert not await apply_queue_limit(bus, "new", 9)
    assert not await apply_queue_limit(bus, "nobody", 9)
    (made,) = [one for one in await provision(bus, models=("new",)) if one.stream == bus.names.jobs_stream("new")]
    assert made.changes == ("max_msgs: 9 → 7",)


async def test_the_command_applies_a_file_and_gives_it_back(bus: Bus, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    dry = await run(bus, "config", "apply", str(file), "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert await read_entries(bus) == {}
    applied = await run(bus, "config", "apply", str(file))
    assert applied.exit_code == 0, applied.output
    assert applied.output == dry.output
    assert "added     tenants.acme\n    + max_in_flight = 20\n    + weight = 3.0\n" in applied.output
    assert 'added     models."org/m-3.1"\n' in applied.output
    assert await max_messages(bus, "org/m-3.1") == 500

    again = await run(bus, "config", "apply", str(file), "--json")
    assert {change["action"] for change in json.loads(again.output)} == {"unchanged"}
    shown = await run(bus, "config", "get")
    file.write_text(shown.output)
    assert json.loads((await run(bus, "config", "apply", str(file), "--json")).output) == json.loads(again.output)
    as_json = tmp_path / "config.json"
    as_json.write_text((await run(bus, "config", "get", "--json")).output)
    assert json.loads((await run(bus, "config", "apply", str(as_json), "--json")).output) == json.loads(again.output)

    file.write_text("[tenants.acme]\nweight = 2\n")
    pruned = await run(bus, "config", "apply", str(file), "--prune")
    assert "changed   tenants.acme\n    - max_in_flight = 20\n    - weight = 3.0\n    + weight = 2.0\n" in pruned.output
    assert "removed   aliases.chat" in pruned.output
    assert json.loads((await run(bus, "config", "get", "--json")).output) == {"tenants": {"acme": {"weight": 2.0}}}
    file.write_text(FILE)  # a key that was removed is written again
    assert (await run(bus, "config", "apply", str(file))).exit_code == 0


async def test_a_deployment_that_is_not_provisioned_is_named_so(broker_url: str, prefix: str) -> None:
    words = ["--nats-url", broker_url, "--prefix", prefix, "config", "get"]
    result = await asyncio.to_thread(CliRunner().invoke, command, words)
    assert result.exit_code == 1
    assert "run `headrace provision`" in result.output


async def test_a_bad_file_changes_nothing_and_says_where(bus: Bus, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[tenants.a]\n[tenants.b]\nmax_in_flight = 0\n")
    refused = await run(bus, "config", "apply", str(file))
    assert refused.exit_code == 2
    assert "tenants.b.max_in_flight is 0; allowed: a whole number from 1 to 1000000000" in refused.output
    assert await read_entries(bus) == {}
    assert (await run(bus, "config", "get")).output == ""
