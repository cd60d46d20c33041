"""The simulator's rules, report, charts and command."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from headrace.bench.simulate import simulate_command
from headrace.discipline.affinity import landmarks
from headrace.simulator.charts import Chart, Line, svg
from headrace.simulator.fairness import fair_shares, jain_index
from headrace.simulator.prefixhints import hashes_of
from headrace.simulator.queues import Queues
from headrace.simulator.report import spread
from headrace.simulator.requests import Request
from headrace.simulator.traces import Arrival

ROOT = Path(__file__).resolve().parents[2]
PLOTS = sorted((ROOT / "docs/plots").glob("*.svg"))


def test_what_is_handed_back_comes_before_the_others_as_it_came_back() -> None:
    queues = Queues({"x": 2.0})
    requests = [
        Request(index, Arrival(time_s=index, prompt_tokens=9, output_tokens=1, tenant="x"), 16) for index in range(4)
    ]
    for request in requests:
        queues.put(request)
    name = requests[0].queue
    assert [queues.fetch(name) for _ in range(3)] == requests[:3]
    for request in (requests[1], requests[0]):
        queues.put(request, is_handed_back=True)
    (view,) = queues.views(now_s=5.0)
    assert (view.num_waiting, view.oldest_wait_s, view.weight) == (queues.num_waiting, 4.0, 2.0) == (3, 4.0, 2.0)
    assert [queues.fetch(name) for _ in range(4)] == [requests[1], requests[0], requests[3], None]
    assert queues.views(now_s=5.0) == []


def test_hashes_are_equal_as_far_as_the_prefix_goes() -> None:
    arrival = Arrival(time_s=0, prompt_tokens=2048, output_tokens=1, prefix="p", prefix_tokens=1100)
    first, second = hashes_of(1, arrival), hashes_of(2, arrival)
    assert len(first) == 8
    assert [one == other for one, other in zip(first, second, strict=True)] == [True] * 4 + [False] * 4
    assert landmarks(first) == [first[0], first[1], first[3], first[7]]


def test_fair_shares_give_nobody_more_than_it_asks_for() -> None:
    assert fair_shares({"a": 10, "b": 100, "c": 0}, 60, {}) == {"a": 10, "b": 50}
    assert fair_shares({"a": 100, "b": 100}, 80, {"a": 3.0}) == {"a": 60, "b": 20}


@pytest.mark.parametrize(("started_s", "expected"), [([1, 2], 1.0), ([1, 15], 0.5)])
def test_fairness_is_one_for_equal_shares_and_one_half_if_one_of_two_gets_all(
    started_s: list[float], expected: float
) -> None:
    requests = []
    for tenant, at_s in zip(("a", "b", "a", "b"), [*started_s, 25, 25], strict=True):
        request = Request(0, Arrival(time_s=0, prompt_tokens=9, output_tokens=1, tenant=tenant), 16)
        request.started_s = at_s
        requests.append(request)
    found = jain_index(requests, weights={})
    assert found is not None
    if expected == 1.0:
        assert found == pytest.approx(1.0)
    else:
        assert found == pytest.approx((0.5 + 0.8) / 2, abs=0.2)
    assert jain_index(requests[:1], weights={}) is None


def test_a_spread_is_made_of_samples() -> None:
    found = spread(range(1, 201))
    assert found is not None
    assert (found.p50, found.p99, found.max) == (100, 198, 200)
    assert spread([]) is None


def test_a_chart_is_the_same_bytes_and_well_formed() -> None:
    lines = (Line("a < b", ((0.3, 0.02), (0.5, 4.0))), Line("c", ((0.3, 1.0), (0.5, 90.0))))
    for chart in (
        Chart(title="T & U", x_label="x", y_label="y", lines=lines, is_log=True),
        Chart(title="T", x_label="x", y_label="y", lines=lines, y_range=(0.0, 50.0)),
        Chart(title="T", x_label="x", y_label="y", lines=(Line("flat", ((1.0, 0.0),)),)),
    ):
        drawn = svg(chart)
        assert drawn == svg(chart)
        root = ElementTree.fromstring(drawn)
        assert root.tag.endswith("svg")
        assert "nan" not in drawn


def test_the_documentation_shows_every_plot() -> None:
    text = (ROOT / "docs/simulator.md").read_text()
    assert len(PLOTS) >= 4
    for plot in PLOTS:
        assert f"(plots/{plot.name})" in text
        ElementTree.parse(plot)


def test_the_command_saves_and_replays_a_trace(tmp_path: Path) -> None:
    saved = tmp_path / "trace.jsonl"
    few = ["--workers", "2", "--policy", "headrace", "--policy", "scoring", "--json"]
    made = CliRunner().invoke(
        simulate_command, ["--scenario", "lanes", "--duration", "5", "--save-trace", str(saved), *few]
    )
    assert made.exit_code == 0, made.output
    first = json.loads(made.stdout)
    assert [report["policy"] for report in first["reports"]] == ["headrace", "scoring"]
    replayed = CliRunner().invoke(simulate_command, ["--trace", str(saved), *few])
    again = json.loads(replayed.stdout)
    assert again["reports"] == first["reports"]
    assert again["load"] is None
    assert again["num_arrivals"] == len(saved.read_text().splitlines())


def test_the_command_shows_tables(tmp_path: Path) -> None:
    shown = CliRunner().invoke(
        simulate_command, ["--duration", "5", "--workers", "2", "--policy", "headrace", "--weight", "light=2"]
    )
    assert shown.exit_code == 0, shown.output
    assert "preemptions" in shown.stdout
    assert "Tenant light, lane normal, seconds" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--weight", "light"], "expected something like light=3"),
        (["--weight", "light=0"], "a weight above 0"),
        (["--policy", "magic"], "'magic' is not one of"),
        (["--trace", "{bad}"], "line 1: "),
    ],
)
def test_the_command_names_what_is_wrong(tmp_path: Path, arguments: list[str], what: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    result = CliRunner().invoke(simulate_command, [each.replace("{bad}", str(bad)) for each in arguments])
    assert result.exit_code != 0
    assert what in " ".join(result.output.split())


def test_a_warmup_that_leaves_nothing_is_refused() -> None:
    result = CliRunner().invoke(simulate_command, ["--duration", "5", "--warmup", "5"])
    assert result.exit_code == 2
    assert "leaves nothing of --duration 5" in result.output
