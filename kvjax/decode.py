"""Prefill, one step, and two drivers of that step: `generate` (fused) and `stream` (Python)."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .cache import Cache, init_cache
from .cache_config import CacheConfig
from .errors import KvjaxError
from .model import Model
from .sampling import Sampling, sample

# Tokens of one call while a prompt is read. Prompts of other lengths reuse the compiled step.
CHUNK = 256
# Capacities and output buffers are rounded up to this, so that nearby lengths compile once.
ROUND = 256


def prefill(
    model: Model,
    tokens,
    cache: Cache,
    /,
    *,
    lengths=None,
    chunk: int = CHUNK,
    progress: Callable[[int], None] | None = None,
) -> tuple[jax.Array, Cache]:
    """Read prompts into a cache, `chunk` tokens at a time.

    The result does not depend on how a prompt is divided over calls: to the last bit for calls
    with one `chunk`, since each token then meets the same arithmetic.

    Args:
      tokens: int [B, L], padded at the end.
      cache: what came before; not changed.
      lengths: int [B], the real tokens of each row; None: all.
      progress: called with the number of tokens read, after each chunk.

    Returns:
      (float32 logits [B, vocab] after the last token of each row, cache).

    Raises:
      KvjaxError: an empty prompt, a token id outside the vocabulary, or no room in the cache.
    """
    tokens, lengths = checked_prompt(model, tokens, lengths)
    cache.require_room(lengths)
    return _prefill_owned(model, tokens, lengths, _copied(cache), chunk, progress)


def _copied(cache: Cache) -> Cache:
    """Steps give their cache up to be overwritten; a caller keeps its own."""
    return jax.tree.map(jnp.copy, cache)


def _prefill_owned(
    model: Model,
    tokens: np.ndarray,
    lengths: np.ndarray,
    cache: Cache,
    chunk: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[jax.Array, Cache]:
    """`prefill` of checked input into a cache that nobody else holds."""
    if chunk < 1:
        raise KvjaxError(f"chunk is {chunk}: expected at least 1")
    logits = jnp.zeros((tokens.shape[0], model.config.vocab_size), jnp.float32)
    for begin in range(0, tokens.shape[1], chunk):
        piece = tokens[:, begin : begin + chunk]
        counts = np.clip(lengths - begin, 0, piece.shape[1]).astype(np.int32)
        piece = np.pad(piece, ((0, 0), (0, chunk - piece.shape[1])))
        logits, cache = _prefill_step(model, piece, cache, counts, logits)
        if progress is not None:
            logits.block_until_ready()
            progress(int(counts.max()))
    return logits, cache


def decode_step(model: Model, tokens_B: jax.Array, cache: Cache, /) -> tuple[jax.Array, Cache]:
    """Logits [B, vocab] after one more token per row; pure, to be jitted with the cache donated."""
    return model(tokens_B[:, None], cache, last_only=True)


def generate(
    model: Model,
    tokens,
    /,
    *,
    max_new_tokens: int,
    cache: CacheConfig | Cache | None = None,
    lengths=None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    pad_token: int = 0,
    chunk: int = CHUNK,
) -> np.ndarray:
    """Continue prompts; the loop over new tokens is one compiled computation.

    Args:
      tokens: int [B, L], padded at the end.
      max_new_tokens: at most so many per row.
      cache: which kind to make (None: a plain one), or one that holds what came before.
      lengths: int [B], the real tokens of each row; None: all.
      temperature: 0 is greedy; see `kvjax.sampling` for the filters.
      seed: row i draws from `seed` and i alone, so a row does not depend on its batch.
      stop_tokens: a row ends with the first of these, which is kept.
      pad_token: fills rows that are shorter than the longest.

    Returns:
      int32 [B, longest row]: prompt, continuation, padding.

    Raises:
      KvjaxError: input out of range, or a context longer than the cache's capacity (known before
        anything is computed).
    """
    prompt, lengths = checked_prompt(model, tokens, lengths)
    sampling = Sampling.checked(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    live = _live_cache(model, cache, lengths, max_new_tokens)
    logits, live = _prefill_owned(model, prompt, lengths, live, chunk)
    room = -(-max_new_tokens // ROUND) * ROUND
    keys = _row_keys(seed, prompt.shape[0])
    stops = _stop_array(stop_tokens)
    new, counts, _ = _generate_loop(
        model, logits, live, sampling, keys, stops, max_new_tokens, room
    )
    return _join(prompt, lengths, np.asarray(new), np.asarray(counts), pad_token)


def stream(
    model: Model,
    tokens,
    /,
    *,
    max_new_tokens: int,
    cache: CacheConfig | Cache | None = None,
    lengths=None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    pad_token: int = 0,
    chunk: int = CHUNK,
    progress: Callable[[int], None] | None = None,
) -> Iterator[np.ndarray]:
    """Like `generate`, but yields each new token as it comes: int32 [B] per step.

    A row that has ended yields `pad_token`. Input is checked at the call, not at the first token.
    """
    prompt, lengths = checked_prompt(model, tokens, lengths)
    sampling = Sampling.checked(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    live = _live_cache(model, cache, lengths, max_new_tokens)
    keys = _row_keys(seed, prompt.shape[0])
    stops = _stop_array(stop_tokens)

    def tokens_one_by_one(live):
        logits, live = _prefill_owned(model, prompt, lengths, live, chunk, progress)
        done = jnp.zeros((prompt.shape[0],), bool)
        token, done = _pick(logits, keys, jnp.int32(0), sampling, stops, done)
        ended = np.zeros((prompt.shape[0],), bool)
        for step in range(1, max_new_tokens + 1):
            yield np.where(ended, pad_token, np.asarray(token)).astype(np.int32)
            ended = np.asarray(done)
            if ended.all() or step == max_new_tokens:
                return
            token, done, live = _stream_step(
                model, token, done, live, keys, jnp.int32(step), sampling, stops
            )

    return tokens_one_by_one(live)


@functools.partial(jax.jit, donate_argnames=("cache", "logits"))
def _prefill_step(model, piece, cache, counts, logits):
    new, cache = model(piece, cache, counts=counts, last_only=True)
    # A row that ended in an earlier chunk keeps the logits it had there.
    return jnp.where((counts > 0)[:, None], new, logits), cache


def _advance(model, token, done, cache, keys, step, sampling, stops):
    """The step that both drivers share: feed a token, pick the next."""
    counts = jnp.where(done, 0, 1).astype(jnp.int32)
    logits, cache = model(token[:, None], cache, counts=counts, last_only=True)
    token, done = _pick(logits, keys, step, sampling, stops, done)
    return token, done, cache


_stream_step = jax.jit(_advance, donate_argnames=("cache",))


@jax.jit
def _pick(logits, keys, step, sampling, stops, done):
    token = sample(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, step), sampling)
    return token, done | jnp.any(token[:, None] == stops[None, :], axis=-1)


@functools.partial(jax.jit, static_argnames=("room",), donate_argnames=("cache",))
def _generate_loop(model, logits, cache, sampling, keys, stops, max_new_tokens, room):
    """(new tokens [B, room], how many of them per row, cache)."""
    B = logits.shape[0]
    done = jnp.zeros((B,), bool)
    token, done = _pick(logits, keys, jnp.int32(0), sampling, stops, done)
    new = jnp.zeros((B, room), jnp.int32).at[:, 0].set(token)
    state = (jnp.int32(1), token, done, cache, new, jnp.ones((B,), jnp.int32))

    def unfinished(state):
        step, _, done, *_ = state
        return (step < max_new_tokens) & ~jnp.all(done)

    def body(state):
        step, token, done, cache, new, counts = state
        counts = counts + jnp.where(done, 0, 1)
        token, done, cache = _advance(model, token, done, cache, keys, step, sampling, stops)
        return step + 1, token, done, cache, new.at[:, step].set(token), counts

    *_, cache, new, counts = jax.lax.while_loop(unfinished, body, state)
    return new, counts, cache


def checked_prompt(model: Model, tokens, lengths) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, L], lengths [B]) as int32, or a refusal; lengths None: all tokens are real."""
    try:
        tokens = np.asarray(tokens)
    except ValueError:
        raise KvjaxError(
            "rows of tokens differ in length: pad them at the end and pass lengths=[...]"
        ) from None
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise KvjaxError(
            f"tokens have shape {tokens.shape} and dtype {tokens.dtype}: expected integers "
            "[batch, length]"
        )
    B, L = tokens.shape
    lengths = np.full((B,), L) if lengths is None else np.asarray(lengths)
    if lengths.shape != (B,):
        raise KvjaxError(f"lengths have shape {lengths.shape}: expected one per row, ({B},)")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise KvjaxError(f"lengths have dtype {lengths.dtype}: expected integers")
    if B == 0 or L == 0 or lengths.min() < 1:
        raise KvjaxError("a prompt is empty: expected at least one token in each row")
    if lengths.max() > L:
        raise KvjaxError(f"a length is {lengths.max()}: expected at most {L}, the width of tokens")
    vocab = model.config.vocab_size
    real = tokens[np.arange(L)[None, :] < lengths[:, None]]
    if real.min() < 0 or real.max() >= vocab:
        bad = real[(real < 0) | (real >= vocab)][0]
        raise KvjaxError(f"token id {bad} is outside the vocabulary of {vocab}")
    return tokens.astype(np.int32), lengths.astype(np.int32)


def _live_cache(model: Model, cache, lengths: np.ndarray, max_new_tokens: int) -> Cache:
    """A cache of our own with room for prompt and continuation, or a refusal."""
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise KvjaxError(f"max_new_tokens is {max_new_tokens!r}: expected at least 1")
    if isinstance(cache, Cache):
        live = cache
    else:
        config = CacheConfig() if cache is None else cache
        if not isinstance(config, CacheConfig):
            raise KvjaxError(
                f"cache is a {type(cache).__name__}: expected a CacheConfig such as "
                "CacheConfig.preset('balanced'), a Cache or None"
            )
        capacity = config.capacity
        if capacity is None:
            capacity = -(-(int(lengths.max()) + max_new_tokens) // ROUND) * ROUND
        dtype = config.dtype or model.dtype
        live = init_cache(model.config, config, batch=len(lengths), capacity=capacity, dtype=dtype)
    # The last token is not fed.
    live.require_room(lengths + (max_new_tokens - 1))
    longest = int(np.max(np.asarray(live.lengths) + lengths)) + max_new_tokens
    if longest > model.config.max_positions:
        warnings.warn(
            f"{longest} positions exceed the {model.config.max_positions} that the model was "
            "trained for: expect worse text",
            stacklevel=3,
        )
    return _copied(live) if live is cache else live


def _row_keys(seed: int, batch: int) -> jax.Array:
    rows = jnp.arange(batch, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)


def _stop_array(stop_tokens: Sequence[int]) -> jax.Array:
    """Never empty; -1 is no token."""
    if not isinstance(stop_tokens, Sequence | np.ndarray):
        raise KvjaxError(f"stop_tokens is {stop_tokens!r}: expected a sequence of token ids")
    return jnp.asarray([*stop_tokens] or [-1], jnp.int32)


def _join(prompt, lengths, new, counts, pad_token) -> np.ndarray:
    out = np.full((len(prompt), int((lengths + counts).max())), pad_token, np.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        out[row, :length] = prompt[row, :length]
        out[row, length : length + count] = new[row, :count]
    return out
