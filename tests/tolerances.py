"""The only place with tolerances: three kinds of "equal", each with its reason.

exact      nothing was computed: moves, packing, ring arithmetic. Every bit, NaNs in place.
rounding   the same maths in another order. A few steps of the coarser dtype, of the row's scale.
quantised  something was thrown away. The caller derives the bound; there is no default.
"""

import enum

import jax
import ml_dtypes
import numpy as np


class Kind(enum.Enum):
    EXACT = "exact"
    ROUNDING = "rounding"
    QUANTISED = "quantised"


EXACT, ROUNDING, QUANTISED = Kind

# How many steps (eps of the dtype) two orders of the same maths may differ. float32: sums of
# hundreds of terms. The narrow ones: summed in float32, rounded once or twice on the way.
STEPS = {"float64": 64, "float32": 64, "float16": 4, "bfloat16": 4}


def assert_close(actual, desired, kind: Kind, *, bound=None, scale=None, depth: int = 1):
    """Assert that two arrays, or two pytrees of arrays, are equal in the sense of `kind`.

    Args:
      actual: what the code under test returned.
      desired: the expected value; plain numbers and lists will do.
      kind: EXACT, ROUNDING or QUANTISED.
      bound: QUANTISED only: the greatest absolute difference, a number or an array to broadcast.
      scale: ROUNDING only: the magnitude that was summed, where sums cancel; by default each
        row's (last axis) greatest absolute desired value.
      depth: ROUNDING only: how many times in a row such maths is applied, e.g. layers.

    Raises:
      AssertionError: with the leaf, the worst coordinate, and the max absolute and relative error.
    """
    if (bound is not None) != (kind is QUANTISED):
        raise TypeError(f"{kind.value} {'needs a' if bound is None else 'takes no'} bound")
    if kind is not ROUNDING and (scale is not None or depth != 1):
        raise TypeError(f"{kind.value} takes neither scale nor depth")
    if hasattr(actual, "dtype"):  # so that a list is one array, not a tree
        _assert_leaf("", actual, desired, kind, bound, scale, depth)
        return
    actual_leaves, actual_tree = jax.tree_util.tree_flatten_with_path(actual)
    desired_leaves, desired_tree = jax.tree.flatten(desired)
    assert actual_tree == desired_tree, f"structure {actual_tree}: expected {desired_tree}"
    for (path, leaf), wanted in zip(actual_leaves, desired_leaves, strict=True):
        _assert_leaf(jax.tree_util.keystr(path), leaf, wanted, kind, bound, scale, depth)


def _assert_leaf(name, actual, desired, kind, bound, scale, depth):
    typed = hasattr(desired, "dtype")
    actual, desired = np.asarray(actual), np.asarray(desired)
    assert actual.shape == desired.shape, f"{name} shape {actual.shape}: expected {desired.shape}"
    if kind is EXACT and typed:
        assert actual.dtype == desired.dtype, (
            f"{name} dtype {actual.dtype}: expected {desired.dtype}"
        )
    steps = _step(actual.dtype, desired.dtype if typed else actual.dtype) if kind is ROUNDING else 0
    # float64 holds every value of the narrower dtypes, and of integers up to 53 bits.
    wide_actual, wide_desired = actual.astype(np.float64), desired.astype(np.float64)
    same = (actual == desired) | (np.isnan(wide_actual) & np.isnan(wide_desired))
    with np.errstate(invalid="ignore"):  # inf - inf, where equal
        error = np.where(same, 0.0, np.abs(wide_actual - wide_desired))
    if kind is EXACT:
        same &= np.isnan(wide_actual) | (np.signbit(wide_actual) == np.signbit(wide_desired))
        allowed = np.asarray(-1.0)  # zero error is not enough: -0.0, integers beyond 53 bits
    elif kind is QUANTISED:
        allowed = np.asarray(bound, np.float64)
    else:
        allowed = depth * steps * np.asarray(_row_scale(wide_desired) if scale is None else scale)
    bad = ~(same | (error <= allowed))  # a NaN error is bad
    if not bad.any():
        return
    raise AssertionError(_report(name, wide_actual, wide_desired, error, allowed, bad, kind))


def _step(*dtypes) -> float:
    """The tolerance of the coarser dtype, relative to the scale."""
    names = [np.dtype(dtype).name for dtype in dtypes]
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        raise TypeError(f"rounding is for {', '.join(STEPS)}: got {unknown[0]}")
    return max(STEPS[name] * float(ml_dtypes.finfo(name).eps) for name in names)


def _row_scale(desired):
    finite = np.where(np.isfinite(desired), np.abs(desired), 0.0)
    return finite.max(axis=-1, keepdims=True, initial=0.0) if finite.ndim else finite


def _report(name, actual, desired, error, allowed, bad, kind) -> str:
    excess = np.where(bad, error - allowed, -np.inf)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), bad.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(error == 0.0, 0.0, error / np.abs(desired))
    where = tuple(int(index) for index in worst)
    return (
        f"{name} not {kind.value}: {bad.sum()} of {bad.size} values differ; "
        f"worst at {where}: {actual[worst]!s}, expected {desired[worst]!s}, "
        f"allowed difference {max(np.broadcast_to(allowed, bad.shape)[worst], 0.0):.3g}; "
        f"max abs error {np.max(error):.3g}, max rel error {np.max(relative):.3g}"
    ).lstrip()
