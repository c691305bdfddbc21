"""Generation: two drivers of one step, ends of rows, ragged prompts, capacity, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import KvjaxError, Overflow, decode, decode_step, generate, prefill, stream
from kvjax.sampling import Sampling, sample
from tests.tiny import CONFIG, PLAIN, TIERED, VOCAB, empty_cache, model_config, model_of, tokens
from tests.tolerances import EXACT, assert_close

B, CHUNK, NEW = 3, 12, 40
LENGTHS = np.array([30, 4, 51])
PROMPT = tokens(B, 51)
CONFIGS = {"tiered": TIERED, "plain": PLAIN}
CHOICES = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "seed": 3},
}
step = jax.jit(decode_step, donate_argnums=(2,))


@pytest.fixture(scope="module")
def model():
    return model_of(CONFIG)


@pytest.fixture(scope="module")
def generated(model):
    """Of (cache, choice), computed once."""

    @functools.cache
    def of(cache, choice, row=None):
        prompt, lengths = (PROMPT, LENGTHS) if row is None else (PROMPT[[row]], LENGTHS[[row]])
        return generate(
            model, prompt, lengths=lengths, max_new_tokens=NEW, cache=CONFIGS[cache],
            chunk=CHUNK, pad_token=-1, **CHOICES[choice],
        )  # fmt: skip

    return of


def continuations(out, lengths=LENGTHS, new=NEW):
    return np.stack([row[n : n + new] for row, n in zip(out, lengths, strict=True)])


def naive(model, config, choice):
    """A Python loop over the public pieces, [B, NEW]."""
    options, compiled = dict(CHOICES[choice]), step._cache_size()
    seed = options.pop("seed", 0)
    keys = jnp.stack([jax.random.fold_in(jax.random.key(seed), row) for row in range(B)])
    sampling, out = Sampling.checked(**options), []
    cache = empty_cache(CONFIG, config, batch=B)
    logits, cache = prefill(model, PROMPT, cache, lengths=LENGTHS, chunk=CHUNK)
    for index in range(NEW):
        now = jnp.stack([jax.random.fold_in(key, index) for key in keys])
        out.append(np.asarray(sample(logits, now, sampling)))
        logits, cache = step(model, out[-1], cache)
    assert step._cache_size() <= compiled + 1
    return np.stack(out, axis=1)


@pytest.mark.parametrize("cache, choice", [("tiered", "greedy"), ("plain", "sampled")])
def test_generate_is_a_loop_of_decode_steps(cache, choice, model, generated):
    assert (continuations(generated(cache, choice)) == naive(model, CONFIGS[cache], choice)).all()


def streamed(model, prompt=PROMPT, **options):
    options = {"lengths": LENGTHS, "max_new_tokens": NEW, "cache": PLAIN, **options}
    return list(stream(model, prompt, chunk=CHUNK, **options))


@pytest.mark.parametrize("choice", CHOICES)
def test_stream_is_generate(choice, model, generated):
    steps = streamed(model, **CHOICES[choice])
    assert all(token.shape == (B,) and token.dtype == np.int32 for token in steps)
    assert (np.stack(steps, axis=1) == continuations(generated("plain", choice))).all()


def test_ragged_prompts_are_joined_with_their_continuations(generated):
    out = generated("plain", "greedy")
    assert out.dtype == np.int32 and out.shape == (B, max(LENGTHS) + NEW)
    for row, length in enumerate(LENGTHS):
        assert (out[row, :length] == PROMPT[row, :length]).all()
        assert (out[row, length + NEW :] == -1).all()
        assert (out[row, : length + NEW] >= 0).all()


@pytest.mark.parametrize("choice", CHOICES)
def test_batch_is_batches_of_one(choice, generated):
    """Row 0 only: that a row does not depend on its place is asserted of the keys below."""
    alone = generated("plain", choice, row=0)
    assert (
        continuations(alone, LENGTHS[:1]) == continuations(generated("plain", choice))[:1]
    ).all()


def test_other_numbers_do_not_compile_anew(model):
    sampled = CHOICES["sampled"]
    first = streamed(model, **sampled)
    compiled = decode._stream_step._cache_size()
    other = streamed(model, **{**sampled, "temperature": 1.7, "top_p": 0.6, "top_k": 50})
    read = []
    seeded = streamed(model, **{**sampled, "seed": 4}, progress=read.append)
    assert sum(read) == max(LENGTHS)
    assert decode._stream_step._cache_size() == compiled
    assert not np.array_equal(first, other) and not np.array_equal(first, seeded)
    assert np.array_equal(streamed(model, **sampled), first)


# Ends


def plain(model, prompt=PROMPT, **options):
    options = {"lengths": LENGTHS, "max_new_tokens": NEW, "cache": PLAIN, **options}
    return generate(model, prompt, chunk=CHUNK, **options)


def stop_of(full):
    """A token that ends rows at different steps, and the new tokens of each row up to it."""
    for token in range(VOCAB):
        counts = [list(row).index(token) + 1 if token in row else NEW for row in full]
        if min(counts) > 1 and len(set(counts)) > 1:
            return token, np.array(counts)
    raise AssertionError("no token will do")


def test_stop_token_is_kept_and_padding_follows(model, generated):
    full = continuations(generated("plain", "greedy"))
    token, counts = stop_of(full)
    out = plain(model, stop_tokens=[token], pad_token=60)
    assert out.shape == (B, max(LENGTHS + counts))
    for row in range(B):
        begin, end = LENGTHS[row], LENGTHS[row] + counts[row]
        assert (out[row, :begin] == PROMPT[row, :begin]).all()
        assert (out[row, begin:end] == full[row, : counts[row]]).all()
        assert (out[row, end:] == 60).all()
    steps = np.stack(streamed(model, stop_tokens=[token], pad_token=60), axis=1)
    assert steps.shape == (B, max(counts))
    for row in range(B):
        assert (steps[row, : counts[row]] == full[row, : counts[row]]).all()
        assert (steps[row, counts[row] :] == 60).all()


def test_generation_ends_with_its_last_row(model, generated):
    full = continuations(generated("plain", "greedy"))
    token, counts = stop_of(full)
    row = counts.argmin()
    same = {"lengths": LENGTHS[[row] * B], "stop_tokens": [token]}
    assert plain(model, PROMPT[[row] * B], **same).shape == (B, LENGTHS[row] + counts[row])
    assert len(streamed(model, PROMPT[[row] * B], **same)) == counts[row]


def test_one_new_token_is_the_most_likely_after_the_prompt(model, generated):
    out = plain(model, max_new_tokens=1)
    empty = empty_cache(CONFIG, PLAIN, batch=B)
    logits, _ = prefill(model, PROMPT, empty, lengths=LENGTHS, chunk=CHUNK)
    assert (continuations(out, new=1)[:, 0] == logits.argmax(-1)).all()
    assert out.shape == (B, max(LENGTHS) + 1)
    assert (streamed(model, max_new_tokens=1)[0] == logits.argmax(-1)).all()


# A live cache


def test_continuing_from_a_cache_is_a_longer_prompt(model, generated):
    cut = np.array([7, 1, 40])
    empty = empty_cache(CONFIG, PLAIN, batch=B)
    _, live = prefill(model, PROMPT, empty, lengths=cut, chunk=CHUNK)
    before = jax.tree.map(np.array, live)
    rest = np.zeros((B, max(LENGTHS - cut)), np.int32)
    for row in range(B):
        rest[row, : LENGTHS[row] - cut[row]] = PROMPT[row, cut[row] : LENGTHS[row]]
    wanted = continuations(generated("plain", "greedy"))
    for _ in range(2):  # the cache is the caller's still
        out = plain(model, rest, lengths=LENGTHS - cut, cache=live)
        assert (continuations(out, LENGTHS - cut) == wanted).all()
    steps = streamed(model, rest, lengths=LENGTHS - cut, cache=live)
    assert (np.stack(steps, axis=1) == wanted).all()
    assert_close(jax.tree.leaves(live), jax.tree.leaves(before), EXACT)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_that_overflows_inside_a_jit_is_nan(name, model):
    prompt, fits = tokens(B, 160), np.array([50, 160, 31])
    results = []
    for lengths in (fits, np.minimum(fits, 60)):
        empty = empty_cache(CONFIG, CONFIGS[name], batch=B)
        _, cache = prefill(model, prompt, empty, lengths=lengths, chunk=CHUNK)
        for _ in range(2):
            logits, cache = step(model, prompt[:, 0], cache)
        results.append(np.asarray(logits))
    assert np.isnan(results[0][1]).all()
    assert np.isfinite(results[1]).all()
    assert_close(results[0][[0, 2]], results[1][[0, 2]], EXACT)


# Capacity


def test_sliding_goes_on_past_its_capacity(model):
    """Without sinks it is attention in a window, as the model computes it without a cache."""
    window = 16
    sliding = dataclasses.replace(PLAIN, sinks=0, capacity=window, overflow=Overflow.SLIDE)
    out = plain(model, cache=sliding)
    narrow = model_of(windowed(window))
    logits = np.asarray(jax.jit(lambda m, t: m(t)[0])(narrow, np.maximum(out, 0)))
    for row, length in enumerate(LENGTHS):
        chosen = logits[row, length - 1 : length + NEW - 1].argmax(-1)
        assert (chosen == out[row, length : length + NEW]).all()


def windowed(window):
    layers = [
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=window))
        for layer in CONFIG.layers
    ]
    return model_config(*layers)


def test_capacity_is_known_before_anything_is_computed(model, monkeypatch):
    full = 160 - max(LENGTHS) + 1  # the last token is not fed
    assert plain(model, max_new_tokens=full).shape == (B, 161)

    def fail(*_, **__):
        raise AssertionError("something was computed")

    monkeypatch.setattr(decode, "prefill", fail)
    for run in (plain, stream_at_once):
        with pytest.raises(KvjaxError, match="161 tokens do not fit the cache's capacity of 160"):
            run(model, max_new_tokens=full + 1)


def stream_at_once(model, prompt=PROMPT, **options):
    """Only the call: nothing is drawn from it."""
    options = {"lengths": LENGTHS, "max_new_tokens": NEW, "cache": PLAIN, **options}
    return stream(model, prompt, chunk=CHUNK, **options)


@pytest.mark.parametrize(
    "config, length, new, capacity",
    [(None, 200, 56, 256), (None, 200, 57, 512), (PLAIN, 1, 1, 160)],
)
def test_default_cache_has_room_rounded_up(config, length, new, capacity, model, monkeypatch):
    seen = []
    monkeypatch.setattr(decode, "_prefill_owned", lambda *given: seen.append(given[3]))
    with pytest.raises(TypeError):  # prefill gives nothing
        generate(model, tokens(1, length), max_new_tokens=new, cache=config)
    assert seen[0].capacity == capacity and seen[0].batch == 1
    assert seen[0].groups[0].hot.value.dtype == jnp.float32


def test_longer_than_trained_is_a_warning():
    short = model_of(dataclasses.replace(CONFIG, max_positions=90))
    with pytest.warns(UserWarning, match="91 positions exceed the 90 that the model was trained"):
        stream_at_once(short)
    stream_at_once(short, max_new_tokens=39)  # warnings are errors


REFUSED = [
    ({"prompt": [[1, 2, 3], [1, 2]]}, "rows of tokens differ in length: pad them at the end"),
    ({"cache": "balanced"}, "cache is a str: expected a CacheConfig"),
    ({"stop_tokens": 3}, "stop_tokens is 3: expected a sequence"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5: expected at least 1"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0: expected at least 1"),
    ({"max_new_tokens": -3}, "max_new_tokens is -3: expected at least 1"),
    ({"prompt": PROMPT[:, :0]}, "a prompt is empty: expected at least one token in each row"),
    ({"prompt": np.zeros((0, 4), np.int32), "lengths": None}, "a prompt is empty"),
    ({"prompt": PROMPT.astype(np.float32)}, "tokens have shape (3, 51) and dtype float32"),
    ({"prompt": PROMPT + VOCAB}, "token id "),
    ({"lengths": [1, 2]}, "lengths have shape (2,): expected one per row, (3,)"),
    ({"lengths": [1, 2, 52]}, "a length is 52: expected at most 51, the width of tokens"),
    ({"temperature": -0.5}, "temperature is -0.5: expected 0 (greedy) or more"),
    ({"top_k": 0}, "top_k is 0: expected at least 1"),
    ({"top_p": 1.5}, "top_p is 1.5: expected more than 0 and at most 1"),
    ({"cache": dataclasses.replace(PLAIN, capacity=20)}, "90 tokens do not fit"),
    ({"lengths": [30.0, 4.0, 51.0]}, "lengths have dtype float64: expected integers"),
]


def test_a_cache_of_another_batch_is_refused(model):
    other = empty_cache(CONFIG, PLAIN, batch=2)
    for run in (plain, stream_at_once):
        with pytest.raises(KvjaxError, match="there are 3 sequences: expected 2, the batch of the"):
            run(model, cache=other)


@pytest.mark.parametrize("options, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_come_with_the_call(options, message, model):
    for run in (plain, stream_at_once):
        with pytest.raises(KvjaxError) as caught:
            run(model, **options)
        assert str(caught.value).startswith(message)
