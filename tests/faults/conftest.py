"""Options of the fault tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-seed", type=int, default=None, metavar="SEED",
        help="play the random fault schedule of this seed alone (give tests/faults on the command line too)",
    )  # fmt: skip
    parser.addoption(
        "--batch-lines", type=int, default=200, metavar="N",
        help="lines of the batch that outlives every part (give tests/faults on the command line too)",
    )  # fmt: skip


@pytest.fixture
def num_batch_lines(pytestconfig: pytest.Config) -> int:
    """How long the batch is through which every part is killed."""
    return int(pytestconfig.getoption("--batch-lines", 200))


@pytest.fixture
def fault_seed(pytestconfig: pytest.Config) -> int | None:
    """The seed to replay, None for the bounded set."""
    seed = pytestconfig.getoption("--fault-seed", None)
    return int(seed) if seed is not None else None
