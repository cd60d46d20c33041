"""Which filters of consumers overlap."""

import pytest

from headrace.bus.consumers import are_overlapping


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a.b.c", "a.b.c", True),
        ("a.b.c", "a.b.d", False),
        ("a.b.c", "a.b", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "*.b.*", True),
        ("a.*.c", "a.b.d", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a.b.c", True),
        ("a.b.>", "a.*.c", True),
        ("a.b.>", "a.c.>", False),
    ],
)
def test_overlap(one: str, other: str, expected: bool) -> None:
    assert are_overlapping(one, other) is expected
    assert are_overlapping(other, one) is expected
