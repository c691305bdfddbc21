"""Reading prompts: how they are divided, padded or batched changes no bit of what is stored."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError, prefill
from tests.tiny import CONFIG, PLAIN, TIERED, VOCAB, empty_cache, model_of, rows, tokens
from tests.tolerances import EXACT, QUANTISED, ROUNDING, assert_close

B, CHUNK, LENGTH = 3, 12, 150
PROMPT = tokens(B, LENGTH)
BLOCK, HOT, SINKS = TIERED.block, TIERED.hot, TIERED.sinks


@pytest.fixture(scope="module")
def model():
    return model_of(CONFIG)


@pytest.fixture(scope="module")
def whole(model):
    """(logits, cache) after the prompt in one call."""
    return read(model, PROMPT)


def read(model, prompt, cache=None, **options):
    if cache is None:
        cache = empty_cache(CONFIG, batch=len(prompt))
    logits, cache = prefill(model, prompt, cache, chunk=CHUNK, **options)
    assert np.isfinite(logits).all()  # nothing of the poison that an empty cache holds
    return logits, cache


def assert_same(actual, expected):
    """(logits, cache) equal to the bit, poison included."""
    assert_close(jax.tree.leaves(actual), jax.tree.leaves(expected), EXACT)


def divided(sizes):
    """Ends of calls of these sizes, the last of whatever is left."""
    ends = [end for end in np.cumsum(sizes) if end < LENGTH]
    return [*ends, LENGTH]


def random_sizes(seed):
    return np.random.default_rng(seed).integers(1, 40, LENGTH)


EDGE = SINKS + HOT + BLOCK  # where the first block is coded
DIVISIONS = {
    "ones": [1] * LENGTH,
    "block-1": [BLOCK - 1] * LENGTH,
    "block": [BLOCK] * LENGTH,
    "block+1": [BLOCK + 1] * LENGTH,
    "before the first edge": [EDGE - 1],
    "at the first edge": [EDGE],
    "after the first edge": [EDGE + 1],
    "around the second tier": [EDGE + 23, 1, 1],
    **{f"random {seed}": random_sizes(seed) for seed in range(6)},
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_any_division_over_calls_is_one_call_to_the_bit(name, model, whole):
    cache, begin = empty_cache(CONFIG, batch=B), 0
    for end in divided(DIVISIONS[name]):
        logits, cache = read(model, PROMPT[:, begin:end], cache)
        begin = end
    assert_same((logits, cache), whole)


def test_every_tier_is_in_use(whole):
    """Or the tests here would show little."""
    _, cache = whole
    tiers = cache.groups[1].tiers
    assert len(tiers) == 2
    for tier in tiers:
        assert np.isfinite(tier.value.scale.astype(np.float32)).any()
    assert np.all(cache.lengths == LENGTH)


# Ragged batches

LENGTHS = np.array([5, 97, 41])
PAD = 7


def ragged(lengths, *, seed=0, pad=None, width=None):
    """Prompts with garbage, or one token, after their ends."""
    prompt = tokens(len(lengths), width or max(lengths), seed=seed)
    filler = tokens(*prompt.shape, seed=99) if pad is None else np.full_like(prompt, pad)
    return np.where(np.arange(prompt.shape[1])[None, :] < lengths[:, None], prompt, filler)


def test_padding_leaves_no_trace(model):
    expected = read(model, ragged(LENGTHS), lengths=LENGTHS)
    wide = ragged(LENGTHS, pad=-5, width=97 + 30)
    wide[:, :97] = np.where(np.arange(97) < LENGTHS[:, None], ragged(LENGTHS), -5)
    assert_same(read(model, wide, lengths=LENGTHS), expected)


def test_padding_may_be_a_token_whose_embedding_is_poison(model):
    prompt = np.where(ragged(LENGTHS) == PAD, PAD + 1, ragged(LENGTHS))
    expected = read(model, prompt, lengths=LENGTHS)
    hostile = jax.tree.map(lambda leaf: leaf, model)
    hostile.embedding[...] = hostile.embedding[...].at[PAD].set(np.nan)
    prompt = np.where(np.arange(97) < LENGTHS[:, None], prompt, PAD)
    assert_same(read(hostile, prompt, lengths=LENGTHS), expected)


def test_rows_do_not_depend_on_their_batch(model):
    order = np.array([2, 0, 1])
    logits, cache = read(model, ragged(LENGTHS), lengths=LENGTHS)
    other = ragged(LENGTHS)[order]
    moved_logits, moved = read(model, other, lengths=LENGTHS[order])
    assert_close(moved_logits, logits[order], EXACT)
    assert_same(moved.groups, rows(cache.groups, order))
    assert moved.lengths.tolist() == LENGTHS[order].tolist()


def test_batch_is_batches_of_one(model):
    """Matrices of other shapes round differently, and a number at an edge then gets another code:
    one dim of one token is off by a step. A wrong token or statistic is off by much more."""
    logits, cache = read(model, ragged(LENGTHS), lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        alone_logits, alone = read(model, ragged(LENGTHS)[row : row + 1, :length])
        bound = 0.01 * np.abs(logits[row]).max()
        assert_close(alone_logits, logits[row : row + 1], QUANTISED, bound=bound)
        first_layer = jax.tree.leaves(rows(cache.groups[0].hot, [row]))
        assert_close(jax.tree.leaves(alone.groups[0].hot), first_layer, ROUNDING)


def test_appending_after_a_ragged_prompt_is_a_longer_prompt(model):
    more = np.array([60, 1, 33])
    joined = ragged(LENGTHS + more, seed=3)
    expected = read(model, joined, lengths=LENGTHS + more)
    _, cache = read(model, joined[:, :97], lengths=LENGTHS)
    rest = np.zeros((B, max(more)), np.int32)
    for row, (length, count) in enumerate(zip(LENGTHS, more, strict=True)):
        rest[row, :count] = joined[row, length : length + count]
    assert_same(read(model, rest, cache, lengths=more), expected)


# Poison, capacity


def test_a_clean_cache_is_no_better_than_a_poisoned_one(model, whole):
    clean = kvjax.init_cache(CONFIG, TIERED, batch=B)
    logits, cache = read(model, PROMPT, clean)
    assert_close(logits, whole[0], EXACT)
    for mine, theirs in zip(
        jax.tree.leaves(cache.groups), jax.tree.leaves(whole[1].groups), strict=True
    ):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        untouched = (theirs == 0xFF) if theirs.dtype == np.uint8 else np.isnan(theirs)
        assert_close(np.where(untouched, theirs, mine), theirs, EXACT)


@pytest.mark.parametrize("config", [TIERED, PLAIN], ids=["tiered", "plain"])
def test_full_to_the_last_token_and_not_beyond(config, model):
    prompt = tokens(B, TIERED.capacity, seed=5)
    fits = np.array([160, 120, 160])
    empty = empty_cache(CONFIG, config, batch=B)
    logits, cache = read(model, prompt, empty, lengths=fits)
    assert np.isfinite(logits).all()
    for one_more in (np.array([1, 1, 1]), np.array([1, 1, 9])):
        with pytest.raises(KvjaxError, match="161 tokens|169 tokens") as caught:
            read(model, prompt[:, :9], cache, lengths=one_more)
        assert "capacity of 160" in str(caught.value)
    with pytest.raises(KvjaxError, match="161 tokens do not fit"):
        read(model, tokens(B, 161), empty)
    # The refused cache is as it was, and is still of use to the rows with room.
    assert_same(read(model, prompt, empty, lengths=fits), (logits, cache))
    assert cache.lengths.tolist() == fits.tolist()


def test_caller_keeps_a_usable_cache(model, whole):
    _, first = read(model, PROMPT[:, :100])
    before = jax.tree.map(np.array, first)
    for _ in range(2):
        assert_same(read(model, PROMPT[:, 100:], first), whole)
    assert_same(first, before)


def test_progress_adds_up_to_the_longest_row(model):
    steps = []
    read(model, ragged(LENGTHS), lengths=LENGTHS, progress=steps.append)
    assert steps == [CHUNK] * 8 + [1]


def refusal(model, prompt, **options):
    options = {"chunk": CHUNK, "cache": empty_cache(CONFIG, batch=len(prompt)), **options}
    with pytest.raises(KvjaxError) as caught:
        prefill(model, prompt, options.pop("cache"), **options)
    return str(caught.value)


def test_refusals(model):
    prompt = tokens(B, 8)
    assert refusal(model, prompt[:, :0]).startswith("a prompt is empty")
    assert refusal(model, prompt, lengths=[8, 0, 8]).startswith("a prompt is empty")
    assert refusal(model, prompt, lengths=[8, 9, 8]).startswith("a length is 9: expected at most 8")
    assert refusal(model, prompt, lengths=[8, 8]).startswith("lengths have shape (2,)")
    assert refusal(model, prompt[0]).startswith("tokens have shape (8,) and dtype int32")
    assert refusal(model, prompt, lengths=[8, 2.5, 8]).startswith("lengths have dtype float64")
    assert "dtype float32" in refusal(model, prompt.astype(np.float32))
    assert "dtype bool" in refusal(model, prompt > 3)
    assert refusal(model, prompt, chunk=0) == "chunk is 0: expected at least 1"
    for bad in (VOCAB, -1):
        worse = prompt.copy()
        worse[1, 3] = bad
        assert refusal(model, worse) == f"token id {bad} is outside the vocabulary of {VOCAB}"
    small = dataclasses.replace(PLAIN, capacity=7)
    cache = empty_cache(CONFIG, small, batch=B)
    assert refusal(model, prompt, cache=cache).startswith("8 tokens do not fit")
    for batch in (1, 2):
        cache = empty_cache(CONFIG, PLAIN, batch=batch)
        assert refusal(model, prompt, cache=cache).startswith(
            f"there are 3 sequences: expected {batch}"
        )


def test_what_is_not_coded_yet_is_as_without_a_cache(model):
    """So that the other tests compare with something right: up to the first edge."""
    logits, _ = read(model, PROMPT[:, : EDGE - 1])
    wanted = jax.jit(lambda model, text: model(text)[0])(model, PROMPT[:, : EDGE - 1])
    assert_close(logits, wanted[:, -1], ROUNDING, depth=3)
    beyond, _ = read(model, PROMPT[:, :EDGE])
    wanted = jax.jit(lambda model, text: model(text)[0])(model, PROMPT[:, :EDGE])
    assert np.abs(beyond - wanted[:, -1]).max() > 1e-3
