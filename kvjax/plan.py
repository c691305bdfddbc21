"""How a list of layers becomes few scans: runs of a repeated pattern. No arrays."""

import dataclasses
from collections.abc import Hashable, Sequence

LONGEST_PATTERN = 8


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers first, first + 1, ...: `pattern` layers that repeat `repeats` times."""

    first: int
    pattern: int
    repeats: int


def segments(kinds: Sequence[Hashable], /) -> tuple[Segment, ...]:
    """Cover the layers with repeated patterns, greedily the one that covers most.

    A scan compiles its pattern once, so compile time follows the sum of the patterns, not the
    number of layers.

    Example:
      >>> segments("ABBCBBC")
      (Segment(first=0, pattern=1, repeats=1), Segment(first=1, pattern=3, repeats=2))
    """
    out, first = [], 0
    while first < len(kinds):
        best = Segment(first, 1, 1)
        for pattern in range(1, LONGEST_PATTERN + 1):
            repeats = _repeats(kinds, first, pattern)
            # Layers saved from being compiled.
            if (repeats - 1) * pattern > (best.repeats - 1) * best.pattern:
                best = Segment(first, pattern, repeats)
        out.append(best)
        first += best.pattern * best.repeats
    return tuple(out)


def _repeats(kinds: Sequence[Hashable], first: int, pattern: int) -> int:
    unit, repeats = kinds[first : first + pattern], 1
    while kinds[first + repeats * pattern : first + (repeats + 1) * pattern] == unit:
        repeats += 1
    return repeats
