"""The tiered cache once more, from its definition: one pass over a whole sequence, in float64.

No rings, no appends, no demotion on the way: the tier of each key is chosen per query. Where the
cache rounds (to a code, to bfloat16), so does this; `Edges` tells how close a number came to being
rounded otherwise, which float32 could then do. Shares no code with kvjax but the constants.
"""

import dataclasses

import ml_dtypes
import numpy as np

from kvjax.cache_config import CacheConfig, Overflow
from kvjax.quant.nested import NOISE, SHARE_OF_2_BIT, STEPS
from tests import oracle

UNSEEN, SINK = -2, -1  # places; the others are the index of a tier, and their number: hot


def placement(config: CacheConfig, length: int, *, capacity: int | None = None) -> np.ndarray:
    """Where the query at position t finds position p: int [t, p]."""
    t, p = np.arange(length)[:, None], np.arange(length)[None, :]
    # A sliding cache forgets what its capacity does not hold.
    slides = capacity is not None and config.overflow is Overflow.SLIDE
    block, fixed = (p - config.sinks) // config.block, config.sinks + config.hot
    coded = np.maximum(t + 1 - fixed, 0) // config.block
    out, end = np.full((length, length), len(config.tiers)), coded
    for index, tier in enumerate(config.tiers):
        if tier.tokens is not None:
            begin = np.maximum(end - tier.tokens // config.block, 0)
        elif slides:
            held = (capacity - fixed) // config.block
            begin = np.maximum(coded - held, 0)
            out = np.where(block < begin, UNSEEN, out)
        else:
            begin = np.zeros_like(end)
        out = np.where((begin <= block) & (block < end), index, out)
        end = begin
    if slides and not config.tiers:
        window = -(-(capacity - config.sinks) // config.block) * config.block
        out = np.where(p <= t - window, UNSEEN, out)
    return np.where(p > t, UNSEEN, np.where(p < config.sinks, SINK, out))


class Edges:
    """Rounds, and keeps the least distance to a number that rounds differently."""

    def __init__(self):
        self.code = np.inf  # in steps
        self.bfloat16 = self.choice = np.inf  # relative

    def floor(self, x, low, high):
        """Floor, clipped. A zero is exact, also in float32."""
        edge = np.clip(np.round(x), low + 1, high)
        self.code = min(self.code, np.where(x == 0.0, np.inf, np.abs(x - edge)).min())
        return np.clip(np.floor(x), low, high).astype(int)

    def narrow(self, x, *, exact=False):
        """To bfloat16 and back; `exact` numbers are the same in float32, where a tie is a tie."""
        _, exponent = np.frexp(x)
        steps = np.abs(x) / np.exp2(exponent - 8.0)
        gap = np.abs(steps % 1 - 0.5) / np.maximum(steps, 1.0)
        self.bfloat16 = min(self.bfloat16, np.where(exact & (gap == 0.0), np.inf, gap).min())
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)

    def are_far(self, *, bfloat16=True) -> bool:
        """Whether float32 rounds all alike; else take other numbers."""
        return self.code > 2e-6 and self.choice > 1e-6 and (self.bfloat16 > 3e-7 or not bfloat16)


@dataclasses.dataclass
class Coded:
    """What one tier would hold of all tokens of one head, [N, S, C]."""

    codes: np.ndarray
    scale: np.ndarray
    mean: np.ndarray | None
    offset: np.ndarray | None
    vectors: np.ndarray  # in the basis of the model


def hadamard(size: int) -> np.ndarray:
    i = np.arange(size)
    ones = np.bitwise_count(i[:, None] & i).astype(float)
    return (-1.0) ** ones / np.sqrt(size)


def nested(x_NSC, bits_of_tiers, *, is_key: bool, edges: Edges) -> list[Coded]:
    """Each tier's form of all blocks: coded in the first tier, then passed down."""
    H = hadamard(x_NSC.shape[-1])
    y, mean = x_NSC @ H, None
    if is_key:
        mean = edges.narrow(y.mean(axis=-2), exact=True)
        y = y - mean[..., None, :]
    codes, have, scale, out = best_of_steps(y, edges), 4, None, []
    for bits in bits_of_tiers:
        if scale is None or bits < have:
            codes = codes >> (have - bits)
            c = codes - (2**bits - 1) / 2
            inner = np.sum(y * c, axis=-1)
            over, under = (np.sum(y * y, axis=-1), inner) if is_key else (inner, np.sum(c * c, -1))
            if scale is None:
                scale = edges.narrow(over / under)
            else:  # sums of codes, exact in any order: float32 has one result
                fit = over.astype(np.float32) / under.astype(np.float32)
                scale = (scale.astype(np.float32) * fit).astype(ml_dtypes.bfloat16).astype(float)
            y, have = c, bits  # all that is known from here on
        vectors = scale[..., None] * y + (0.0 if mean is None else mean[..., None, :])
        out.append(Coded(codes, scale, mean, None, vectors @ H))
    return out


def best_of_steps(y, edges: Edges):
    """4-bit codes of each token, with the step that leaves least."""
    rms = np.sqrt(np.mean(y**2, axis=-1, keepdims=True))
    codes = np.stack([edges.floor(y / (step * rms), -8, 7) + 8 for step in STEPS])

    def explained(c):
        return np.sum(y * c, axis=-1) ** 2 / np.sum(c * c, axis=-1)

    merit = explained(codes - 7.5) + SHARE_OF_2_BIT * explained((codes >> 2) - 1.5)
    best = merit.argmax(axis=0)
    chosen = np.take_along_axis(codes, best[None, ..., None], axis=0)
    gap = 1.0 - merit / merit.max(axis=0)
    edges.choice = min(edges.choice, gap[np.any(codes != chosen, axis=-1)].min())
    return chosen[0]


def literal(x_NSC, bits_of_tiers, *, is_key: bool, edges: Edges) -> list[Coded]:
    """The same for the plain code, which quantises anew what is left."""
    del is_key
    x, have, out = x_NSC, None, []
    for bits in bits_of_tiers:
        if bits != have:
            out.append(_literal(x, bits, edges, exact=have is not None))
            x, have = out[-1].vectors, bits
        else:
            out.append(out[-1])
    return out


def _literal(x, bits, edges, *, exact) -> Coded:
    if bits == 1:
        scale = edges.narrow(2 * np.abs(x).mean(axis=-1), exact=exact)
        codes = edges.floor(x / scale[..., None], -1, 0) + 1
        return Coded(codes, scale, None, None, scale[..., None] * (codes - 0.5))
    low, top = x.min(axis=-1, keepdims=True), 2**bits - 1
    step = (x.max(axis=-1, keepdims=True) - low) / top
    codes = edges.floor((x - low) / step + 0.5, 0, top)
    scale, offset = edges.narrow(step[..., 0]), edges.narrow((low + step * top / 2)[..., 0])
    vectors = scale[..., None] * (codes - top / 2) + offset[..., None]
    return Coded(codes, scale, None, offset, vectors)


CODES = {"nested": nested, "literal": literal}


def in_blocks(x_SC, config: CacheConfig):
    """[N, S, C]: the whole blocks after the sinks."""
    after = x_SC[config.sinks :]
    whole = len(after) // config.block
    return after[: whole * config.block].reshape(whole, config.block, -1)


def coded(x_SC, config: CacheConfig, *, is_key: bool, edges: Edges) -> list[Coded]:
    bits = [tier.key_bits if is_key else tier.value_bits for tier in config.tiers]
    return CODES[config.code](in_blocks(x_SC, config), bits, is_key=is_key, edges=edges)


def attention(queries, keys, value, config: CacheConfig, seen, *, scale: float, edges: Edges):
    """One head: output [T, V] from queries [T, C], keys [S, C] per stream, value [S, V].

    Args:
      seen: where each query finds each key, from `placement`.
    """
    exact = np.isin(seen, (SINK, len(config.tiers)))
    s = np.where(exact, scale * sum(q @ key.T for q, key in zip(queries, keys, strict=True)), 0.0)
    for q, key in zip(queries, keys, strict=True):
        for index, (tier, part) in enumerate(
            zip(config.tiers, coded(key, config, is_key=True, edges=edges), strict=True)
        ):
            held = seen == index
            s += np.where(held, scale * q @ _spread(part.vectors, key, config).T, 0.0)
            if config.code == "nested" and tier.key_bits in NOISE:
                s -= np.where(held, _bias(q, key, part, tier.key_bits, config, scale), 0.0)
    p = np.where(seen == UNSEEN, 0.0, np.exp(s - s.max(axis=1, keepdims=True)))
    p /= p.sum(axis=1, keepdims=True)
    out = np.where(exact, p, 0.0) @ value
    for index, part in enumerate(coded(value, config, is_key=False, edges=edges)):
        out += np.where(seen == index, p, 0.0) @ _spread(part.vectors, value, config)
    return out


def _bias(q, key, part: Coded, bits: int, config: CacheConfig, scale: float):
    """Half the variance of the noise in each score, [T, S]."""
    size = key.shape[1]
    square = size * NOISE[bits] * _spread(part.scale, key[:, 0], config) ** 2 / (size - 1)
    return 0.5 * scale**2 * np.sum(q**2, axis=1, keepdims=True) * square


def _spread(blocks, like, config: CacheConfig):
    """[N, S, ...] at the positions [S, ...] of their tokens; others are never looked at."""
    out = np.zeros_like(like)
    flat = blocks.reshape(-1, *blocks.shape[2:])
    out[config.sinks : config.sinks + len(flat)] = flat
    return out


def layer(module, x_BTD, config: CacheConfig, *, capacity=None, bfloat16=False, edges: Edges):
    """GroupedAttention over a cache of `config`, all tokens at once: ([B, T, D], places [T, S])."""
    of, (B, T, _) = module.config, x_BTD.shape
    R, group = of.rotary_dim, of.num_heads // of.num_kv_heads
    seen = placement(config, T, capacity=capacity)
    if of.window is not None:
        far = np.arange(T)[:, None] - np.arange(T) >= of.window
        seen = np.where(far, UNSEEN, seen)
    q, k, v = (
        np.einsum("btd,dhk->bthk", oracle.wide(x_BTD), oracle.wide(kernel[...]))
        for kernel in (module.q_kernel, module.k_kernel, module.v_kernel)
    )
    positions = np.broadcast_to(np.arange(T), (B, T))

    def streams(x):
        """[B, T, H, C] each: unrotated dims, rotated dims."""
        turned = [] if R == 0 else [
            oracle.rotated(x[..., :R], positions, base=of.rope.base, interleaved=False)
        ]  # fmt: skip
        return ([x[..., R:]] if R < of.head_dim else []) + turned

    asked, keys = streams(q), streams(k)
    if bfloat16:
        keys, v = [edges.narrow(x, exact=True) for x in keys], edges.narrow(v, exact=True)
    o = np.zeros(q.shape)
    for b in range(B):
        for h in range(of.num_heads):
            o[b, :, h] = attention(
                [q[b, :, h] for q in asked],
                [key[b, :, h // group] for key in keys],
                v[b, :, h // group],
                config,
                seen,
                scale=of.head_dim**-0.5,
                edges=edges,
            )
    return np.einsum("bthk,hkd->btd", o, oracle.wide(module.o_kernel[...])), seen
