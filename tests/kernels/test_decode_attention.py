"""Every case against float64 softmax; masks, poison, chunks, codes, merging, gradients."""

import dataclasses
import functools
import importlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from kvjax_kernels.codes import Codes, pack
from kvjax_kernels.decode_attention import Partial, decode_attention, merge
from kvjax_kernels.decode_attention.cases import CASES, Case, tagged

from tests import oracle
from tests.tolerances import EXACT, ROUNDING, assert_close

# The package's attribute of this name is the function.
REFERENCE = importlib.import_module("kvjax_kernels.decode_attention.reference")

STATIC = ("scale", "corrections", "impl")
run = jax.jit(decode_attention, static_argnames=STATIC)
jitted_merge = jax.jit(merge)
jitted_pack = jax.jit(pack, static_argnames="bits")

SMALL = Case("small", 4, ((2, 16),), (2, 24), queries=3, tokens=40)


class Call(NamedTuple):
    """The positional arguments of `decode_attention`."""

    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    value: Any
    positions: Any
    start: Any
    stop: Any

    @property
    def seen(self):
        return oracle.visible(self.positions, self.start, self.stop)


def random_call(case: Case, *, seed=0, poison=np.nan) -> Call:
    """Ragged rows of slots that hold their tokens in any order; `poison` where none looks."""
    rng = np.random.default_rng(seed)
    positions, start, stop = random_positions(case, rng)
    unseen_BS = ~oracle.visible(positions, start, stop).any(axis=1)

    def stored(heads, size):
        x = rng.normal(size=(case.batch, heads, case.tokens, size)).astype(np.float32)
        return np.where(unseen_BS[:, None, :, None], np.float32(poison), x)

    queries = tuple(
        rng.normal(size=(case.batch, case.queries, case.heads, size)).astype(np.float32)
        for _, size in case.keys
    )
    keys = tuple(stored(*shape) for shape in case.keys)
    value = None if case.value is None else stored(*case.value)
    return Call(queries, keys, value, positions, start, stop)


def random_positions(case: Case, rng):
    """Row b holds 3 b tokens less than there are slots; the queries are its last tokens."""
    positions = np.full((case.batch, case.tokens), -1, np.int32)
    last = np.empty((case.batch, 1), np.int32)
    for row in range(case.batch):
        length = max(case.tokens - 3 * row, 1)
        positions[row, rng.permutation(case.tokens)[:length]] = np.arange(length)
        last[row] = length - 1
    asked = last - np.arange(case.queries, dtype=np.int32)[::-1]
    start = np.zeros_like(asked) if case.window is None else asked - (case.window - 1)
    return positions, np.maximum(start, 0), asked + 1


def expected(call: Call, *, scale, corrections=None):
    """(m, l, o) in float64."""
    keys = [joined(key) for key in call.keys]
    scales = [joined_scale(key) for key in call.keys]
    with np.errstate(invalid="ignore"):  # poison
        s = oracle.scores(call.queries, keys, scale=scale, corrections=corrections, scales=scales)
    return oracle.partial(s, keys[0] if call.value is None else joined(call.value), call.seen)


def joined(stored):
    """[B, G, tokens, C] in float64, of an array or of `Codes`."""
    if not isinstance(stored, Codes):
        return oracle.wide(stored)
    vectors = oracle.decoded(stored)
    return vectors.reshape(*vectors.shape[:2], -1, vectors.shape[-1])


def joined_scale(stored):
    if not isinstance(stored, Codes):
        return None
    return np.asarray(stored.scale).reshape(*stored.scale.shape[:2], -1)


def assert_partial(actual: Partial, desired, *, depth=1):
    m, total, o = desired
    for part in (actual.m, actual.l, actual.o):
        assert part.dtype == jnp.float32
    assert_close(actual.m, m, ROUNDING, depth=depth)
    assert_close(actual.l, total, ROUNDING, depth=depth)
    # Summed with weights of sum l, from values of about 1.
    assert_close(actual.o, o, ROUNDING, scale=total[..., None], depth=depth)


def scale_of(case: Case) -> float:
    return sum(size for _, size in case.keys) ** -0.5


# Cases


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_is_the_float64_softmax(case):
    call = random_call(case)
    partial = run(*call, scale=scale_of(case))
    assert_partial(partial, expected(call, scale=scale_of(case)))
    again = run(*call, scale=scale_of(case))
    assert_close(again, partial, EXACT)


@pytest.mark.parametrize("case", tagged("quick"), ids=str)
def test_bfloat16_is_computed_in_float32(case):
    exact = random_call(case, poison=0.0)
    rounded = Call(*jax.tree.map(jnp.bfloat16, exact[:3]), *exact[3:])
    partial = run(*rounded, scale=scale_of(case))
    assert_partial(partial, expected(rounded, scale=scale_of(case)))
    # And so it is no further from the truth than a plain softmax that starts from bfloat16.
    _, total, o = expected(exact, scale=scale_of(case))
    truth = o / total[..., None]
    ours = np.abs(np.asarray(jitted_merge([partial])) - truth).max()
    plain = np.abs(np.asarray(plain_attention(*rounded, scale=scale_of(case))) - truth).max()
    assert 0 < ours <= 2 * plain


@functools.partial(jax.jit, static_argnames="scale")
def plain_attention(queries, keys, value, positions, start, stop, *, scale):
    """The softmax as it is usually written, for values and gradients to compare with."""
    H, wide = queries[0].shape[2], functools.partial(jax.tree.map, jnp.float32)
    queries, keys, value = wide(queries), wide(keys), wide(keys[0] if value is None else value)
    seen = (positions[:, None] >= start[..., None]) & (positions[:, None] < stop[..., None])

    def every_head(x):
        return jnp.repeat(x, H // x.shape[1], axis=1)

    pairs = zip(queries, map(every_head, keys), strict=True)
    s = sum(jnp.einsum("BTHC,BHSC->BHTS", q, key) for q, key in pairs)
    p = jax.nn.softmax(jnp.where(seen[:, None], scale * s, -jnp.inf))
    return jnp.einsum("BHTS,BHSV->BTHV", p, every_head(value))


def test_cases_have_unique_names_and_cover_the_kinds():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    groups = {case.heads // case.keys[0][0] for case in CASES}
    assert {1, 4, 5, 16, 20, 71} <= groups
    assert {64, 80, 96, 128, 192} <= {sum(size for _, size in case.keys) for case in CASES}
    assert {1, 2, 3, 4, 64} <= {case.queries for case in CASES}
    for case in CASES:
        for heads, _ in [*case.keys, *([case.value] if case.value else [])]:
            assert case.heads % heads == 0, case.name
    assert set(tagged("gqa", "queries")) == set(tagged("gqa")) & set(tagged("queries")) != set()


# Masks and poison


def small_call(start, stop, *, positions=None, seed=0):
    call = random_call(SMALL, seed=seed, poison=0.0)
    if positions is None:
        positions = np.broadcast_to(np.arange(SMALL.tokens, dtype=np.int32), call.positions.shape)
    start, stop = (np.broadcast_to(np.asarray(x, np.int32), (2, 3)) for x in (start, stop))
    return call._replace(positions=positions, start=start, stop=stop)


@pytest.mark.parametrize(
    "start, stop",
    [
        ([0, 0, 0], [38, 39, 40]),  # causal
        ([34, 35, 36], [38, 39, 40]),  # window of 4
        ([39, 0, 7], [40, 1, 8]),  # one token
        ([0, 5, 40], [0, 5, 99]),  # nothing
        ([-5, 0, 30], [3, 1000, 20]),  # past the ends; reversed
    ],
)
def test_interval_masks(start, stop):
    call = small_call(start, stop)
    assert_partial(run(*call, scale=0.3), expected(call, scale=0.3))


def test_window_of_one_returns_the_value_of_that_token():
    call = small_call([3, 17, 39], [4, 18, 40])
    partial = run(*call, scale=0.3)
    tokens = call.value[:, :, [3, 17, 39]].swapaxes(1, 2)
    assert_close(partial.l, np.ones((2, 3, 4), np.float32), EXACT)
    assert_close(partial.o, np.repeat(tokens, 2, axis=2), EXACT)


def test_row_that_sees_nothing():
    call = small_call([0, 9, 0], [0, 9, 40])
    partial = run(*call, scale=0.3)
    for row in (0, 1):
        assert np.all(np.isneginf(partial.m[:, row]))
        assert not np.any(partial.l[:, row]) and not np.any(partial.o[:, row])
    assert np.all(np.isfinite(partial.m[:, 2]))
    out = jitted_merge([partial])
    assert not np.any(out[:, :2]) and np.all(out[:, 2])


def test_empty_slots_are_seen_by_no_causal_query():
    positions = np.full((2, 40), -1, np.int32)
    partial = run(*small_call(0, 100, positions=positions), scale=0.3)
    assert np.all(np.isneginf(partial.m)) and not np.any(partial.l) and not np.any(partial.o)


def test_order_of_the_slots_does_not_matter():
    call = small_call([0, 30, 39], [38, 39, 40])
    order = np.random.default_rng(1).permutation(SMALL.tokens)
    turned = call._replace(
        keys=(call.keys[0][:, :, order],),
        value=call.value[:, :, order],
        positions=call.positions[:, order],
    )
    in_order = [oracle.wide(x) for x in jax.tree.leaves(run(*call, scale=0.3))]
    assert_partial(run(*turned, scale=0.3), in_order)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_unseen_slots_change_no_bit(poison):
    clean, poisoned = (random_call(SMALL, poison=x) for x in (0.0, poison))
    assert not np.array_equal(clean.keys[0], poisoned.keys[0])
    assert_close(run(*poisoned, scale=0.3), run(*clean, scale=0.3), EXACT)


def test_scores_too_large_for_exp():
    call = random_call(SMALL)
    call = call._replace(queries=(call.queries[0] * 1e4,))
    partial = run(*call, scale=0.3)
    assert np.abs(partial.m).max() > 1e4
    assert np.all(np.isfinite(partial.o))
    # One token takes everything.
    assert_close(partial.l, np.ones((2, 3, 4), np.float32), EXACT)


# Codes

BLOCK, TOKENS = 16, 64
CODED = Case("coded", 4, ((2, 24),), (2, 40), queries=3, tokens=TOKENS)
TWO_KEYS = dataclasses.replace(CODED, keys=((2, 24), (1, 16)))
# (bits, mean, offset)
LAYOUTS = [(1, 1, 0), (1, 0, 1), (2, 0, 0), (2, 1, 1), (4, 1, 0), (4, 0, 1), (8, 0, 0), (8, 1, 1)]


def random_codes(rng, shape, bits, *, mean, offset, unseen_BS) -> Codes:
    """Codes for [..., B, G, S, C]; what belongs to unseen tokens and blocks alone is poison."""
    *lead, tokens, size = shape
    lead, blocks = (*lead, tokens // BLOCK), tokens // BLOCK
    unseen_B1NS = unseen_BS.reshape(-1, 1, blocks, BLOCK)

    def bfloat16(x, unseen):
        return jnp.asarray(np.where(unseen, np.nan, x), jnp.bfloat16)

    codes = rng.integers(0, 2**bits, (*lead, BLOCK, size)).astype(np.uint16)
    scale = bfloat16(2.0**-bits * rng.uniform(1, 2, (*lead, BLOCK)), unseen_B1NS)
    means = bfloat16(rng.normal(size=(*lead, size)), unseen_B1NS.all(-1)[..., None])
    offsets = bfloat16(rng.normal(size=(*lead, BLOCK)), unseen_B1NS)
    return Codes(
        words=jitted_pack(codes, bits=bits),
        scale=scale,
        mean=means if mean else None,
        offset=offsets if offset else None,
        bits=bits,
        size=size,
    )


def coded_call(bits, *, mean=False, offset=False, layers=(), case=CODED, seed=0) -> Call:
    """Row 0 is full, row 1 lacks its last block and some tokens."""
    rng = np.random.default_rng(seed)
    exact = random_call(case)
    held = np.array([case.tokens, case.tokens - BLOCK - 3])[:, None]
    positions = np.arange(case.tokens, dtype=np.int32)[None] + np.zeros((2, 1), np.int32)
    positions = np.where(positions < held, positions, -1)
    stop = (held - np.arange(case.queries)[::-1]).astype(np.int32)
    call = exact._replace(positions=positions, start=np.zeros_like(stop), stop=stop)
    make = functools.partial(
        random_codes, rng, bits=bits, mean=mean, offset=offset, unseen_BS=~call.seen.any(axis=1)
    )
    keys = tuple(make((*layers, *key.shape)) for key in exact.keys)
    value = None if case.value is None else make((*layers, *exact.value.shape))
    return call._replace(keys=keys, value=value)


def decoded(stored):
    """What an implementation that reads arrays would be given."""
    if not isinstance(stored, Codes):
        return stored
    vectors = jitted_decode(stored)
    return vectors.reshape(*vectors.shape[:-3], -1, stored.size)


jitted_decode = jax.jit(Codes.decode)


@pytest.mark.parametrize("bits, mean, offset", LAYOUTS)
def test_codes_are_the_vectors_that_they_decode_to(bits, mean, offset):
    call = coded_call(bits, mean=mean, offset=offset)
    partial = run(*call, scale=0.2)
    assert_partial(partial, expected(call, scale=0.2))
    arrays = call._replace(keys=tuple(map(decoded, call.keys)), value=decoded(call.value))
    of_arrays = [oracle.wide(x) for x in jax.tree.leaves(run(*arrays, scale=0.2))]
    assert_partial(partial, of_arrays, depth=2)  # two roundings apart


@pytest.mark.parametrize("bits, corrections", [(1, (0.3, 0.0)), (2, (0.4, 2.0))])
def test_corrections_are_subtracted_per_query_and_token(bits, corrections):
    call = coded_call(bits, mean=True, case=TWO_KEYS)
    partial = run(*call, scale=0.2, corrections=corrections)
    assert_partial(partial, expected(call, scale=0.2, corrections=corrections))
    plain = expected(call, scale=0.2)
    assert np.abs(plain[1] / np.asarray(partial.l) - 1).max() > 0.01  # they matter here


@pytest.mark.parametrize("coded", [True, False])
def test_layer_axis_is_indexed_inside(coded):
    call = coded_call(2, mean=True, offset=True, layers=(3,))
    if not coded:
        call = call._replace(keys=tuple(map(decoded, call.keys)), value=decoded(call.value))

    def poison_others(leaf):
        if leaf.dtype == jnp.uint8:
            return leaf
        others = jnp.arange(3).reshape(3, *[1] * (leaf.ndim - 1)) != 1
        return jnp.where(others, jnp.asarray(jnp.nan, leaf.dtype), leaf)

    stored = jax.tree.map(poison_others, call[1:3])
    alone = jax.tree.map(lambda leaf: leaf[1], call[1:3])
    corrections = (0.1,) if coded else None
    partial = run(
        *call._replace(keys=stored[0], value=stored[1]),
        scale=0.2, corrections=corrections, layer=jnp.int32(1),
    )  # fmt: skip
    single = call._replace(keys=alone[0], value=alone[1])
    assert_partial(partial, expected(single, scale=0.2, corrections=corrections))


def test_coded_latent_with_an_exact_shared_rope_key():
    case = dataclasses.replace(TWO_KEYS, value=None)
    call = coded_call(4, mean=True, case=case)
    unseen = ~call.seen.any(axis=1)[:, None, :, None]
    rope = np.where(unseen, np.nan, random_call(case, poison=0.0).keys[1]).astype(np.float32)
    call = call._replace(keys=(call.keys[0], rope))
    partial = run(*call, scale=0.2, corrections=(0.5, 0.0))
    assert_partial(partial, expected(call, scale=0.2, corrections=(0.5, 0.0)))


# Chunks

CHUNK = 32


@pytest.fixture
def fresh(monkeypatch):
    """`decode_attention` jitted anew, reading 32 slots at a time."""
    monkeypatch.setattr(REFERENCE, "_chunk_size", lambda num_queries: CHUNK)
    return jax.jit(functools.partial(decode_attention), static_argnames=STATIC)


@pytest.mark.parametrize("tokens", [32, 33, 75])
def test_chunk_edges(fresh, tokens):
    call = random_call(dataclasses.replace(SMALL, tokens=tokens))
    assert_partial(fresh(*call, scale=0.3), expected(call, scale=0.3))


@pytest.mark.parametrize("tokens", [32, 48, 112])
def test_chunk_edges_of_codes(fresh, tokens):
    case = dataclasses.replace(CODED, tokens=tokens)
    call = coded_call(2, mean=True, offset=True, case=case)
    partial = fresh(*call, scale=0.2, corrections=(0.4,))
    assert_partial(partial, expected(call, scale=0.2, corrections=(0.4,)))


def test_block_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(REFERENCE, "_chunk_size", lambda num_queries: BLOCK - 1)
    call = coded_call(4, mean=True)
    partial = jax.jit(functools.partial(decode_attention, scale=0.2))(*call)
    assert_partial(partial, expected(call, scale=0.2))


def test_chunks_as_they_ship():
    sizes = [REFERENCE._chunk_size(per_slot) for per_slot in (1, 2**12, 2**14, 2**15, 2**20)]
    assert sizes == [4096, 4096, 1024, 512, 512]
    call = random_call(Case("long", 2, ((1, 8),), (1, 8), queries=8, tokens=1100))
    assert_partial(run(*call, scale=0.3), expected(call, scale=0.3))


def test_used_slots_are_enough(fresh):
    call = random_call(dataclasses.replace(SMALL, tokens=100), poison=0.0)
    call = call._replace(start=call.start * 0, stop=call.stop * 0 + 1000)
    for used in (0, 1, 31, 32, 33, 64, 65, 99, 100):
        held = np.where(np.arange(100) < used, call.positions, -1).astype(np.int32)
        known = call._replace(positions=held)
        partial = fresh(*known, scale=0.3, used=jnp.int32(used))
        assert_partial(partial, expected(known, scale=0.3))


def test_chunks_past_the_used_slots_are_not_read(fresh):
    call = random_call(dataclasses.replace(SMALL, tokens=96), poison=0.0)
    call = call._replace(start=call.start * 0, stop=call.stop * 0 + 1000)
    # A promise that is broken, to see what is read: later chunks hold visible NaN.
    broken = call._replace(value=np.where(np.arange(96)[:, None] < 64, call.value, np.nan))
    assert np.all(np.isfinite(fresh(*broken, scale=0.3, used=jnp.int32(64)).o))
    assert np.all(np.isnan(fresh(*broken, scale=0.3, used=jnp.int32(65)).o))


def test_no_array_of_all_decoded_tokens():
    case = Case("long", 2, ((1, 64),), (1, 64), tokens=16 * 4096, batch=1)
    codes = Codes(
        words=jax.ShapeDtypeStruct((1, 1, case.tokens // 64, 64, 16), jnp.uint8),
        scale=jax.ShapeDtypeStruct((1, 1, case.tokens // 64, 64), jnp.bfloat16),
        mean=None,
        offset=None,
        bits=2,
        size=64,
    )
    ints = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    positions = jax.ShapeDtypeStruct((1, case.tokens), jnp.int32)
    q = jax.ShapeDtypeStruct((1, 1, 2, 64), jnp.float32)
    jaxpr = jax.make_jaxpr(functools.partial(decode_attention, scale=0.1))(
        (q,), (codes,), codes, positions, ints, ints
    )
    floats = [a.size for a in arrays_of(jaxpr.jaxpr) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert max(floats) <= 4096 * 64


def arrays_of(jaxpr):
    """Shapes of all results in a jaxpr and those inside it."""
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from arrays_of(inner)


# Merging


def parts_of(call: Call, part_of_BS, count: int) -> list[Partial]:
    """`call` with its slots dealt out to `count` parts; empty slots where another part has them."""
    return [
        run(*call._replace(positions=np.where(part_of_BS == i, call.positions, -1)), scale=0.3)
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_merge_of_any_partition_is_one_softmax(seed):
    call = small_call([0, 30, 12], [38, 39, 13], seed=seed)
    part_of = np.random.default_rng(seed).integers(0, 3, call.positions.shape)
    _, total, o = expected(call, scale=0.3)
    parts = parts_of(call, part_of, 3)
    assert_close(jitted_merge(parts), o / total[..., None], ROUNDING, scale=1.0)
    backwards = jitted_merge(parts[::-1])
    assert_close(backwards, o / total[..., None], ROUNDING, scale=1.0)


def test_merge_weighs_parts_of_very_different_scores():
    call = random_call(SMALL, poison=0.0)
    loud = call._replace(queries=(call.queries[0] * 300,))
    part_of = np.random.default_rng(0).integers(0, 2, call.positions.shape)
    _, total, o = expected(loud, scale=0.3)
    merged = jitted_merge(parts_of(loud, part_of, 2))
    # A score of some thousands is off by its rounding, and its exponential by as much.
    step = float(np.abs(expected(loud, scale=0.3)[0]).max())
    assert_close(merged, o / total[..., None], ROUNDING, scale=step)


def test_empty_part_changes_no_bit():
    call = small_call([0, 30, 39], [38, 39, 40])
    part, nothing = parts_of(call, np.zeros_like(call.positions), 2)
    alone = jitted_merge([part])
    for parts in ([part, nothing], [nothing, part], [nothing, part, nothing]):
        assert_close(jitted_merge(parts), alone, EXACT)


def test_nothing_visible_in_any_part_is_zero():
    call = small_call(0, 0)
    parts = parts_of(call, np.zeros_like(call.positions), 2)
    assert_close(jitted_merge(parts), np.zeros((2, 3, 4, 24), np.float32), EXACT)
    assert_close(jitted_merge(parts[:1]), np.zeros((2, 3, 4, 24), np.float32), EXACT)


# Gradients


def single(queries, keys, value, *masks):
    return merge([decode_attention(queries, keys, value, *masks, scale=0.3)])


def two_parts(queries, keys, value, positions, *masks):
    def part(begin, end):
        cut = (tuple(k[:, :, begin:end] for k in keys), value[:, :, begin:end])
        return decode_attention(queries, *cut, positions[:, begin:end], *masks, scale=0.3)

    return merge([part(0, 13), part(13, 40)])


def gradients(attention, call: Call, weights):
    """Of sum(weights * out), by queries, keys and value."""

    def loss(arrays):
        return jnp.sum(weights * attention(*arrays, *call[3:]))

    return jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, call[:3]))


@pytest.fixture(scope="module")
def differentiated():
    """A causal call, weights of its outputs, and the gradients of the plain formula."""
    call = small_call([0, 20, 0], [38, 39, 40])
    weights = np.random.default_rng(5).normal(size=(2, 3, 4, 24)).astype(np.float32)
    plain = functools.partial(plain_attention, scale=0.3)
    return call, weights, gradients(plain, call, weights)


@pytest.mark.parametrize("attention, chunk", [(single, 4096), (single, 16), (two_parts, 16)])
def test_gradients_are_those_of_the_plain_formula(monkeypatch, differentiated, attention, chunk):
    monkeypatch.setattr(REFERENCE, "_chunk_size", lambda num_queries: chunk)
    call, weights, plain = differentiated
    # Sums over tokens, heads and dims of terms of about 1.
    assert_close(gradients(attention, call, weights), plain, ROUNDING, scale=4.0)


def test_gradients_are_finite_differences(differentiated):
    call, weights, plain = differentiated
    rng = np.random.default_rng(6)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), call[:3])

    def loss(step):
        moved = jax.tree.map(lambda x, d: oracle.wide(x) + step * d, call[:3], direction)
        _, total, o = expected(Call(*moved, *call[3:]), scale=0.3)
        return np.sum(weights * o / total[..., None])

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    ours = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), plain, direction)))
    assert_close(np.float32(ours), slope, ROUNDING, depth=4)


def test_gradient_of_a_query_that_sees_nothing_is_zero():
    call = small_call([0, 0, 0], [0, 0, 40])
    by_query, by_key, by_value = gradients(single, call, np.ones((2, 3, 4, 24), np.float32))
    assert not np.any(by_query[0][:, :2]) and np.any(by_query[0][:, 2])
    assert np.all(np.isfinite(by_key[0])) and np.all(np.isfinite(by_value))


# Transformations


def test_vmap_over_a_leading_axis():
    calls = [random_call(SMALL, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *calls)
    mapped = jax.jit(jax.vmap(lambda call: decode_attention(*call, scale=0.3)))(stacked)
    for i, call in enumerate(calls):
        assert_partial(jax.tree.map(lambda x, i=i: x[i], mapped), expected(call, scale=0.3))


def test_vmap_over_used(fresh):
    call = random_call(dataclasses.replace(SMALL, tokens=96), poison=0.0)
    used = np.asarray([0, 32, 70], np.int32)
    held = [np.where(np.arange(96) < n, call.positions, -1).astype(np.int32) for n in used]

    def one(positions, used):
        return decode_attention(*call._replace(positions=positions), scale=0.3, used=used)

    mapped = jax.jit(jax.vmap(one))(np.stack(held), used)
    for i, positions in enumerate(held):
        known = call._replace(positions=positions)
        assert_partial(jax.tree.map(lambda x, i=i: x[i], mapped), expected(known, scale=0.3))


def test_scan_over_layers():
    call = coded_call(4, mean=True, layers=(3,))

    def body(total, layer):
        return total + merge([decode_attention(*call, scale=0.2, layer=layer)]), None

    start = jnp.zeros((2, 3, 4, 40), jnp.float32)
    summed, _ = jax.jit(lambda: jax.lax.scan(body, start, jnp.arange(3, dtype=jnp.int32)))()
    desired = 0
    for layer in range(3):
        keys, value = jax.tree.map(lambda x, i=layer: x[i], call[1:3])
        _, total, o = expected(call._replace(keys=keys, value=value), scale=0.2)
        desired = desired + o / total[..., None]
    assert_close(summed, desired, ROUNDING, scale=1.0)


# Refusals


@pytest.mark.parametrize("impl", ["triton", "mosaic", "", "Reference"])
def test_unknown_implementation(impl):
    with pytest.raises(NotImplementedError, match=f"no implementation '{impl}'"):
        decode_attention(*random_call(SMALL), scale=1.0, impl=impl)


def test_named_reference_is_auto():
    named, auto = (
        jax.make_jaxpr(functools.partial(decode_attention, scale=0.3, impl=impl))(
            *random_call(SMALL)
        )
        for impl in ("reference", "auto")
    )
    assert str(named) == str(auto)


def test_queries_and_keys_must_pair():
    call = random_call(SMALL)
    with pytest.raises(ValueError, match="2 queries for 1 keys"):
        decode_attention(*call._replace(queries=call.queries * 2), scale=1.0)


def test_blocks_must_have_one_size():
    call = coded_call(4)
    value = jax.tree.map(lambda x: x.reshape(2, 2, 2, 32, *x.shape[4:]), call.value)
    with pytest.raises(ValueError, match=r"blocks of \[16, 32\] tokens"):
        decode_attention(*call._replace(value=value), scale=1.0)


@pytest.mark.parametrize(
    "field, shape, message",
    [
        ("positions", (2, 39), r"key 0 has shape (2, 2, 40, 16): expected [2, G, 39, 16]"),
        ("positions", (1, 40), r"positions has shape (1, 40): expected (2, 40)"),
        ("start", (2, 1), r"start has shape (2, 1): expected (2, 3)"),
        ("stop", (2,), r"stop has shape (2,): expected (2, 3)"),
        ("queries", (2, 3, 3, 16), r"expected [2, G, 40, 16], where G divides 3"),
        ("queries", (2, 3, 4, 8), r"key 0 has shape (2, 2, 40, 16): expected [2, G, 40, 8]"),
        ("keys", (1, 2, 40, 16), r"key 0 has shape (1, 2, 40, 16): expected [2, G, 40, 16]"),
        ("value", (2, 3, 40, 8), r"value has shape (2, 3, 40, 8): expected [2, G, 40, V]"),
        ("value", (2, 2, 41, 8), r"value has shape (2, 2, 41, 8): expected [2, G, 40, V]"),
        ("value", (5, 2, 2, 40, 8), r"value has shape (5, 2, 2, 40, 8): expected [2, G, 40, V]"),
    ],
)
def test_shapes_that_do_not_fit(field, shape, message):
    call = random_call(SMALL)
    array = np.zeros(shape, getattr(call, field)[0].dtype)
    changed = call._replace(**{field: (array,) if field in ("queries", "keys") else array})
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_attention(*changed, scale=1.0)


def test_shapes_that_do_not_fit_with_layers_and_codes():
    call = coded_call(2)
    message = "key 0 has shape (2, 2, 64, 24): expected [layers, 2, G, 64, 24]"
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_attention(*call, scale=1.0, layer=0)
    call = coded_call(2, layers=(3,))
    message = "key 0 has shape (3, 2, 2, 64, 24): expected [2, G, 64, 24]"
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_attention(*call, scale=1.0)
