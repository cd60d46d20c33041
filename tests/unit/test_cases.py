"""The table of cases in docs/cases.md and the tests that name them say the same."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/cases.md"
GROUPS = ("REQ", "MEM", "STR", "WRK", "NAT", "API", "OBS", "SEC", "OPS")
CASE = re.compile(rf"\b(?:{'|'.join(GROUPS)})-\d+\b")
ROW = re.compile(r"^\| ([A-Z]{3}-\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
LINK = re.compile(r"\[(test_\w+)\]\(\.\./(tests/\w+/test_\w+\.py)\)")
REQUIRED = [
    *(f"REQ-{number}" for number in (2, 3, 4, 5, 7, 8, 9)),
    "API-2",
    "SEC-4",
    "SEC-2",
    *(f"STR-{number}" for number in (1, 2, 3, 5, 7, 8, 9)),
    *(f"WRK-{number}" for number in (1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13)),
    *(f"NAT-{number}" for number in range(2, 12)),
    *(f"MEM-{number}" for number in (1, 2, 3, 4, 5, 7, 8, 9)),
    *(f"OBS-{number}" for number in (1, 2, 3, 5)),
    *(f"OPS-{number}" for number in (2, 3, 4)),
    "SEC-3",
]


def named_by_tests() -> dict[str, set[tuple[str, str]]]:
    """By case, the tests (file, name) that name it beside their signature or in their docstring."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
            for case in CASE.findall(f"{head}\n{ast.get_docstring(node) or ''}"):
                found.setdefault(case, set()).add((path.relative_to(ROOT).as_posix(), node.name))
    return found


def told_by_table() -> dict[str, set[tuple[str, str]]]:
    return {
        case: {(path, name) for name, path in LINK.findall(tests)} for case, _, tests in ROW.findall(TABLE.read_text())
    }


@pytest.mark.parametrize("case", REQUIRED)
def test_a_case_has_a_test_that_names_it(case: str) -> None:
    assert named_by_tests().get(case)


def test_the_table_has_what_the_tests_name_and_nothing_else() -> None:
    assert told_by_table() == named_by_tests()
