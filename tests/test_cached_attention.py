"""One attention layer over its cache computes what the definition says, tier by tier."""

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kvjax.cache.tiered import init_layers
from kvjax.cache_config import CacheConfig, Overflow, Tier
from kvjax.config import AttentionConfig, RopeConfig
from kvjax.variants import GroupedAttention
from tests import emulated
from tests.emulated import SINK, UNSEEN, Edges
from tests.tiny import normal, poison
from tests.tolerances import EXACT, ROUNDING, assert_close

T, D = 240, 32
THREE = (Tier(4, 4, 24), Tier(2, 2, 16), Tier(1, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    attention: AttentionConfig
    cache: CacheConfig
    dtype: str = "float32"
    capacity: int = T
    seed: int = 0

    def module(self):
        shapes = jax.eval_shape(lambda: GroupedAttention(self.attention, rngs=nnx.Rngs(0)))
        rng = np.random.default_rng(self.seed)
        return jax.tree.map(
            lambda p: self.on_grid(0.3 * rng.normal(size=p.shape).astype(np.float32)), shapes
        )

    def x(self):
        return self.on_grid(normal(1, T, D, seed=self.seed + 1000))

    def on_grid(self, x):
        """Numbers whose products sum up exactly, where their bfloat16 is stored."""
        return np.round(16 * x) / 16 if self.dtype == "bfloat16" else x

    def layers(self):
        sizes = {"num_layers": 1, "batch": 1, "capacity": self.capacity, "dtype": self.dtype}
        shapes = self.attention.stream_shapes
        return poison(jax.eval_shape(lambda: init_layers(shapes, self.cache, **sizes)))

    def emulate(self):
        """(output, places, whether float32 rounds alike)."""
        edges, narrow = Edges(), self.dtype == "bfloat16"
        y, seen = emulated.layer(
            self.module(), self.x(), self.cache,
            capacity=self.capacity, bfloat16=narrow, edges=edges,
        )  # fmt: skip
        # Sums of bfloat16 numbers are often ties: there a scale may be off by one step.
        far = edges.are_far(bfloat16=not narrow)
        return (y.astype(ml_dtypes.bfloat16) if narrow else y), seen, far


def grouped(**changes):
    base = AttentionConfig(width=D, num_heads=4, num_kv_heads=2, head_dim=16)
    return dataclasses.replace(base, **changes)


def cache(*tiers, **changes):
    base = CacheConfig(tiers=tiers, sinks=3, hot=16, block=8)
    return dataclasses.replace(base, **changes)


CASES = {
    "partial": Case(
        grouped(rope=RopeConfig(dim=8)), cache(Tier(4, 4, 24), Tier(2, 2, 16), Tier(1, 1))
    ),
    "bfloat16_window": Case(
        grouped(window=100, num_kv_heads=4),
        cache(Tier(4, 4, 24), Tier(2, 1), hot=13, sinks=0),
        dtype="bfloat16",
    ),
    "literal": Case(grouped(num_kv_heads=1), cache(Tier(4, 4, 24), Tier(1, 1), code="literal")),
    "sliding": Case(
        grouped(rope=RopeConfig(dim=16)),
        cache(Tier(4, 4, 16), Tier(1, 1), overflow=Overflow.SLIDE),
        capacity=100,
    ),
    "sliding_plain": Case(grouped(), cache(overflow=Overflow.SLIDE), capacity=100),
}


@functools.cache
def settled(name):
    """The case with numbers that float32 and float64 round alike, and what is expected of it."""
    for seed in range(60):
        case = dataclasses.replace(CASES[name], seed=seed)
        y, seen, far = case.emulate()
        if far:
            return case, y, seen
    raise AssertionError("no seed will do")


@jax.jit
def apply(module, x, layers, lengths, counts):
    return module(x, layers, lengths=lengths, counts=counts)


@functools.cache
def run(name):
    """All tokens in one call, which takes them in steps of a block."""
    case, zero = settled(name)[0], np.zeros(1, np.int32)
    return apply(case.module(), case.x(), case.layers(), zero, np.full(1, T, np.int32))


@pytest.mark.parametrize("name", CASES)
def test_layer_is_its_definition(name):
    case, wanted, seen = settled(name)
    places = {*range(SINK if case.cache.sinks else 0, len(case.cache.tiers) + 1)}
    assert set(np.unique(seen[-1])) - {UNSEEN} == places  # every tier was reached
    y, _ = run(name)
    # Scores carry the rounding of angles of up to 240 radians.
    assert_close(y, wanted, ROUNDING, depth=8)


@pytest.mark.parametrize(
    "name, change",
    [
        ("partial", {"hot": 15}),
        ("partial", {"sinks": 2}),
        ("partial", {"tiers": (Tier(4, 4, 32), Tier(2, 2, 8), Tier(1, 1))}),
        ("partial", {"tiers": (Tier(4, 4, 24), Tier(2, 2, 24), Tier(1, 1))}),
        ("bfloat16_window", {"hot": 12}),
        ("bfloat16_window", {"tiers": (Tier(4, 4, 16), Tier(2, 1))}),
        ("sliding", {"overflow": Overflow.ERROR}),
        ("sliding_plain", {"overflow": Overflow.ERROR}),
        ("sliding_plain", {"sinks": 2}),
    ],
)
def test_comparison_notices_another_definition(name, change):
    case, _, _ = settled(name)
    other = dataclasses.replace(case, cache=dataclasses.replace(case.cache, **change))
    with pytest.raises(AssertionError, match="not rounding"):
        assert_close(run(name)[0], other.emulate()[0], ROUNDING, depth=8)


def test_token_by_token_is_one_call():
    case, wanted, _ = settled("partial")
    module, x, layers, outputs = case.module(), case.x(), case.layers(), []
    for t in range(T):
        lengths, one = np.full(1, t, np.int32), np.ones(1, np.int32)
        y, layers = apply(module, x[:, t : t + 1], layers, lengths, one)
        outputs.append(np.asarray(y))
    assert_close(np.concatenate(outputs, axis=1), wanted, ROUNDING, depth=8)
    codes = [leaf for tier in run("partial")[1].tiers for leaf in jax.tree.leaves(tier)]
    assert_close([leaf for tier in layers.tiers for leaf in jax.tree.leaves(tier)], codes, EXACT)
