"""Named shapes of real models, tagged: one list for tests, tuning and benchmarks.

Heads and dims are the models'. Batch and tokens are what a CPU does in a moment; a benchmark takes
a case at its own: `dataclasses.replace(case, batch=64, tokens=8192)`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """The shapes of one call of `decode_attention`. Streams are (stored heads, dims)."""

    name: str
    heads: int  # H
    keys: tuple[tuple[int, int], ...]  # content, rope key: those that are scored
    value: tuple[int, int] | None  # None: the first key is also the value
    queries: int = 1  # T
    tokens: int = 64  # S, slots
    batch: int = 2
    window: int | None = None
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


def tagged(*tags: str) -> list[Case]:
    """The cases that have all of these tags."""
    return [case for case in CASES if set(tags) <= case.tags]


def _grouped(name, heads, stored, dim, *tags, rotary=None, value_dim=None, **shape) -> Case:
    """One key and one value; with a partial rotary dim the key is two streams of `stored` heads."""
    keys = ((stored, dim),) if rotary is None else ((stored, dim - rotary), (stored, rotary))
    value = (stored, dim if value_dim is None else value_dim)
    return Case(name, heads, keys, value, tags=frozenset(tags), **shape)


def _shared_rope(name, heads, stored, dim, rotary, *tags, value=None, **shape) -> Case:
    """One rope key for all heads; without a value, latents that are key and value."""
    tags = {"shared_rope", *tags} | ({"latent"} if value is None else set())
    keys = ((stored, dim), (1, rotary))
    return Case(name, heads, keys, value, tags=frozenset(tags), **shape)


CASES = [
    # Groupings: query heads / stored heads x dims.
    _grouped("llama2_7b_32x128", 32, 32, 128, "mha"),
    _grouped("llama3_8b_32_8x128", 32, 8, 128, "gqa", "quick"),
    _grouped("smollm2_135m_9_3x64", 9, 3, 64, "gqa"),
    _grouped("falcon_7b_71_1x64", 71, 1, 64, "mqa"),
    _grouped("gemma_2b_8_1x256", 8, 1, 256, "mqa"),
    # Query heads per stored head: what a kernel pads its rows to.
    _grouped("group_3_smollm2_360m_15_5x64", 15, 5, 64, "gqa", "group"),
    _grouped("group_5_qwen2.5_14b_40_8x128", 40, 8, 128, "gqa", "group"),
    _grouped("group_16_32_2x128", 32, 2, 128, "gqa", "group"),
    _grouped("group_20_40_2x128", 40, 2, 128, "gqa", "group"),
    # Dims that are no power of two, and a key and value of different dims.
    _grouped("phi2_32x80_rotary_32", 32, 32, 80, "mha", "dims", "partial_rotary", rotary=32),
    _grouped("phi3_mini_32x96", 32, 32, 96, "mha", "dims"),
    _grouped("expanded_latent_16x192_value_128", 16, 16, 192, "mha", "dims", value_dim=128),
    # One rope key for all heads, with latents and with keys and values.
    _shared_rope("deepseek_v2_lite_16_1x512_64", 16, 1, 512, 64),
    _shared_rope("gla_2_16_2x256_64", 16, 2, 256, 64, "quick"),
    _shared_rope("shared_rope_16_4x64_64_value_128", 16, 4, 64, 64, "quick", value=(4, 128)),
    # Several queries: speculation, and a chunk of a prompt.
    _grouped("queries_2_9_3x64", 9, 3, 64, "gqa", "queries", queries=2),
    _grouped("queries_3_9_3x64", 9, 3, 64, "gqa", "queries", queries=3),
    _grouped("queries_4_32_8x128", 32, 8, 128, "gqa", "queries", queries=4),
    _grouped("queries_64_9_3x64", 9, 3, 64, "gqa", "queries", queries=64, tokens=96),
    _shared_rope("queries_4_gla_2_16_2x256_64", 16, 2, 256, 64, "queries", queries=4),
    # Windows; few slots.
    _grouped("window_16_8_1x256", 8, 1, 256, "mqa", "window", window=16, queries=2),
    _grouped("window_1_9_3x64", 9, 3, 64, "gqa", "window", window=1, queries=4, tokens=33),
    # Shapes that hide exchanged axes from a check of shapes, but not from a comparison.
    _grouped("all_axes_2", 2, 2, 2, "mha", queries=2, tokens=2),
    _grouped("one_slot_4_2x16", 4, 2, 16, "gqa", tokens=1, batch=1),
]
