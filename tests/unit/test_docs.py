"""What the documents say is so: links resolve, and names, settings, states, codes and commands exist."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from headrace import settings
from headrace.cli.app import command
from headrace.schemas import subjects
from headrace.schemas.events import EVENT_KINDS
from headrace.schemas.openai import OPERATIONS, InferenceRequest, RequestLimits, parse_request
from headrace.schemas.refusals import CODES
from headrace.schemas.states import TERMINAL, TRANSITIONS
from headrace.schemas.subjects import Names, QueueName

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
DECISIONS = sorted((ROOT / "docs/adr").glob("*.md"))
MAX_DECISION_LINES = 60
MAX_EXAMPLE_LINES = 50

LINK = re.compile(r"\]\(([^)\s]+)\)")
EDGE = re.compile(r"^ *(\[\*\]|\w+) --> (\[\*\]|\w+)(?:: (.+))?$", re.MULTILINE)
SUBJECT = re.compile(r"(?:<p>|_INBOX)(?:\.(?:[a-z]+|<[a-z]+>))+")
STREAM = re.compile(r"<P>_\w+(?:<[a-z]+>)?")
HEADER = re.compile(r"\b(?:Headrace|Nats)-[A-Z][A-Za-z-]+")
CODE = re.compile(r"`([a-z_]+)`")


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def rows(document: Path, first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins with that column."""
    lines = iter(document.read_text().splitlines())
    header = next(line for line in lines if line.startswith(f"| {first_column} |"))
    width = header.count("|") - 1
    next(lines)
    table = [line.strip("|").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]
    assert all(len(cells) == width for cells in table)
    return [[cell.strip() for cell in cells] for cells in table]


def anchors(document: Path) -> set[str]:
    """Fragments of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def known_subjects() -> set[str]:
    """Every subject of the deployment `<p>`, with its parts as placeholders."""
    names = Names(prefix="<p>")
    model, queue = "model", QueueName("<pool>", "<lane>", "<queue>")  # type: ignore[arg-type]
    made = [
        names.infer("<tenant>", "<op>", model),
        names.jobs(model, queue),
        names.wake(model, queue),
        names.log("<tenant>", "<job>").replace(".log.0.", ".log.<shard>."),
        names.dead("<tenant>", model, "<job>"),
        names.cancel("<tenant>", "<job>"),
        names.status("<tenant>", "<job>"),
        names.ended("<tenant>", "<job>"),
        names.tokenize(model),
        names.ctl("<worker>"),
        names.monitor_state(),
        names.metrics(),
        names.job_inbox("<tenant>", "<job>"),
        names.batch_result("<tenant>", "<batch>", 0).replace(".0", ".<line>"),
    ]
    return {re.sub(r"(?<=\.)model\b", "<model>", subject) for subject in made}


def known_streams() -> set[str]:
    names = Names(prefix="<p>")
    jobs, log = names.jobs_stream("model").replace("_model", "_<model>"), names.log_stream(0).replace("_0", "_<shard>")
    buckets = {names.workers_bucket, names.config_bucket, names.usage_bucket, names.batches_bucket, names.files_store,
               names.instances_bucket}  # fmt: skip
    return {jobs, log, names.dead_stream, names.batch_stream, *buckets}


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Every `headrace …` in code of the documents, as its source and its words."""
    for document in DOCUMENTS:
        text = document.read_text()
        spans = [line for block in blocks(document, "sh") for line in block.splitlines()]
        spans += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
        for span in spans:
            words = shlex.split(span, comments=True) if "headrace" in span and "'" not in span else []
            words = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=\S*", word), words))
            if words[:1] == ["headrace"] and len(words) > 1:
                yield f"{named(document)}: {span}", words[1:]


COMMANDS = list(shown_commands())


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_relative_link_resolves(document: Path) -> None:
    broken = []
    for link in LINK.findall(document.read_text()):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or not target.is_relative_to(ROOT) or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_document_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    to_see = [README]
    while to_see:
        document = to_see.pop()
        seen.add(document)
        for link in LINK.findall(document.read_text()):
            target = (document.parent / link.partition("#")[0]).resolve()
            found = sorted(target.glob("*.md")) if target.is_dir() and "docs" in target.parts else [target]
            to_see += [path for path in found if path.suffix == ".md" and path.exists() and path not in seen]
    assert seen >= set(DOCUMENTS)


def test_diagram_of_states_is_the_table_of_transitions() -> None:
    (diagram,) = [block for block in blocks(ARCHITECTURE, "mermaid") if block.startswith("stateDiagram-v2")]
    drawn = EDGE.findall(diagram)
    assert len(drawn) == len(diagram.splitlines()) - 1, "a line of the diagram is no edge"
    steps = [(before, event, after) for before, after, label in drawn if label for event in label.split(", ")]
    assert sorted(steps) == sorted((before, event, after) for (before, event), after in TRANSITIONS.items())
    assert [(before, after) for before, after, _ in drawn if before == "[*]"] == [("[*]", "queued")]
    assert {before for before, after, _ in drawn if after == "[*]"} == TERMINAL


@pytest.mark.parametrize("document", [*DOCUMENTS, *PROGRAMS], ids=named)
def test_every_variable_named_is_a_setting(document: Path) -> None:
    known = {variable for variable, _, _ in settings.describe()} | {"HEADRACE_CONFIG"}
    assert set(re.findall(r"\bHEADRACE_[A-Z_]+", document.read_text())) <= known


def test_table_of_settings_has_all_with_their_defaults_and_ranges() -> None:
    told = [(cells[0].strip("`"), cells[1], cells[2]) for cells in rows(README, "variable")]
    assert told == settings.describe()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_subject_and_stream_named_exists(document: Path) -> None:
    text = document.read_text()
    assert set(SUBJECT.findall(text)) <= known_subjects()
    assert set(STREAM.findall(text)) <= known_streams()


@pytest.mark.parametrize("document", [*DOCUMENTS, *PROGRAMS], ids=named)
def test_every_header_named_exists(document: Path) -> None:
    known = {value for name, value in vars(subjects).items() if name.startswith("HDR_")}
    assert set(HEADER.findall(document.read_text())) <= known


def test_contract_names_every_request_header_event_and_operation() -> None:
    contract = {cells[0]: cells[1] for cells in rows(ARCHITECTURE, "name")}
    asked = {
        subjects.HDR_ID,
        subjects.HDR_NEW_ID,
        subjects.HDR_PRIORITY,
        subjects.HDR_POOL,
        subjects.HDR_QUEUE_TIMEOUT,
        subjects.HDR_DEADLINE,
        subjects.HDR_FALLBACK,
    }
    assert set(HEADER.findall(contract["request headers"])) == asked
    assert set(CODE.findall(contract["events"].partition(";")[0])) == EVENT_KINDS
    (ingress,) = [meaning for name, meaning in contract.items() if "infer" in name]
    assert set(CODE.findall(ingress)) - {"op"} == set(OPERATIONS)


def test_table_of_errors_is_the_table_of_codes() -> None:
    told = {code: int(cells[1]) for cells in rows(ARCHITECTURE, "code") for code in CODE.findall(cells[0])}
    assert told == {code: info.status for code, info in CODES.items()}


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=[source for source, _ in COMMANDS])
def test_every_command_shown_exists_with_its_options(words: list[str]) -> None:
    context = click.Context(command, info_name="headrace")
    current: click.Command = command
    rest = list(words)
    while isinstance(current, click.Group) and rest:
        name = rest.pop(0)
        found = current.get_command(context, name)
        assert found is not None, f"no command {name}"
        current = found
    options = {option for parameter in current.params for option in parameter.opts} | {"--help"}
    assert {word for word in rest if word.startswith("-") and " " not in word} <= options


def test_the_line_for_the_nats_command_is_a_good_request() -> None:
    (line,) = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("nats req ")]
    _, _, subject, body, *_ = shlex.split(line)
    ingress = Names().parse_infer(subject)
    assert ingress is not None
    assert ingress.op == "chat"
    assert isinstance(parse_request("chat", body.encode(), limits=RequestLimits()), InferenceRequest)


def test_the_program_of_the_readme_is_short() -> None:
    (program,) = blocks(README, "python")
    compile(program, "README.md", "exec")
    assert len([line for line in program.splitlines() if line]) <= 10


def test_the_commands_that_set_up_stand_alone() -> None:
    alone = [block.strip() for block in blocks(README, "sh")]
    assert {"make demo", "make test"} <= set(alone)


@pytest.mark.parametrize("decision", DECISIONS, ids=named)
def test_a_decision_has_its_parts_and_is_short(decision: Path) -> None:
    text = decision.read_text()
    number = int(decision.name[:4])
    assert text.startswith(f"# {number}. ")
    assert "\n**Status:** " in text
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences", "Alternatives"]
    assert len(text.splitlines()) <= MAX_DECISION_LINES


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [int(decision.name[:4]) for decision in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_an_example_is_short(program: Path) -> None:
    assert len(program.read_text().splitlines()) <= MAX_EXAMPLE_LINES


@pytest.mark.parametrize("document", [*DOCUMENTS, *PROGRAMS], ids=named)
def test_no_document_names_a_place_of_one_machine(document: Path) -> None:
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|Users)/", document.read_text())
