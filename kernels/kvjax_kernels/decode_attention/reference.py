"""Specification and CPU path of `decode_attention`: chunks of slots, online softmax, float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..codes import Codes, unpack_fields

# Slots are read in chunks: it bounds the memory for unpacked codes and for scores, and lets a cache
# that is nearly empty be read in proportion to what it holds. A chunk has about this many numbers,
# within these bounds: on a GPU each turn of the loop costs tens of microseconds.
CHUNK_NUMBERS = 2**24
SMALLEST_CHUNK, LARGEST_CHUNK = 512, 4096


def _chunk_size(per_slot: int) -> int:
    return min(max(CHUNK_NUMBERS // per_slot, SMALLEST_CHUNK), LARGEST_CHUNK)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """One part of a softmax: out = o / l once all parts are merged."""

    m: jax.Array  # float32 [B, T, H], largest score; -inf for an empty part
    l: jax.Array  # float32 [B, T, H], sum of exp(score - m)  # noqa: E741
    o: jax.Array  # float32 [B, T, H, V], sum of exp(score - m) * value


def merge(parts: list[Partial], /) -> jax.Array:
    """The output [B, T, H, V] of one softmax over all parts; zero where every part is empty."""
    m = functools.reduce(jnp.maximum, [part.m for part in parts])
    safe_m = jnp.where(jnp.isneginf(m), 0.0, m)
    weights = [jnp.exp(part.m - safe_m) for part in parts]
    total = sum(w * part.l for w, part in zip(weights, parts, strict=True))
    out = sum(w[..., None] * part.o for w, part in zip(weights, parts, strict=True))
    return out / jnp.where(total == 0.0, 1.0, total)[..., None]


def reference(
    queries, keys, value, positions_BS, start_BT, stop_BT, /, *, scale, corrections, used, layer
) -> Partial:
    """See `decode_attention`. Inside, heads come first and tokens last: [B, H, T, S]."""
    (B, T, H, _), S = queries[0].shape, positions_BS.shape[1]
    block = _block_size([*keys, value])
    per_slot = B * (
        sum(_num_heads(key) * q.shape[-1] for q, key in zip(queries, keys, strict=True)) + H * T
    )
    chunk = min(S, max(_chunk_size(per_slot) // block, 1) * block)
    queries = tuple(q.astype(jnp.float32).transpose(0, 2, 1, 3) for q in queries)
    noises = [f * jnp.sum(q * q, axis=-1) for f, q in zip(corrections, queries, strict=True)]

    def body(i, running):
        # The last chunk is moved back to fit; its first slots were seen by the one before.
        begin = jnp.minimum(i * chunk, S - chunk)
        take = functools.partial(_take, layer=layer, begin=begin, size=chunk, block=block)
        position_BS = jax.lax.dynamic_slice_in_dim(positions_BS, begin, chunk, axis=1)
        fresh_S = begin + jnp.arange(chunk) >= i * chunk
        seen_BTS = (
            (position_BS[:, None, :] >= start_BT[:, :, None])
            & (position_BS[:, None, :] < stop_BT[:, :, None])
            & fresh_S[None, None, :]
        )
        taken = [take(key) for key in keys]
        s_BHTS = scale * sum(_score(q, key) for q, key in zip(queries, taken, strict=True))
        for factor, noise_BHT, key in zip(corrections, noises, taken, strict=True):
            if factor:
                s_BHTS = s_BHTS - noise_BHT[..., None] * _squared_scale(key, H)
        return _accumulate(running, s_BHTS, seen_BTS, taken[0] if value is None else take(value))

    kept = keys[0] if value is None else value
    size_v = kept.size if isinstance(kept, Codes) else kept.shape[-1]
    running = (
        jnp.full((B, H, T), -jnp.inf, jnp.float32),
        jnp.zeros((B, H, T), jnp.float32),
        jnp.zeros((B, H, T, size_v), jnp.float32),
    )
    if chunk == S:
        running = body(0, running)
    else:
        chunks = -(-S // chunk) if used is None else jnp.minimum(-(-used // chunk), -(-S // chunk))
        running = jax.lax.fori_loop(0, chunks, body, running)
    return Partial(*(jnp.swapaxes(x, 1, 2) for x in running))


def _block_size(stored) -> int:
    blocks = {part.words.shape[-2] for part in stored if isinstance(part, Codes)}
    if len(blocks) > 1:
        raise ValueError(f"streams have blocks of {sorted(blocks)} tokens: expected one size")
    return blocks.pop() if blocks else 1


def _take(stored, *, layer, begin, size, block):
    """`size` tokens from slot `begin` on, of one layer if there is a layer axis."""
    block = block if isinstance(stored, Codes) else 1
    axis = 2 if layer is None else 3

    def cut(leaf):
        starts, sizes = [jnp.int32(0)] * leaf.ndim, list(leaf.shape)
        starts[axis], sizes[axis] = jnp.asarray(begin // block, jnp.int32), size // block
        if layer is not None:
            starts[0], sizes[0] = jnp.asarray(layer, jnp.int32), 1
        out = jax.lax.dynamic_slice(leaf, starts, sizes)
        return out if layer is None else out[0]

    # Without the barrier XLA pulls the slice into what follows, where it is unpacked again for each
    # row of the product, and may change the layout of the whole cache to suit one product.
    return jax.lax.optimization_barrier(jax.tree.map(cut, stored))


def _num_heads(stored) -> int:
    return (stored.scale if isinstance(stored, Codes) else stored).shape[1]


def _grouped(x_BHTC, stored):
    """[B, G, (H/G) * T, C]: the rows that share a stored head become one matrix."""
    B, H, T, C = x_BHTC.shape
    G = _num_heads(stored)
    return x_BHTC.reshape(B, G, H // G * T, C)


def _score(q_BHTC, key):
    """q . key without decoding: [B, H, T, S]. The parts of `Codes` that are shared by a token or a
    block are factored out of the sum over dims."""
    q_BGMC = _grouped(q_BHTC, key)
    if isinstance(key, Codes):
        s = _score_codes(q_BGMC, key)
    else:
        s = jnp.einsum("BGMC,BGSC->BGMS", q_BGMC, key.astype(jnp.float32), precision="highest")
    return s.reshape(*q_BHTC.shape[:3], -1)


def _score_codes(q_BGMC, key: Codes):
    fields_BGNSC = _fields(key)
    N, S, C = fields_BGNSC.shape[2:]
    fields_BGSC = fields_BGNSC.reshape(*fields_BGNSC.shape[:2], N * S, C)
    padded = jnp.pad(q_BGMC, [(0, 0)] * 3 + [(0, C - key.size)])
    s = jnp.einsum("BGMC,BGSC->BGMS", padded, fields_BGSC, precision="highest")
    q_sum = jnp.sum(q_BGMC, axis=-1)[..., None]
    s = (s - _middle(key) * q_sum) * _per_token(key.scale)
    if key.mean is not None:
        mean_BGNC = key.mean.astype(jnp.float32)
        shared = jnp.einsum("BGMC,BGNC->BGMN", q_BGMC, mean_BGNC, precision="highest")
        s = s + jnp.repeat(shared, S, axis=-1)
    if key.offset is not None:
        s = s + _per_token(key.offset) * q_sum
    return s


def _weigh(p_BGMS, value, seen_BS):
    """sum(p * value) over tokens, [B, G, M, V]; what no query sees may be NaN, counts nothing."""
    if not isinstance(value, Codes):
        # 0 * NaN is NaN: what no query sees must not be multiplied.
        value = jnp.where(seen_BS[:, None, :, None], value.astype(jnp.float32), 0.0)
        return jnp.einsum("BGMS,BGSV->BGMV", p_BGMS, value, precision="highest")
    seen_B11S = seen_BS[:, None, None, :]
    scaled_BGMS = p_BGMS * jnp.where(seen_B11S, _per_token(value.scale), 0.0)
    fields_BGNSV = _fields(value)
    N, S, V = fields_BGNSV.shape[2:]
    fields_BGSV = fields_BGNSV.reshape(*fields_BGNSV.shape[:2], N * S, V)
    o = jnp.einsum("BGMS,BGSV->BGMV", scaled_BGMS, fields_BGSV, precision="highest")
    o = o[..., : value.size] - _middle(value) * jnp.sum(scaled_BGMS, axis=-1)[..., None]
    if value.mean is not None:
        seen_BN = jnp.any(seen_BS.reshape(-1, N, S), axis=-1)
        mean_BGNV = jnp.where(seen_BN[:, None, :, None], value.mean.astype(jnp.float32), 0.0)
        weight_BGMN = jnp.sum(p_BGMS.reshape(*p_BGMS.shape[:3], N, S), axis=-1)
        o = o + jnp.einsum("BGMN,BGNV->BGMV", weight_BGMN, mean_BGNV, precision="highest")
    if value.offset is not None:
        offset = jnp.where(seen_B11S, _per_token(value.offset), 0.0)
        o = o + jnp.sum(p_BGMS * offset, axis=-1)[..., None]
    return o


def _fields(codes: Codes):
    """Raw codes as float32 [B, G, N, S, C], C padded as they are packed."""
    fields = unpack_fields(codes.words, bits=codes.bits)
    return fields.reshape(*fields.shape[:-2], -1).astype(jnp.float32)


def _middle(codes: Codes) -> float:
    """The code that stands for zero."""
    return (2**codes.bits - 1) / 2


def _per_token(x_BGNS):
    """[B, G, 1, N * S] in float32."""
    B, G, N, S = x_BGNS.shape
    return x_BGNS.astype(jnp.float32).reshape(B, G, 1, N * S)


def _squared_scale(key: Codes, H: int):
    """scale^2 of the stored head that serves each query head, [B, H, 1, S]."""
    return jnp.repeat(_per_token(key.scale) ** 2, H // key.scale.shape[1], axis=1)


def _accumulate(running, s_BHTS, seen_BTS, value):
    """Add a chunk of scored tokens to a running softmax (m, l, o)."""
    old_m, l_BHT, o_BHTV = running
    s = jnp.where(seen_BTS[:, None], s_BHTS, -jnp.inf)
    # Only differences of scores matter: the maximum cancels, in the chunks after this one and in
    # `merge`, so it is a constant to the gradient. An empty row has no finite one.
    m = jax.lax.stop_gradient(jnp.maximum(old_m, jnp.max(s, axis=-1)))
    safe_m = jnp.where(jnp.isneginf(m), 0.0, m)
    p = jnp.exp(s - safe_m[..., None])
    fade = jnp.exp(old_m - safe_m)
    added = _weigh(_grouped(p, value), value, jnp.any(seen_BTS, axis=1))
    return (
        m,
        fade * l_BHT + jnp.sum(p, axis=-1),
        fade[..., None] * o_BHTV + added.reshape(o_BHTV.shape),
    )
