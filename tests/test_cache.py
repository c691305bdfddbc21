"""Where tokens lie: tiers, their edges, rings, padding, poison. Streams go in, parts come out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.tiered import init_layers
from kvjax.cache_config import Overflow, Tier
from kvjax.streams import Streams
from tests import emulated, oracle
from tests.emulated import SINK, UNSEEN, Edges, placement
from tests.tiny import THREE_TIERS, normal, poison, rows
from tests.tolerances import EXACT, assert_close

L, LAYER = 2, 1
SHAPES = {"rope_key": (1, 16), "value": (2, 8)}
STEP, LENGTH = THREE_TIERS.block, THREE_TIERS.capacity
# Without sinks, with a hot window of no whole number of blocks, and forgetting.
SLIDING = dataclasses.replace(
    THREE_TIERS,
    tiers=(Tier(4, 2, 16), Tier(2, 1)),
    sinks=0,
    hot=13,
    overflow=Overflow.SLIDE,
    capacity=90,
)


def streams(num, *, seed=2):
    """Of one sequence, [1, T, G, C] each."""
    arrays = {
        name: normal(1, num, *shape, seed=seed + index)
        for index, (name, shape) in enumerate(SHAPES.items())
    }
    return Streams(**{"content": None, **arrays})


@jax.jit
def append(layers, new, lengths, counts):
    return layers.append(jnp.int32(LAYER), new, lengths, counts)


@jax.jit
def parts_of(layers, lengths, positions, start):
    return layers.parts(lengths, positions, start)


def filled(config, counts_of_calls, sequence, *, batch, layers=None):
    """Layers after calls with so many tokens [calls, B] of one sequence; padding is NaN."""
    if layers is None:
        layers = empty(config, batch)
    lengths = np.zeros(batch, np.int32)
    for counts in np.asarray(counts_of_calls, np.int32):
        layers = append(layers, piece(sequence, lengths, counts), lengths, counts)
        lengths = lengths + counts
    return layers


def empty(config, batch):
    sizes = {"num_layers": L, "batch": batch, "capacity": config.capacity}
    return poison(jax.eval_shape(lambda: init_layers(SHAPES, config, dtype="float32", **sizes)))


def piece(sequence, lengths, counts):
    """The next `counts` tokens of each row, then NaN."""
    steps = np.arange(STEP)
    index, real = lengths[:, None] + steps, steps < counts[:, None]

    def cut(x):
        taken = x[0, np.minimum(index, x.shape[1] - 1)]
        return np.where(real[..., None, None], taken, np.float32(np.nan))

    return jax.tree.map(cut, sequence)


def up_to(lengths):
    """Counts of the fewest calls that give rows their lengths."""
    begins = np.arange(0, max(lengths), STEP)
    return np.clip(np.asarray(lengths)[None, :] - begins[:, None], 0, STEP)


@pytest.fixture(scope="module")
def every_length():
    """(config, sequence, layers): row n of the layers holds the first n tokens, n = 0..capacity."""
    out = {}
    for name, config, longest in (
        ("tiered", THREE_TIERS, LENGTH),
        ("sliding", SLIDING, 2 * LENGTH),
    ):
        sequence, lengths = streams(longest), range(longest + 1)
        layers = filled(config, up_to(lengths), sequence, batch=longest + 1)
        out[name] = config, sequence, jax.tree.map(np.asarray, layers)
    return out


NAMES = ["tiered", "sliding"]


def places(config, longest):
    """Where the last query of each length finds each position, [length, position]."""
    seen = placement(config, longest, capacity=config.capacity)
    return np.concatenate([np.full((1, longest), UNSEEN), seen])


def after(config, position):
    return position - config.sinks


@pytest.mark.parametrize("name", NAMES)
def test_sinks_and_recent_tokens_are_exact(name, every_length):
    config, sequence, layers = every_length[name]
    longest = sequence.value.shape[1]
    seen = places(config, longest)
    for field in SHAPES:
        x = getattr(sequence, field)[0]
        hot = getattr(layers.hot, field)[LAYER]  # [B, G, S, C]
        for length in range(longest + 1):
            for place, stored, origin in ((len(config.tiers), hot, config.sinks), (SINK, None, 0)):
                positions = np.flatnonzero(seen[length] == place)
                if place == SINK and positions.size:
                    stored = getattr(layers.sinks, field)[LAYER]
                if positions.size:
                    slots = (positions - origin) % stored.shape[2]
                    found = stored[length][:, slots].swapaxes(0, 1)
                    assert_close(found, x[positions], EXACT)
            least = max(length - config.sinks, 0)
            assert np.sum(seen[length] == len(config.tiers)) >= min(config.hot, least)


@pytest.mark.parametrize("name", NAMES)
def test_old_tokens_are_coded_once_and_then_lose_bits(name, every_length):
    config, sequence, layers = every_length[name]
    longest = sequence.value.shape[1]
    seen, block = places(config, longest), config.block
    for field in SHAPES:
        is_key, x = field != "value", getattr(sequence, field)[0].swapaxes(0, 1)
        blocks = x[:, config.sinks :][:, : (longest - config.sinks) // block * block]
        blocks = blocks.reshape(len(x), -1, block, x.shape[-1])
        edges = Edges()
        bits = [tier.key_bits if is_key else tier.value_bits for tier in config.tiers]
        whole = emulated.nested(oracle.wide(blocks), [4, *bits], is_key=is_key, edges=edges)
        assert edges.are_far(bfloat16=False), vars(edges)
        for index, tier in enumerate(layers.tiers):
            codes = jax.tree.map(lambda leaf: leaf[LAYER], getattr(tier, field))
            assert codes.bits == bits[index]
            found = oracle.unpacked(codes.words, bits=codes.bits, size=codes.size)
            held, slots = where_blocks_lie(seen == index, config, codes.scale.shape[2])
            top = whole[0].codes >> (4 - codes.bits)
            assert (found[held[:, 0], :, slots] == top[:, held[:, 1]].swapaxes(0, 1)).all()
            # What a block says of itself does not depend on when it was written.
            for leaf in (codes.scale, codes.mean):
                if leaf is not None:
                    assert_equal_by(leaf[held[:, 0], :, slots], held[:, 1])


def where_blocks_lie(seen, config, size):
    """([(row, block)], slot of each) from which positions each row finds in a tier."""
    first = seen[:, config.sinks :: config.block]
    held = np.argwhere(first)
    return held, held[:, 1] % size


def assert_equal_by(x, group):
    """Entries of one group are equal to the bit."""
    order = np.argsort(group, kind="stable")
    same = group[order][1:] == group[order][:-1]
    x = np.asarray(x)[order]
    assert_close(x[1:][same], x[:-1][same], EXACT)
    assert same.any() and np.isfinite(x.astype(np.float32)).all()


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("name", NAMES)
def test_each_position_is_seen_once_and_in_its_place(name, window, every_length):
    """For every length, and for every query of the last append."""
    config, sequence, layers = every_length[name]
    longest = sequence.value.shape[1]
    lengths = np.arange(longest + 1, dtype=np.int32)
    queries = lengths[:, None] - STEP + np.arange(STEP, dtype=np.int32)
    start = np.maximum(queries - (window or longest) + 1, 0)
    parts = parts_of(layers, lengths, queries, start)
    assert len(parts) == len(config.tiers) + 1 + (config.sinks > 0)

    seen = placement(config, longest, capacity=config.capacity)
    seen = np.where(np.arange(longest) < start[..., None], UNSEEN, seen[np.maximum(queries, 0)])
    seen = np.where(queries[..., None] < 0, UNSEEN, seen)
    for place, part in zip([*range(len(config.tiers) + 1), SINK], parts, strict=False):
        visible = oracle.visible(part.positions, part.start, part.stop)
        found = np.zeros(seen.shape, int)
        row, query, slot = np.nonzero(visible)
        np.add.at(found, (row, query, np.asarray(part.positions)[row, slot]), 1)
        assert (found == (seen == place)).all()
        # Slots that are declared unused are never seen.
        assert not visible[:, :, int(part.used) :].any()


def test_any_division_into_calls_leaves_the_same_bits(every_length):
    """Rows with their own random calls, of 0 to 8 tokens, all end as the row with whole calls."""
    _, sequence, whole = every_length["tiered"]
    rng, batch, length = np.random.default_rng(0), LENGTH + 1, 150
    counts = rng.integers(0, STEP + 1, (60, batch))
    counts[:, 0] = 1
    done = np.minimum(np.cumsum(np.concatenate([counts, np.full_like(counts, 2)]), axis=0), length)
    calls = np.diff(done, axis=0, prepend=np.zeros((1, batch), int))
    assert (done[-1] == length).all()
    layers = filled(THREE_TIERS, calls, sequence, batch=batch)
    assert_same(layers, rows(whole, np.full(batch, length)))


def test_rows_do_not_meet_and_padding_is_not_stored(every_length):
    """Rows of all lengths that begin at different calls, among NaN padding."""
    _, sequence, whole = every_length["tiered"]
    lengths = np.random.default_rng(0).permutation(LENGTH + 1)
    calls = np.zeros((24, LENGTH + 1), int)
    for row, length in enumerate(lengths):
        counts = up_to([length])[:, 0]
        calls[row % 4 :, row][: len(counts)] = counts
    assert_same(filled(THREE_TIERS, calls, sequence, batch=len(lengths)), rows(whole, lengths))


def assert_same(layers, expected):
    assert_close(jax.tree.leaves(layers), jax.tree.leaves(expected), EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_holds_a_token_is_written(name, every_length):
    """Poison stays in all slots that no token was put into, in the other layer too."""
    config, sequence, layers = every_length[name]
    assert_poison(jax.tree.map(lambda leaf: leaf[1 - LAYER], layers))
    stored = np.maximum(np.arange(len(sequence.value[0]) + 1) - config.sinks, 0)
    assert_free(layers.hot, stored)
    blocks = np.maximum(stored - config.hot, 0) // config.block
    for tier, kept in zip(config.tiers, layers.tiers, strict=True):
        assert_free(kept, blocks)
        blocks = np.maximum(blocks - (tier.tokens or 0) // config.block, 0)


def assert_free(ring, received):
    """Row i of a ring was given received[i] elements, and holds poison elsewhere."""
    for leaf in jax.tree.leaves(ring):
        free = np.arange(leaf.shape[3])[None, :] >= received[:, None]
        assert free.any()
        assert_poison(leaf[LAYER].swapaxes(1, 2)[free])


def assert_poison(tree):
    for leaf in jax.tree.leaves(tree):
        assert (leaf == 0xFF).all() if leaf.dtype == np.uint8 else np.isnan(leaf).all()


def test_a_sliding_cache_does_not_grow():
    layers = empty(SLIDING, 1)
    held = sum(tier.value.scale.shape[3] for tier in layers.tiers) * SLIDING.block
    # One block to spare in the hot window's two and in each tier.
    spare = (len(SLIDING.tiers) + 2) * SLIDING.block
    assert SLIDING.sinks + layers.hot.value.shape[3] + held <= SLIDING.capacity + spare
