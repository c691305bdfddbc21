"""What a cache costs in quality is measured as defined, and a bad cache is told from a good one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from kvjax import evaluate
from kvjax.cache_config import Tier
from kvjax.errors import KvjaxError
from kvjax.evaluate import compare, effective_bits, first_coded
from tests.emulated import SINK, UNSEEN, placement
from tests.tiny import BLOCK, PLAIN, TIERED, VOCAB, model_config, model_of, normal, tokens
from tests.tolerances import EXACT, ROUNDING, assert_close

TEXT, FROM, CHUNK = tokens(130), 70, 16
# One bit from the first block on, by the code that loses most.
DESTROYED = dataclasses.replace(
    TIERED, tiers=(Tier(1, 1),), hot=1, sinks=0, exempt_first=0, code="literal"
)


@pytest.fixture(scope="module")
def model():
    return model_of(model_config(BLOCK))


@pytest.fixture(scope="module")
def measured(model):
    @functools.cache
    def of(config, chunk=CHUNK):
        return compare(model, TEXT, config, score_from=FROM, dtype="float32", chunk=chunk)

    return of


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def test_plain_cache_costs_nothing(measured):
    scores, cache = measured(PLAIN)
    quality = scores.quality()
    assert quality.scored_tokens == len(TEXT) - FROM - 1
    assert (quality.kl_mean, quality.kl_p99) == (0.0, 0.0)
    assert (quality.top1_agreement, quality.perplexity_ratio) == (1.0, 1.0)
    assert quality.perplexity == quality.perplexity_full
    assert cache.lengths.tolist() == [len(TEXT)]


def test_perplexity_is_that_of_the_model_without_a_cache(measured, model):
    logits = jax.jit(lambda model, text: model(text)[0])(model, TEXT[None])
    loss = -log_softmax(np.asarray(logits)[0, FROM:-1])[np.arange(59), TEXT[FROM + 1 :]]
    scores, _ = measured(PLAIN)
    assert_close(scores.loss_full.astype(np.float32), loss, ROUNDING, depth=2)
    wanted = np.exp(loss.mean())
    assert_close(np.float32(scores.quality().perplexity_full), wanted, ROUNDING, depth=2)


def test_size_of_the_chunks_does_not_matter(measured):
    """Of 60: a chunk ends with the text, whose last token predicts nothing."""
    (wanted, _), (found, _) = measured(PLAIN), measured(PLAIN, 60)
    assert_close(found.loss.astype(np.float32), wanted.loss.astype(np.float32), ROUNDING, depth=2)


def test_a_destroyed_cache_is_noticed(measured):
    (scores, _), (full, _) = measured(DESTROYED), measured(PLAIN)
    quality = scores.quality()
    assert_close(scores.loss_full, full.loss_full, EXACT)
    assert (scores.kl > 0.0).all()
    assert quality.kl_p99 > quality.kl_mean > 0.02
    assert quality.top1_agreement < 0.9
    assert quality.perplexity != quality.perplexity_full


def test_metrics_are_their_definitions():
    expected, logits = 3 * normal(2, 5, VOCAB), 3 * normal(2, 5, VOCAB, seed=1)
    logits[0, 0] = expected[0, 0] + 1.0
    targets = tokens(2, 5)
    kl, loss, loss_full, same = np.asarray(evaluate._metrics(expected, logits, targets))
    p, q = log_softmax(expected), log_softmax(logits)
    assert_close(kl, np.sum(np.exp(p) * (p - q), axis=-1), ROUNDING)
    assert_close(loss, -np.take_along_axis(q, targets[..., None], axis=-1)[..., 0], ROUNDING)
    assert_close(loss_full, -np.take_along_axis(p, targets[..., None], axis=-1)[..., 0], ROUNDING)
    assert_close(same, (p.argmax(-1) == q.argmax(-1)).astype(np.float32), EXACT)
    assert same[0, 0] == 1.0


def test_quality_summarises_scores():
    kl = np.arange(101.0)
    loss = np.full(101, np.log(3.0))
    scores = evaluate.Scores(kl, loss, loss - np.log(1.5), (kl < 25).astype(float))
    quality = scores.quality()
    assert (quality.scored_tokens, quality.kl_mean, quality.kl_p99) == (101, 50.0, 99.0)
    assert_close(
        [quality.perplexity, quality.perplexity_full, quality.perplexity_ratio],
        [3.0, 2.0, 1.5],
        ROUNDING,
    )
    assert quality.top1_agreement == 25 / 101


def test_progress_adds_up_to_both_runs(model):
    steps = []
    compare(
        model, TEXT, PLAIN, score_from=FROM, dtype="float32", chunk=CHUNK, progress=steps.append
    )
    assert sum(steps) == 2 * len(TEXT)


@pytest.mark.parametrize("config", [TIERED, dataclasses.replace(TIERED, sinks=0, hot=5, block=4)])
def test_first_coded_is_the_first_query_that_meets_a_code(config):
    seen = placement(config, 60)
    coded = ~np.isin(seen, (UNSEEN, SINK, len(config.tiers)))
    assert first_coded(config) == np.argmax(coded.any(axis=1))
    assert first_coded(config.plain()) == 0


def test_effective_bits(measured, model):
    _, full = measured(PLAIN)
    assert effective_bits(model, full) == 32.0
    _, coded = measured(DESTROYED)
    assert effective_bits(model, coded) == 8 * coded.nbytes / (160 * 2 * 2 * 8)


@pytest.mark.parametrize("score_from", [0, 129, 130, -1])
def test_nothing_to_score_is_refused(score_from, model):
    with pytest.raises(KvjaxError) as caught:
        compare(model, TEXT, PLAIN, score_from=score_from)
    assert str(caught.value) == (
        f"scoring starts at {score_from} in 130 tokens: expected at least 1 and at most 128"
    )


def test_token_outside_the_vocabulary_is_refused_in_the_scored_part_too(model):
    text = TEXT.copy()
    text[FROM + 5] = VOCAB
    with pytest.raises(KvjaxError, match=f"token id {VOCAB} is outside the vocabulary"):
        compare(model, text, PLAIN, score_from=FROM)


def test_text_beyond_the_capacity_is_refused(model):
    small = dataclasses.replace(PLAIN, capacity=129)
    with pytest.raises(KvjaxError, match="130 tokens do not fit the cache's capacity of 129"):
        compare(model, TEXT, small, score_from=FROM)
