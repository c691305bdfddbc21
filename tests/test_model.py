"""The model is one function of its parameters: cached or not, scanned or not, sharded or not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kvjax import KvjaxError, Model, decode_step, load, prefill
from kvjax.cache import init_cache
from kvjax.cache_config import CacheConfig, Tier
from kvjax.config import Pairing, RopeConfig
from tests.checkpoints import FIXTURES, reference
from tests.tiny import (
    BLOCK,
    CONFIG,
    PLAIN,
    VOCAB,
    block,
    empty_cache,
    model_config,
    model_of,
    tokens,
)
from tests.tolerances import EXACT, QUANTISED, ROUNDING, assert_close

B, T = 2, 24
TOKENS = tokens(B, T)
FULL = CacheConfig(capacity=T, dtype="float32")


@jax.jit
def logits_of(model, tokens_BT):
    return model(tokens_BT)[0]


@jax.jit
def cached_logits(model, tokens_BT, cache):
    """(all tokens in one call, token by token)."""
    whole, _ = model(tokens_BT, cache)

    def body(cache, token_B):
        logits, cache = decode_step(model, token_B, cache)
        return cache, logits

    _, steps = jax.lax.scan(body, cache, tokens_BT.T)
    return whole, jnp.moveaxis(steps, 0, 1)


FEATURES = {
    "mha_tied": model_config(block(num_kv_heads=4), tie_embeddings=True),
    "mqa_window_biases": model_config(
        block(num_kv_heads=1, window=5, qkv_bias=True, out_bias=True)
    ),
    "gqa_partial_norm": model_config(
        block(rope=RopeConfig(dim=4, pairing=Pairing.INTERLEAVED), qk_norm_eps=1e-6)
    ),
    "nope_ffn_bias": model_config(dataclasses.replace(block(rope=None), ffn_bias=True)),
    "three_windows_and_a_full_layer": model_config(
        *(
            2
            * (3 * (block(window=6),) + (dataclasses.replace(block(num_kv_heads=1), ffn_width=40),))
        )
    ),
}


@functools.cache
def feature(name):
    return model_of(FEATURES[name])


@pytest.mark.parametrize("name", FEATURES)
def test_cached_in_one_call_or_by_token_is_uncached(name):
    model = feature(name)
    wanted = np.asarray(logits_of(model, TOKENS))
    found = cached_logits(model, TOKENS, empty_cache(model.config, FULL, batch=B))
    for logits in found:
        assert_close(logits, wanted, ROUNDING, depth=2)
        assert np.abs(logits - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_cached_is_uncached_past_position_1000():
    model, text, chunk = model_of(CONFIG), tokens(1, 1032), 128
    wanted = np.asarray(logits_of(model, text))[0]
    cache = empty_cache(CONFIG, PLAIN, batch=1, capacity=1032)
    logits, cache = prefill(model, text[:, :1024], cache, chunk=chunk)
    found, step = [np.asarray(logits)], jax.jit(decode_step)
    for position in range(1024, 1031):
        logits, cache = step(model, text[:, position], cache)
        found.append(np.asarray(logits))
    assert_close(np.concatenate(found), wanted[1023:1031], ROUNDING, depth=3)


@pytest.mark.parametrize("name", ["qwen3", "mistral_swa"])
def test_decoding_a_checkpoint_gives_the_logits_of_its_makers(name):
    model, _ = load(FIXTURES / name)
    expected = reference(name)
    cache = empty_cache(model.config, FULL, batch=B)
    for logits in cached_logits(model, jnp.asarray(expected["input_ids"]), cache):
        assert_close(logits, expected["logits"], ROUNDING, depth=model.config.num_layers)


# Scanned layers


@jax.jit
def one_block(block, x):
    return block(x)[0]


def unrolled(model, tokens_BT):
    x = model.embedding[...][tokens_BT]
    for stack, row in model.config.placement:
        x = one_block(jax.tree.map(lambda p, row=row: p[row], model.stacks[stack]), x)
    x = model.final_norm(x)
    head = model.embedding[...].T if model.head is None else model.head[...]
    return x @ head


@pytest.mark.parametrize("name", ["mha_tied", "three_windows_and_a_full_layer"])
def test_scanned_layers_are_a_loop(name):
    model = feature(name)
    wanted = unrolled(model, TOKENS)
    assert_close(logits_of(model, TOKENS), wanted, ROUNDING, depth=2)


def test_order_of_layers_matters():
    """Or the loop above could hide a wrong row."""
    model = feature("three_windows_and_a_full_layer")
    turned = jax.tree.map(lambda leaf: leaf, model)
    turned.stacks[0] = jax.tree.map(lambda p: jnp.roll(p, 1, axis=0), model.stacks[0])
    difference = np.abs(logits_of(model, TOKENS) - logits_of(turned, TOKENS))
    assert difference.max() > 0.1


def test_exempt_layers_find_their_rows_in_the_cache():
    # All tokens are still exact, so that nothing is lost.
    tiered = CacheConfig(tiers=(Tier(4, 4),), hot=T, block=8, exempt_first=0, capacity=2 * T)
    config = model_config(BLOCK, BLOCK, BLOCK)
    model, empty = model_of(config), empty_cache(config, tiered, batch=B, dtype="float32")
    logits, cache = jax.jit(lambda model, text, cache: model(text, cache))(model, TOKENS, empty)
    assert_close(logits, logits_of(model, TOKENS), ROUNDING, depth=2)
    assert [group.hot.value.shape[0] for group in cache.groups] == [2, 1]


# Gradients


@jax.jit
def loss_of(model, tokens_BT):
    logits, _ = model(tokens_BT)
    chosen = jnp.take_along_axis(logits[:, :-1], tokens_BT[:, 1:, None], axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits[:, :-1], axis=-1) - chosen[..., 0])


@pytest.fixture(scope="module")
def gradients():
    """(model, its gradients)."""
    model = model_of(model_config(*[block(window=6)] * 3))
    return jax.tree.map(np.asarray, (model, jax.jit(jax.grad(loss_of))(model, TOKENS)))


def test_gradients_are_finite_differences(gradients):
    model, gradient = gradients
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(model)
    for index, (leaf, slope) in enumerate(zip(leaves, jax.tree.leaves(gradient), strict=True)):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        way = np.float32(0.02) * (noise / np.linalg.norm(noise) + slope / np.linalg.norm(slope))
        ends = []
        for sign in (np.float32(1), np.float32(-1)):
            moved = [leaf + sign * way if i == index else x for i, x in enumerate(leaves)]
            ends.append(float(loss_of(jax.tree.unflatten(tree, moved), TOKENS)))
        # Both ends are rounded in float32; the length of the step leaves an error of its square.
        bound = 2e-6 + 0.002 * np.linalg.norm(slope)
        assert_close(np.float32(ends[0] - ends[1]) / 2, np.sum(way * slope), QUANTISED, bound=bound)
        assert abs(ends[0] - ends[1]) / 2 > 4 * bound


def test_gradients_of_scanned_layers_are_those_of_a_loop(gradients):
    model, gradient = gradients

    @jax.grad
    def slope(model):
        logits = unrolled(model, TOKENS)[:, :-1]
        chosen = jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen[..., 0])

    wanted = jax.jit(slope)(model)
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(wanted), strict=True
    ):
        assert np.abs(mine).max() > 0.0, path
        assert_close(mine, theirs, ROUNDING, scale=np.abs(theirs).max(), depth=2)


def test_gradients_have_the_form_of_the_model(gradients):
    model, gradient = gradients
    assert jax.tree.structure(gradient) == jax.tree.structure(model)
    for mine, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(model), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


# Parameters


def parameters(model):
    return [
        (path, variable)
        for path, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Param)
    ]


def test_every_parameter_has_logical_axes():
    model = feature("three_windows_and_a_full_layer")
    found = parameters(model)
    assert len(found) == 3 + 2 * 9
    known = {"layers", "vocab", "model", "heads", "kv_heads", "head_dim", "ffn"}
    for path, variable in found:
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == variable[...].ndim, path
        assert set(names) <= known, path
        assert (names[0] == "layers") == ("stacks" in path), path


def mesh_of(*shape):
    assert len(jax.devices()) == 8
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def test_a_model_is_built_under_a_mesh():
    """Without one it is built by all other tests."""
    with jax.set_mesh(mesh_of(4, 2)):
        model = jax.eval_shape(lambda: Model(model_config(BLOCK), rngs=nnx.Rngs(0)))
    assert jax.tree.structure(model) == jax.tree.structure(model_of(model_config(BLOCK)))


RULES = {"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor"}


def sharded(model, mesh):
    out = jax.tree.map(lambda leaf: leaf, model)
    for _, variable in parameters(out):
        names = variable.get_metadata()["out_sharding"]
        spec = PartitionSpec(*(RULES.get(name) for name in names))
        variable[...] = jax.device_put(variable[...], NamedSharding(mesh, spec))
    return out


def test_a_mesh_changes_nothing():
    model, mesh = model_of(model_config(BLOCK)), mesh_of(4, 2)
    text = tokens(4, 16)
    cache = init_cache(model.config, PLAIN, batch=4)
    step = jax.jit(lambda model, text, cache: model(text, cache))
    wanted = step(model, text, cache)
    with jax.set_mesh(mesh):
        placed = sharded(model, mesh)
        kernel = placed.stacks[0].attention.k_kernel[...]
        assert len({shard.index for shard in kernel.addressable_shards}) == 2
        rows = jax.device_put(text, NamedSharding(mesh, PartitionSpec("data")))
        found = step(placed, rows, cache)
        plain = logits_of(placed, rows)
    assert_close(found[0], wanted[0], ROUNDING, depth=2)
    assert_close(
        jax.tree.leaves(found[1].groups), jax.tree.leaves(wanted[1].groups), ROUNDING, depth=2
    )
    assert_close(plain, wanted[0], ROUNDING, depth=2)


def test_bfloat16_parameters():
    config = FEATURES["gqa_partial_norm"]
    narrow = model_of(config, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), narrow)
    cache = empty_cache(config, FULL, batch=B, dtype=jnp.bfloat16)
    cached, _ = jax.jit(lambda model, text, cache: model(text, cache))(narrow, TOKENS, cache)
    wanted = np.asarray(logits_of(wide, TOKENS))
    for logits in (cached, logits_of(narrow, TOKENS)):
        assert logits.dtype == jnp.float32
        assert_close(logits, wanted, QUANTISED, bound=0.05 * np.abs(wanted).max())
    assert narrow.dtype == jnp.bfloat16


# One call


def test_a_call_changes_nothing():
    model = feature("gqa_partial_norm")
    cache = empty_cache(model.config, FULL, batch=B)
    before = jax.tree.map(np.array, (model, cache))
    structure = jax.tree.structure((model, cache))
    jax.eval_shape(lambda text: model(text, cache), TOKENS)  # runs the Python of the call
    cached_logits(model, TOKENS, cache)
    assert jax.tree.structure((model, cache)) == structure
    assert_close(jax.tree.leaves((model, cache)), jax.tree.leaves(before), EXACT)


def test_without_a_cache_there_is_none_to_return():
    model = feature("gqa_partial_norm")
    counts = jnp.asarray([24, 5], jnp.int32)
    logits, cache = model(TOKENS)
    assert cache is None and logits.shape == (B, T, VOCAB) and logits.dtype == jnp.float32
    last, _ = jax.jit(lambda m, t, n: m(t, counts=n, last_only=True))(model, TOKENS, counts)
    assert_close(last, np.stack([logits[0, 23], logits[1, 4]]), ROUNDING)


def test_refusals():
    model, full = feature("gqa_partial_norm"), dataclasses.replace(FULL, capacity=T - 1)
    with pytest.raises(ValueError, match=r"tokens have shape \(24,\): expected \[batch, tokens\]"):
        model(TOKENS[0])
    with pytest.raises(ValueError, match="tokens have batch 2 and the cache has 3"):
        model(TOKENS, empty_cache(model.config, FULL, batch=3))
    with pytest.raises(KvjaxError, match="24 tokens do not fit the cache's capacity of 23"):
        model(TOKENS, empty_cache(model.config, full, batch=B))
    for options, missing in (({"dtype": "float32"}, "capacity"), ({"capacity": 5}, "dtype")):
        with pytest.raises(KvjaxError, match=f"the cache has no {missing}: pass {missing}=..."):
            init_cache(model.config, CacheConfig(), batch=1, **options)


def test_ids_outside_the_vocabulary_are_not_read_as_others():
    model = model_of(CONFIG)
    given = jnp.array([[1, 2, 3], [1, VOCAB, 3], [1, -1, 3], [1, 2, VOCAB]], jnp.int32)
    logits, _ = model(given, counts=jnp.array([3, 3, 3, 2], jnp.int32))
    spoilt = np.isnan(np.asarray(logits)).any(axis=(1, 2))
    assert spoilt.tolist() == [False, True, True, False]  # the last is padding


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens(shape):
    with pytest.raises(ValueError, match="expected at least one token"):
        model_of(CONFIG)(jnp.zeros(shape, jnp.int32))


def test_counts_beyond_the_tokens():
    with pytest.raises(ValueError, match="expected at most 3, the width of tokens"):
        model_of(CONFIG)(jnp.ones((1, 3), jnp.int32), counts=jnp.array([4], jnp.int32))
