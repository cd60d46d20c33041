"""The option that makes the simulation longer."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulation-examples", type=int, default=None, help="random schedules to play, others at each run"
    )
