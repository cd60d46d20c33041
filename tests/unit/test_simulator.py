"""The simulator's rules, report, charts and command."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from headrace.bench.simulate import simulate_command
from headrace.discipline.affinity import landmarks
from headrace.simulator.ahead import Ahead, Candidate, choose, ripe_in_s
from headrace.simulator.charts import Chart, Line, svg
from headrace.simulator.fairness import fair_shares, jain_index
from headrace.simulator.prefixhints import hashes_of
from headrace.simulator.queues import Queues
from headrace.simulator.report import spread
from headrace.simulator.requests import Request
from headrace.simulator.traces import Arrival

ROOT = Path(__file__).resolve().parents[2]
PLOTS = sorted((ROOT / "docs/plots").glob("*.svg"))


def test_the_warmest_is_taken_and_what_is_warm_elsewhere_left_for_a_while() -> None:
    ahead = Ahead(patience_s=0.25, head_every=4, head_after_s=1.0)

    def chosen(*heads: tuple[str, float, bool], prefixes: str = "ab", num_passed: int = 0) -> int | None:
        candidates = [
            Candidate(hashes=tuple(hashes), waited_s=waited_s, is_for_other=is_for_other)
            for hashes, waited_s, is_for_other in heads
        ]
        return choose(ahead, candidates, frozenset(prefixes), num_passed=num_passed)

    waiting = (("x", 2.0, True), ("ay", 0.5, True), ("ab", 0.4, False), ("ab", 0.1, False))
    assert chosen(*waiting) == 2
    assert chosen(*waiting, num_passed=3) == 0
    assert chosen(("x", 0.9, False), *waiting[1:], num_passed=3) == 2
    assert chosen(*waiting, prefixes="q") == 0
    assert chosen(("x", 0.2, True), ("y", 0.1, False), prefixes="q") == 1
    assert chosen(("x", 0.2, True), ("y", 0.1, True), prefixes="q") is None
    assert chosen() is None
    assert ripe_in_s(ahead, [Candidate(hashes=(), waited_s=waited_s) for waited_s in (0.2, 0.1)]) == pytest.approx(0.05)


def test_what_is_handed_back_stands_at_the_head_again() -> None:
    queues = Queues({"x": 2.0})
    requests = [
        Request(index, Arrival(time_s=index, prompt_tokens=9, output_tokens=1, tenant="x"), 16) for index in range(3)
    ]
    for request in requests:
        queues.put(request)
    name = requests[0].queue
    taken = queues.fetch(name)
    assert taken is requests[0]
    queues.put(taken, at_head=True)
    assert queues.heads(name, 2) == requests[:2]
    assert queues.fetch(name, 3) is None
    (view,) = queues.views(now_s=5.0)
    assert (view.num_waiting, view.oldest_wait_s, view.weight) == (queues.num_waiting, 5.0, 2.0) == (3, 5.0, 2.0)
    assert queues.fetch(name, 1) is requests[1]


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
