"""The definitions once more, in float64 numpy: what tests compare with. Shares no code with kvjax.

Masks are booleans, heads are loops, codes are read bit by bit: slow, and hard to get wrong.
"""

import numpy as np


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def unpacked(packed, *, bits: int, size: int) -> np.ndarray:
    """Codes [..., size]: dim d is field d // W of the little-endian 16-bit word d % W."""
    pairs = np.asarray(packed).reshape(*packed.shape[:-1], -1, 2).astype(np.int64)
    words = pairs[..., 0] + 256 * pairs[..., 1]
    dims, W = np.arange(size), words.shape[-1]
    return words[..., dims % W] >> dims // W * bits & 2**bits - 1


def decoded(codes) -> np.ndarray:
    """The vectors [..., N, S, C] that `Codes` stand for, in their own basis."""
    centred = unpacked(codes.words, bits=codes.bits, size=codes.size) - (2**codes.bits - 1) / 2
    out = wide(codes.scale)[..., None] * centred
    if codes.mean is not None:
        out = out + wide(codes.mean)[..., None, :]
    return out if codes.offset is None else out + wide(codes.offset)[..., None]


def visible(positions_BS, start_BT, stop_BT) -> np.ndarray:
    """bool [B, T, S]."""
    positions, start, stop = (np.asarray(x) for x in (positions_BS, start_BT, stop_BT))
    return (start[..., None] <= positions[:, None]) & (positions[:, None] < stop[..., None])


def scores(queries, keys, *, scale, corrections=None, scales=None) -> np.ndarray:
    """[B, H, T, S] of queries [B, T, H, C] and keys [B, G, S, C], one of each per stream.

    Args:
      corrections, scales: per stream, a factor and the scales [B, G, S] of its codes.
    """
    H, total = queries[0].shape[2], 0
    for i, (q, key) in enumerate(zip(queries, keys, strict=True)):
        group = H // key.shape[1]
        rows = []
        for h in range(H):
            row = scale * wide(q)[:, :, h] @ np.swapaxes(wide(key)[:, h // group], 1, 2)
            if corrections is not None and corrections[i]:
                noise = corrections[i] * np.sum(wide(q)[:, :, h] ** 2, axis=-1)
                row = row - noise[..., None] * wide(scales[i])[:, h // group, None, :] ** 2
            rows.append(row)
        total = total + np.stack(rows, axis=1)
    return total


def partial(scores_BHTS, value_BGSV, seen_BTS):
    """(m, l, o), axes as of `kvjax_kernels.decode_attention.Partial`."""
    s = np.where(seen_BTS[:, None], scores_BHTS, -np.inf)
    m = s.max(axis=-1)
    p = np.exp(s - np.where(np.isneginf(m), 0.0, m)[..., None])
    value = np.repeat(wide(value_BGSV), s.shape[1] // value_BGSV.shape[1], axis=1)
    value = np.where(seen_BTS.any(axis=1)[:, None, :, None], value, 0.0)
    return m.swapaxes(1, 2), p.sum(axis=-1).swapaxes(1, 2), (p @ value).swapaxes(1, 2)


def attention(scores_BHTS, value_BGSV, seen_BTS) -> np.ndarray:
    """softmax(scores) value, [B, T, H, V]; zero for a query that sees nothing."""
    _, total, o = partial(scores_BHTS, value_BGSV, seen_BTS)
    return o / np.where(total == 0.0, 1.0, total)[..., None]


def rotated(x_BTHR, positions_BT, *, base: float, interleaved: bool) -> np.ndarray:
    """Each pair of dims, as a complex number, times e^(i position base^(-2 pair / R))."""
    x, R = wide(x_BTHR), x_BTHR.shape[-1]
    pairs = np.arange(R // 2)
    first, second = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + R // 2)
    angle = wide(positions_BT)[..., None] * base ** (-2.0 * pairs / R)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[:, :, None]
    out = np.empty_like(x)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rms_norm(x, scale, *, eps: float) -> np.ndarray:
    x = wide(x)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * wide(scale)
