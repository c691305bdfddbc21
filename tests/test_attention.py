"""Grouped attention without a cache, and the softmax over parts of several precisions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.attention import Part, attend, attend_new, window_start
from kvjax.config import AttentionConfig, Pairing, RopeConfig
from kvjax.quant import CODES
from kvjax.quant.rotation import rotation
from kvjax.streams import Queries, Streams
from kvjax.variants import GroupedAttention
from tests import oracle
from tests.tolerances import EXACT, ROUNDING, assert_close

B, T, D = 2, 7, 24


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Grouped attention

GQA = AttentionConfig(width=D, num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(dim=8))
CONFIGS = {
    "mha": dataclasses.replace(GQA, num_kv_heads=4),
    "gqa_biases": dataclasses.replace(GQA, qkv_bias=True, out_bias=True),
    "mqa_window": dataclasses.replace(GQA, num_kv_heads=1, window=3),
    "interleaved_norm": dataclasses.replace(
        GQA, rope=RopeConfig(dim=8, base=500.0, pairing=Pairing.INTERLEAVED), qk_norm_eps=1e-2
    ),
    "partial": dataclasses.replace(GQA, rope=RopeConfig(dim=2)),
    "nope": dataclasses.replace(GQA, rope=None),
    "all": dataclasses.replace(
        GQA,
        rope=RopeConfig(dim=4, pairing=Pairing.INTERLEAVED),
        window=4,
        qkv_bias=True,
        out_bias=True,
        qk_norm_eps=1e-6,
    ),
}


def module_of(config, *, seed=0, dtype=jnp.float32):
    """With every parameter random, biases and norms too; initialisers are not compiled."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: GroupedAttention(config, rngs=nnx.Rngs(0), dtype=dtype))
    return jax.tree.map(lambda p: jnp.asarray(0.4 * rng.normal(size=p.shape), p.dtype), shapes)


@jax.jit
def apply(module, x, lengths=None):
    return module(x, lengths=lengths)


def transcribed(module, x_BTD):
    """The textbook layer: whole heads, no streams."""
    config = module.config
    positions = np.broadcast_to(np.arange(x_BTD.shape[1]), x_BTD.shape[:2])

    def heads(kernel, bias, norm=None):
        y = np.einsum("btd,dhk->bthk", oracle.wide(x_BTD), oracle.wide(kernel[...]))
        y = y if bias is None else y + oracle.wide(bias[...])
        if norm is not None:
            y = oracle.rms_norm(y, norm.scale[...], eps=config.qk_norm_eps)
        return y

    def turned(y):
        rope = config.rope
        if rope is None:
            return y
        interleaved = rope.pairing is Pairing.INTERLEAVED
        first = oracle.rotated(
            y[..., : rope.dim], positions, base=rope.base, interleaved=interleaved
        )
        return np.concatenate([first, y[..., rope.dim :]], axis=-1)

    q = turned(heads(module.q_kernel, module.q_bias, module.q_norm))
    k = turned(heads(module.k_kernel, module.k_bias, module.k_norm)).swapaxes(1, 2)
    v = heads(module.v_kernel, module.v_bias).swapaxes(1, 2)
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (distance >= 0) & (distance < (config.window or np.inf))
    o = oracle.attention(oracle.scores([q], [k], scale=config.head_dim**-0.5), v, seen)
    y = np.einsum("bthk,hkd->btd", o, oracle.wide(module.o_kernel[...]))
    return y if module.o_bias is None else y + oracle.wide(module.o_bias[...])


@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_attention_is_the_textbook_layer(name):
    module, x = module_of(CONFIGS[name]), normal(B, T, D)
    y, layers = apply(module, x)
    assert layers is None and y.dtype == jnp.float32
    assert_close(y, transcribed(module, x), ROUNDING, depth=2)


@pytest.mark.parametrize("name, change", [
    ("mha", {"rope": RopeConfig(dim=8, pairing=Pairing.INTERLEAVED)}),
    ("mha", {"rope": RopeConfig(dim=8, base=9000.0)}),
    ("mqa_window", {"window": 4}),
    ("partial", {"rope": RopeConfig(dim=4)}),
    ("interleaved_norm", {"qk_norm_eps": 2e-2}),
])  # fmt: skip
def test_another_configuration_gives_another_result(name, change):
    module, x = module_of(CONFIGS[name]), normal(B, T, D)
    y, _ = apply(module, x)
    module.config = dataclasses.replace(module.config, **change)
    with pytest.raises(AssertionError, match="not rounding"):
        assert_close(y, transcribed(module, x), ROUNDING, depth=2)


def test_gqa_is_mha_whose_heads_repeat():
    gqa, x = module_of(CONFIGS["gqa_biases"]), normal(B, T, D)
    mha = module_of(dataclasses.replace(gqa.config, num_kv_heads=4))
    for name in ("q_kernel", "o_kernel", "q_bias", "o_bias"):
        setattr(mha, name, getattr(gqa, name))
    for name in ("k_kernel", "v_kernel", "k_bias", "v_bias"):
        getattr(mha, name)[...] = jnp.repeat(getattr(gqa, name)[...], 2, axis=-2)
    assert_close(apply(mha, x)[0], apply(gqa, x)[0], ROUNDING)


@pytest.mark.parametrize("name, first_changed, last_changed", [("mha", 3, 6), ("mqa_window", 3, 5)])
def test_a_token_reaches_itself_and_what_may_see_it(name, first_changed, last_changed):
    module, x = module_of(CONFIGS[name]), normal(B, T, D)
    other = x.copy()
    other[:, 3] += 1.0
    changed = np.any(apply(module, x)[0] != apply(module, other)[0], axis=(0, 2))
    assert np.flatnonzero(changed).tolist() == list(range(first_changed, last_changed + 1))


def test_rows_of_a_batch_do_not_meet():
    module, x = module_of(CONFIGS["all"]), normal(B, T, D)
    y, _ = apply(module, x)
    for row in range(B):
        alone, _ = apply(module, x[row : row + 1])
        assert_close(alone, y[row : row + 1], ROUNDING)


@pytest.mark.parametrize("name", ["mha", "all"])
def test_distances_matter_and_not_positions(name):
    module, x = module_of(CONFIGS[name]), normal(B, T, D)
    later, _ = apply(module, x, jnp.asarray([100, 7], jnp.int32))
    # Angles of about 100 radians carry a hundred times the rounding of those of about 1.
    assert_close(later, apply(module, x)[0], ROUNDING, depth=8)


def test_a_call_changes_no_parameter():
    module, x = module_of(CONFIGS["all"]), normal(B, T, D)
    before = jax.tree.map(np.array, module)
    structure = jax.tree.structure(module)
    jax.eval_shape(lambda x: module(x)[0], x)  # runs the Python of the call, on this module
    assert jax.tree.structure(module) == structure
    assert_close(jax.tree.leaves(module), jax.tree.leaves(before), EXACT)


def test_bfloat16_module_returns_bfloat16():
    module, x = module_of(CONFIGS["all"], dtype=jnp.bfloat16), jnp.bfloat16(normal(B, T, D))
    y, _ = apply(module, x)
    assert y.dtype == jnp.bfloat16
    wide = transcribed(module, x)
    # Projections, norms, products and outputs are rounded to bfloat16 in turn.
    assert_close(y, wide, ROUNDING, scale=np.abs(wide).max(), depth=2)


def test_gradients_reach_every_parameter():
    module, x = module_of(CONFIGS["all"]), normal(B, T, D)
    gradients = jax.jit(jax.grad(lambda module, x: jnp.sum(module(x)[0] ** 2)))(module, x)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(leaf)), path
        assert np.any(leaf), path


# The softmax over parts

H, G, P, CONTENT, ROPE, VALUE = 4, 2, 1, 24, 8, 16
SCALE, BLOCK, BLOCKS = 0.25, 16, 3
STORED = 2 + BLOCK * BLOCKS + 5  # sinks, coded, hot


@dataclasses.dataclass
class Stored:
    """Streams of all tokens in float32, [B, G, S, C]; value None: content."""

    content: np.ndarray
    rope: np.ndarray
    value: np.ndarray | None

    def cut(self, begin, end):
        keys = (self.content[:, :, begin:end], self.rope[:, :, begin:end])
        return keys, None if self.value is None else self.value[:, :, begin:end]


def stored(*, latent=False):
    value = None if latent else normal(B, G, STORED, VALUE, seed=3)
    return Stored(normal(B, G, STORED, CONTENT, seed=1), normal(B, P, STORED, ROPE, seed=2), value)


def queries():
    return Queries(content=normal(B, 3, H, CONTENT, seed=4), rope=normal(B, 3, H, ROPE, seed=5))


def part(keys, value, begin, size, *, used=None):
    positions = np.broadcast_to(np.arange(begin, begin + size, dtype=np.int32), (B, size))
    stop = STORED - np.arange(3, dtype=np.int32)[::-1]
    return Part(
        keys=keys,
        value=value,
        positions=positions,
        start=np.zeros((B, 3), np.int32),
        stop=np.broadcast_to(stop, (B, 3)),
        used=used,
    )


def coded(x_BGSC, code, bits, is_key):
    blocks = x_BGSC.reshape(*x_BGSC.shape[:2], BLOCKS, BLOCK, -1)
    return jax.jit(functools.partial(code.encode, bits=bits, is_key=is_key))(blocks)


def uncoded(codes, code):
    """[B, G, tokens, C] in the basis of the model."""
    vectors = oracle.decoded(codes)
    if code is CODES["nested"]:
        vectors = vectors @ oracle.wide(rotation(codes.size))
    return vectors.reshape(*vectors.shape[:2], -1, codes.size)


def assert_attends(parts, keys, value, *, code, corrections, scales):
    """`attend` over parts is one softmax over all their tokens in order."""
    asked = queries()
    out = jax.jit(functools.partial(attend, scale=SCALE, code=code))(asked, parts)
    assert out.dtype == jnp.float32
    s = oracle.scores(
        (asked.content, asked.rope), keys, scale=SCALE, corrections=corrections, scales=scales
    )
    last = STORED - np.arange(3)[::-1]
    seen = np.broadcast_to(np.arange(STORED) < last[:, None], (B, 3, STORED))
    assert_close(out, oracle.attention(s, value, seen), ROUNDING, depth=2)


@pytest.mark.parametrize("latent", [False, True])
def test_exact_parts_are_one_softmax(latent):
    all_of = stored(latent=latent)
    parts = [part(*all_of.cut(0, 2), 0, 2), part(*all_of.cut(2, STORED), 2, STORED - 2)]
    value = all_of.content if latent else all_of.value
    keys = (all_of.content, all_of.rope)
    assert_attends(parts, keys, value, code=None, corrections=None, scales=None)


@pytest.mark.parametrize(
    "name, bits, latent", [("nested", 4, False), ("nested", 1, True), ("literal", 4, False)]
)
def test_coded_and_exact_parts_are_one_softmax(name, bits, latent):
    code, all_of = CODES[name], stored(latent=latent)
    (content, rope), value = all_of.cut(2, STORED - 5)
    keys = tuple(coded(key, code, bits, True) for key in (content, rope))
    values = None if latent else coded(value, code, bits, False)
    parts = [
        part(keys, values, 2, BLOCK * BLOCKS),
        part(*all_of.cut(STORED - 5, STORED), STORED - 5, 5),
        part(*all_of.cut(0, 2), 0, 2),
    ]

    def whole(exact, codes):
        return np.concatenate([exact[:, :, :2], uncoded(codes, code), exact[:, :, -5:]], axis=2)

    def scale(codes):  # nothing is subtracted from exact tokens
        middle = oracle.wide(codes.scale).reshape(*codes.scale.shape[:2], -1)
        return np.pad(middle, [(0, 0), (0, 0), (2, 5)])

    assert_attends(
        parts,
        (whole(all_of.content, keys[0]), whole(all_of.rope, keys[1])),
        whole(all_of.content, keys[0]) if latent else whole(all_of.value, values),
        code=code,
        corrections=[code.correction(bits, key.size, SCALE) for key in keys],
        scales=[scale(key) for key in keys],
    )


def test_layer_is_passed_on():
    all_of = stored()
    single = part(*all_of.cut(0, STORED), 0, STORED)
    poison = np.float32(np.nan)
    stacked = dataclasses.replace(
        single,
        keys=tuple(np.stack([poison * k, k]) for k in single.keys),
        value=np.stack([poison * single.value, single.value]),
    )
    run = jax.jit(functools.partial(attend, scale=SCALE))
    found = run(queries(), [stacked], layer=jnp.int32(1))
    assert_close(found, run(queries(), [single]), ROUNDING)


def test_query_that_sees_nothing_gets_zero():
    all_of = stored()
    single = part(*all_of.cut(0, STORED), 0, STORED)
    blind = dataclasses.replace(single, stop=np.zeros((B, 3), np.int32))
    out = jax.jit(functools.partial(attend, scale=SCALE))(queries(), [blind, blind])
    assert_close(out, np.zeros((B, 3, H, VALUE), np.float32), EXACT)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_new_tokens_attend_causally_in_a_window(window):
    asked = Queries(content=None, rope=normal(B, T, H, ROPE, seed=5))
    new = Streams(
        content=None, rope_key=normal(B, T, G, ROPE, seed=2), value=normal(B, T, G, VALUE, seed=3)
    )
    out = jax.jit(functools.partial(attend_new, scale=SCALE, window=window))(asked, new)
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = (distance >= 0) & (distance < (window or T))
    s = oracle.scores([asked.rope], [new.rope_key.swapaxes(1, 2)], scale=SCALE)
    wanted = oracle.attention(s, new.value.swapaxes(1, 2), np.broadcast_to(seen, (B, T, T)))
    assert_close(out, wanted, ROUNDING)
    if window == 1:
        assert_close(out, np.repeat(new.value, H // G, axis=2), EXACT)


@pytest.mark.parametrize(
    "window, start", [(None, [0, 0, 0, 0]), (1, [0, 1, 4, 9]), (4, [0, 0, 1, 6]), (99, [0] * 4)]
)
def test_window_start(window, start):
    positions = jnp.asarray([[0, 1, 4, 9]], jnp.int32)
    assert_close(window_start(positions, window), np.int32([start]), EXACT)
