"""The three streams: what is stored of a token, and what is asked of it.

Every attention variant is one softmax over at most three arrays per token:

    scores = scale * (q_content . content + q_rope . rope_key)    out = softmax(scores) . value

MHA, GQA and MQA with full rotary embedding store `rope_key` (the key itself) and `value`; with
partial rotary the unrotated dims are `content`. A latent or tied variant stores `content`, which
is also the value (`value` None), and one small shared `rope_key`. An absent stream is None, never
an array of width zero.

Dimension key of all array names in kvjax:

    B batch             T new tokens            S stored tokens or slots
    H query heads       G stored heads          P heads of rope_key (1 or G)
    D model width       K scored content dims   R rotary dims, A = R/2 pairs
    C content dims      V value dims            L layers of one kind
    N blocks            W packed bytes          F feed-forward width

Stored arrays are head-major (BGSC): the tokens of one head are contiguous, which is how a decode
kernel reads them and how a block of one head moves between memories. New tokens are BTGC.
"""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries of new tokens, one array per scored stream."""

    content: jax.Array | None  # [B, T, H, K]
    rope: jax.Array | None  # [B, T, H, R], rotated

    @property
    def num_tokens(self) -> int:
        return jax.tree.leaves(self)[0].shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams[Stored]:
    """Streams of new tokens [B, T, G, C], or stored ones [L, B, G, S, C]: arrays or `Codes`."""

    content: Stored | None
    rope_key: Stored | None  # rotated to its position
    value: Stored | None  # None: content is also the value

    def keys(self) -> tuple[Stored, ...]:
        """The scored streams, in the order of `queries`."""
        return tuple(key for key in (self.content, self.rope_key) if key is not None)


def scored(queries: Queries) -> tuple[jax.Array, ...]:
    """The present queries, in the order of `Streams.keys`."""
    return tuple(q for q in (queries.content, queries.rope) if q is not None)
