"""Filters keep what a plain transcription keeps, and draws follow the probabilities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.sampling import Sampling, keep, sample
from tests.tolerances import EXACT, assert_close

V = 40
filtered = jax.jit(keep)
drawn = jax.jit(sample)


def kept(logits, *, top_k=None, top_p=None, min_p=None):
    """Tokens that stay, by the words of the docstring; ties go to the lower index."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    p = np.exp(logits - logits.max())
    if top_k is not None:
        order = order[:top_k]
    if top_p is not None:
        share = p[order] / p[order].sum()
        reached = np.cumsum(share) >= top_p
        order = order[: 1 + int(np.argmax(reached)) if reached.any() else None]
    if min_p is not None:
        order = [i for i in order if p[i] >= min_p * p[order[0]]]
    return sorted(order)


SETTINGS = [
    Sampling(1.0, *numbers)
    for numbers in itertools.product((None, 5), (None, 0.7), (None, 0.1))
    if numbers != (None, None, None)
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_keep_is_its_transcription(sampling):
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(50, V))).astype(np.float32)
    found = np.asarray(filtered(logits, sampling))
    for row, out in zip(logits, found, strict=True):
        options = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
        stays = kept(row.astype(np.float64), **options)
        assert np.flatnonzero(out > -np.inf).tolist() == stays
        assert_close(out[stays], row[stays], EXACT)


FLAT = np.zeros(V, np.float32)
PEAK = np.where(np.arange(V) == 3, 1e4, -1e4).astype(np.float32)
ALONE = np.where(np.arange(V) == 5, 0.0, -np.inf).astype(np.float32)
PAIR = np.where(np.arange(V) % 20 == 7, 50.0, -50.0).astype(np.float32)


@pytest.mark.parametrize("logits, options, stays", [
    (FLAT, {"top_k": 3}, range(3)),
    (FLAT, {"top_k": V}, range(V)),
    (FLAT, {"top_k": 10 * V}, range(V)),
    (FLAT, {"top_p": 0.26}, range(11)),
    (FLAT, {"top_p": 1e-9}, range(1)),
    (FLAT, {"min_p": 1.0}, range(V)),
    (PEAK, {"top_k": 1}, [3]),
    (PEAK, {"top_p": 1e-9}, [3]),
    (PEAK, {"top_p": 1.0}, [3]),  # the others have no probability
    (PEAK, {"min_p": 1e-9}, [3]),
    (PAIR, {"top_p": 0.5}, [7]),
    (PAIR, {"top_p": 0.51}, [7, 27]),
    (PAIR, {"min_p": 1.0}, [7, 27]),
    (PAIR, {"top_k": 2, "top_p": 0.5, "min_p": 1.0}, [7]),
    (ALONE, {"top_k": 4, "top_p": 0.9, "min_p": 0.1}, [5]),
])  # fmt: skip
def test_ties_and_extremes(logits, options, stays):
    out = np.asarray(filtered(logits[None], Sampling(1.0, **options)))[0]
    assert np.flatnonzero(out > -np.inf).tolist() == list(stays)
    assert not np.isnan(out).any()


def test_filters_follow_the_temperature():
    """At 2 degrees the two best of these are 62 % and 23 %; at 1 they are 86 % and 12 %."""
    logits = np.float32([[4.0, 2.0, 0.0, -2.0]])
    keys = jax.random.split(jax.random.key(0), 300)
    for temperature, tokens in ((1.0, {0}), (2.0, {0, 1})):
        sampling = Sampling(temperature, top_p=0.8)
        found = drawn(jnp.repeat(logits, 300, axis=0), keys, sampling)
        assert set(np.asarray(found).tolist()) == tokens


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-36])
def test_almost_no_temperature_is_the_most_likely_token(temperature):
    logits = np.float32([[0.0, 999.0, 1000.0], [1000.0, 999.0, 0.0], [-5.0, 7.0, 6.0]])
    keys = jax.random.split(jax.random.key(0), 3)
    found = drawn(logits, keys, Sampling.checked(temperature=temperature, top_p=0.9))
    assert found.tolist() == [2, 0, 1]


def test_no_temperature_is_the_most_likely_token():
    logits = np.random.default_rng(1).normal(size=(20, V)).astype(np.float32)
    logits[0] = 0.0
    keys = jax.random.split(jax.random.key(0), 20)
    found = drawn(logits, keys, Sampling.checked(temperature=0.0, top_k=5))
    assert found.dtype == jnp.int32
    assert_close(found, logits.argmax(axis=-1).astype(np.int32), EXACT)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_probabilities(temperature):
    """Chi-square of 20,000 draws among 12 tokens, 11 degrees of freedom: 1 in 10^5 exceeds 43."""
    logits = np.random.default_rng(2).normal(size=12).astype(np.float32)
    draws = 20_000
    keys = jax.random.split(jax.random.key(7), draws)
    found = drawn(np.tile(logits, (draws, 1)), keys, Sampling.checked(temperature=temperature))
    p = np.exp(logits.astype(np.float64) / temperature)
    expected = draws * p / p.sum()
    counts = np.bincount(np.asarray(found), minlength=12)
    assert np.sum((counts - expected) ** 2 / expected) < 43


def test_a_row_depends_on_its_key_and_logits_alone():
    logits = np.random.default_rng(3).normal(size=(8, V)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 8)
    sampling = Sampling(1.0, top_k=5, top_p=0.7, min_p=0.1)
    order = np.random.default_rng(4).permutation(8)
    whole = np.asarray(drawn(logits, keys, sampling))
    assert (np.asarray(drawn(logits[order], keys[order], sampling)) == whole[order]).all()


def test_other_numbers_do_not_compile_anew():
    logits = np.random.default_rng(5).normal(size=(6, V)).astype(np.float32)
    keys, fresh = jax.random.split(jax.random.key(0), 6), jax.jit(lambda *args: sample(*args))
    for temperature, top_k, top_p in ((1.0, 5, 0.5), (0.3, 9, 0.9), (2.0, 1, 0.1)):
        checked = Sampling.checked(temperature=temperature, top_k=top_k, top_p=top_p)
        fresh(logits, keys, checked)
    assert fresh._cache_size() == 1


@pytest.mark.parametrize("options, message", [
    ({"temperature": -1e-9}, "temperature is -1e-09: expected 0 (greedy) or more"),
    ({"temperature": float("nan")}, "temperature is nan: expected 0 (greedy) or more"),
    ({"temperature": float("inf")}, "temperature is inf: expected 0 (greedy) or more"),
    ({"top_k": 0}, "top_k is 0: expected at least 1"),
    ({"temperature": 1.0, "top_k": -1}, "top_k is -1: expected at least 1"),
    ({"top_p": 0.0}, "top_p is 0.0: expected more than 0 and at most 1"),
    ({"top_p": 1.01}, "top_p is 1.01: expected more than 0 and at most 1"),
    ({"min_p": -0.1}, "min_p is -0.1: expected more than 0 and at most 1"),
    ({"min_p": float("nan")}, "min_p is nan: expected more than 0 and at most 1"),
])  # fmt: skip
def test_refusals(options, message):
    with pytest.raises(KvjaxError) as caught:
        Sampling.checked(**options)
    assert str(caught.value) == message


def test_limits_are_allowed():
    assert Sampling.checked(temperature=1.0, top_k=1, top_p=1.0, min_p=1.0).top_p == 1.0
    assert Sampling.checked() == Sampling() == Sampling.checked(temperature=0.0, top_p=0.5)
