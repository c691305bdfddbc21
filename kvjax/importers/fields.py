"""Fields of a configuration that someone else wrote."""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import KvjaxError


def number(fields: Mapping[str, Any], name: str, *, default: float | None = None) -> float:
    """A positive number; `default` stands for an absent field, None: it must be there."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise KvjaxError(f"{name} is {value!r:.60}: expected a positive number")
    return float(value)


def count(fields: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    """A positive whole number."""
    value = number(fields, name, default=default)
    if value != int(value):
        raise KvjaxError(f"{name} is {value!r}: expected a whole number")
    return int(value)


def section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The fields inside a field; none if it is absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise KvjaxError(f"{name} is {value!r:.60}: expected an object")
    return value or {}
