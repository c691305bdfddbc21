"""Segments cover every layer once, in order, and repeated layers are compiled once."""

import numpy as np
import pytest

from kvjax.plan import LONGEST_PATTERN, Segment, segments


def layers_of(plan):
    """The layers in the order that the scans run them."""
    return [
        segment.first + repeat * segment.pattern + offset
        for segment in plan
        for repeat in range(segment.repeats)
        for offset in range(segment.pattern)
    ]


def compiled(plan):
    """How many layers are compiled."""
    return sum(segment.pattern for segment in plan)


def assert_covers(kinds):
    plan = segments(kinds)
    assert layers_of(plan) == list(range(len(kinds)))
    for segment in plan:
        assert 1 <= segment.pattern <= LONGEST_PATTERN and segment.repeats >= 1
        for layer in range(segment.first, segment.first + segment.pattern * segment.repeats):
            pattern = segment.first + (layer - segment.first) % segment.pattern
            assert kinds[layer] == kinds[pattern], (segment, layer)
    assert compiled(plan) <= len(kinds)
    return plan


@pytest.mark.parametrize("seed", range(40))
def test_random_layers_are_covered_once_in_order(seed):
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, rng.integers(1, 5), rng.integers(0, 60)).tolist()
    assert_covers(kinds)


@pytest.mark.parametrize("seed", range(10))
def test_random_patterns_are_found(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, LONGEST_PATTERN + 1))
    pattern = rng.permutation(size).tolist()  # repeats nothing inside itself
    plan = assert_covers(pattern * 7)
    assert plan == (Segment(first=0, pattern=size, repeats=7),)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_equal_layers_are_compiled_once(count):
    assert segments(["a"] * count) == (Segment(first=0, pattern=1, repeats=count),)


@pytest.mark.parametrize(
    "kinds, plan, layers",
    [
        ("LLLLLG" * 5, [(0, 6, 5)], 6),  # five local layers, one global
        ("LLLLLG" * 4 + "LL", [(0, 6, 4), (24, 1, 2)], 7),  # 26 layers, cut off
        ("LG" * 13, [(0, 2, 13)], 2),
        ("X" * 2 + "A" * 29 + "X", [(0, 1, 2), (2, 1, 29), (31, 1, 1)], 3),  # exempt ends
        ("D" * 3 + "M" * 58, [(0, 1, 3), (3, 1, 58)], 2),
        ("RRRN" * 9, [(0, 4, 9)], 4),
        ("XLLGLLGLLG", [(0, 1, 1), (1, 3, 3)], 4),
        ("ABCDEFGH", [(i, 1, 1) for i in range(8)], 8),
        ("A", [(0, 1, 1)], 1),
        ("", [], 0),
    ],
)
def test_literals(kinds, plan, layers):
    found = assert_covers(kinds)
    assert found == tuple(Segment(*segment) for segment in plan)
    assert compiled(found) == layers


def test_any_sequence_of_hashable_kinds():
    assert segments([("x", 1), ("x", 1)]) == segments((None, None)) == segments("AA")
