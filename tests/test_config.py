"""What a configuration refuses, in one line that names the thing and both numbers; its numbers."""

import ast
import dataclasses
import inspect

import pytest

from kvjax import cache_config
from kvjax import config as model_config
from kvjax.cache_config import PRESETS, CacheConfig, Overflow, Tier
from kvjax.config import AttentionConfig, BlockConfig, ModelConfig, Pairing, RopeConfig
from kvjax.errors import KvjaxError, choose

ATTENTION = AttentionConfig(width=32, num_heads=6, num_kv_heads=3, head_dim=8)
BLOCK = BlockConfig(ATTENTION, ffn_width=48)
TIERS = (Tier(4, 4, 128), Tier(2, 2, 64), Tier(1, 1))


def attention(**changes):
    return dataclasses.replace(ATTENTION, **changes)


def model(*widths):
    layers = [BlockConfig(attention(width=width), ffn_width=48) for width in widths]
    return ModelConfig(vocab_size=10, layers=tuple(layers))


REFUSED = [
    (lambda: RopeConfig(dim=0), "rotary dim is 0: expected a positive even number"),
    (lambda: RopeConfig(dim=-2), "rotary dim is -2: expected a positive even number"),
    (lambda: RopeConfig(dim=7), "rotary dim is 7: expected a positive even number"),
    (lambda: RopeConfig(dim=8, base=0.0), "rotary base is 0.0: expected a positive number"),
    (lambda: attention(width=0), "width is 0: expected a positive number"),
    (lambda: attention(num_heads=-1), "num_heads is -1: expected a positive number"),
    (lambda: attention(num_kv_heads=0), "num_kv_heads is 0: expected a positive number"),
    (lambda: attention(head_dim=0), "head_dim is 0: expected a positive number"),
    (lambda: attention(num_kv_heads=4), "num_heads is 6 and num_kv_heads is 4: expected the first"),
    (lambda: attention(num_kv_heads=12), "num_heads is 6 and num_kv_heads is 12"),
    (
        lambda: attention(rope=RopeConfig(dim=10)),
        "rotary dim is 10 and head_dim is 8: expected the first to be at most the second",
    ),
    (lambda: attention(window=0), "window is 0: expected a positive number or None"),
    (lambda: BlockConfig(ATTENTION, ffn_width=0), "ffn_width is 0: expected a positive number"),
    (lambda: model(), "the model has no layers: expected at least one"),
    (lambda: model(32, 16, 32), "layers have widths [16, 32]: expected one width for all"),
    (lambda: choose("code", "x", ("a", "b")), "unknown code 'x': expected one of a, b"),
    # The cache.
    (lambda: CacheConfig(sinks=-1), "cache sinks is -1: expected at least 0"),
    (lambda: CacheConfig(hot=0), "cache hot is 0: expected at least 1"),
    (lambda: CacheConfig(block=0), "cache block is 0: expected at least 1"),
    (lambda: CacheConfig(exempt_first=-1), "cache exempt_first is -1: expected at least 0"),
    (lambda: CacheConfig(exempt_last=-2), "cache exempt_last is -2: expected at least 0"),
    (lambda: CacheConfig(hot=1.5), "cache hot is 1.5: expected a whole number"),
    (lambda: CacheConfig(block=None), "cache block is None: expected a whole number"),
    (lambda: CacheConfig(tiers=((4, 4),)), "a tier is (4, 4): expected Tier("),
    (
        lambda: CacheConfig(overflow="banana"),
        "unknown overflow 'banana': expected one of error, slide",
    ),
    (lambda: CacheConfig(capacity=0), "cache capacity is 0: expected at least 1"),
    (lambda: CacheConfig(code="best"), "unknown code 'best': expected one of nested, literal"),
    (
        lambda: CacheConfig(dtype="int8"),
        "unknown cache dtype 'int8': expected one of float32, bfloat16, float16",
    ),
    (
        lambda: CacheConfig(tiers=(Tier(8, 4),)),
        "tier 0 has 8 bits: expected one of (1, 2, 4)",
    ),
    (
        lambda: CacheConfig(tiers=(Tier(4, 4, 64), Tier(4, 3))),
        "tier 1 has 3 bits: expected one of (1, 2, 4)",
    ),
    (
        lambda: CacheConfig(tiers=(Tier(16, 8),), code="literal"),
        "tier 0 has 16 bits: expected one of (1, 2, 4, 8)",
    ),
    (
        lambda: CacheConfig(tiers=(Tier(4, 4, 128),)),
        "tier 0 has tokens=128: expected a number for every tier but the last, and None",
    ),
    (lambda: CacheConfig(tiers=(Tier(4, 4), Tier(2, 2))), "tier 0 has tokens=None: expected a"),
    (
        lambda: CacheConfig(tiers=(Tier(4, 4, 100), Tier(2, 2))),
        "tier 0 has 100 tokens: expected a multiple of 64",
    ),
    (
        lambda: CacheConfig(tiers=(Tier(4, 4, 0), Tier(2, 2))),
        "tier 0 has 0 tokens: expected a multiple of 64",
    ),
    (
        lambda: CacheConfig(tiers=(Tier(2, 4, 64), Tier(4, 4))),
        "a tier of 4 bit follows one of 2/4 bit: bits can only fall with age",
    ),
    (
        lambda: CacheConfig(tiers=(Tier(4, 1, 64), Tier(4, 2))),
        "a tier of 4/2 bit follows one of 4/1 bit: bits can only fall with age",
    ),
    (lambda: CacheConfig.preset("tiny"), "unknown preset 'tiny': expected one of full, safe"),
    (lambda: CacheConfig.preset("safe", sink=4), "CacheConfig has no field 'sink'"),
    (lambda: CacheConfig.preset("safe", hot=0), "cache hot is 0: expected at least 1"),
    (
        # 4 sinks, 128 hot, bounded tiers of 3 blocks and one block more.
        lambda: CacheConfig(tiers=TIERS, overflow=Overflow.SLIDE).slots(387),
        "capacity is 387: a sliding cache needs at least 388 tokens",
    ),
]


@pytest.mark.parametrize("build, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(build, message):
    with pytest.raises(KvjaxError) as caught:
        build()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_overflow_by_its_name():
    assert CacheConfig(overflow="slide").overflow is Overflow.SLIDE


def test_every_refusal_in_the_source_is_tested():
    untested = set(refusing_lines()) - {refusing_line(build) for build, _ in REFUSED}
    assert not untested, sorted(untested)


def refusing_lines():
    """(file, line) of every `raise` and every `choose` in the configuration modules."""
    for module in (model_config, cache_config):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            chooses = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "choose"
            if isinstance(node, ast.Raise) or chooses:
                yield module.__file__, node.lineno


def refusing_line(build):
    """(file, line) that refused: the innermost one in a configuration module, if any."""
    with pytest.raises(KvjaxError) as caught:
        build()
    lines = [(str(entry.path), entry.lineno + 1) for entry in caught.traceback]
    files = (model_config.__file__, cache_config.__file__)
    inside = [line for line in lines if line[0] in files]
    return inside[-1] if inside else None


# Numbers that others rely on


def test_a_sliding_cache_of_the_least_capacity_is_allowed():
    assert CacheConfig(tiers=TIERS, overflow=Overflow.SLIDE).slots(388)


@pytest.mark.parametrize(
    "rope, shapes",
    [
        (RopeConfig(dim=8), {"rope_key": (3, 8), "value": (3, 8)}),
        (RopeConfig(dim=2), {"content": (3, 6), "rope_key": (3, 2), "value": (3, 8)}),
        (None, {"content": (3, 8), "value": (3, 8)}),
    ],
)
def test_stream_shapes(rope, shapes):
    config = attention(rope=rope)
    assert config.stream_shapes == shapes
    assert sum(heads * size for heads, size in shapes.values()) == 2 * 3 * 8
    assert config.rotary_dim == (0 if rope is None else rope.dim)
    assert config.scale == 8**-0.5


def test_equal_layers_share_a_stack():
    other = BlockConfig(attention(window=4), ffn_width=48)
    config = ModelConfig(vocab_size=10, layers=(BLOCK, other, BLOCK, BLOCK, other))
    assert config.stacks == (BLOCK, other)
    assert config.placement == ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1))
    assert (config.num_layers, config.width) == (5, 32)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = CacheConfig.preset(name, capacity=4096)
    assert dataclasses.replace(config, capacity=None) == PRESETS[name]
    assert config.slots(4096).hot > 0
    assert config.plain().tiers == () and config.plain().sinks == config.sinks


def test_tier_names():
    assert [tier.name for tier in (Tier(4, 4), Tier(4, 2))] == ["4 bit", "4/2 bit"]


@pytest.mark.parametrize("layer, exempt", [(0, True), (1, True), (2, False), (8, False), (9, True)])
def test_exempt_layers(layer, exempt):
    config = CacheConfig(tiers=TIERS, exempt_first=2, exempt_last=1)
    assert config.is_exempt(layer, 10) is exempt
    assert config.plain().is_exempt(layer, 10)


def test_configurations_are_frozen_and_hashable():
    for config in (ATTENTION, BLOCK, RopeConfig(dim=2), model(32), CacheConfig(tiers=TIERS)):
        assert hash(config) == hash(dataclasses.replace(config))
        field = dataclasses.fields(config)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field, 1)
    # A list of tiers becomes a tuple, so that the configuration can be a static argument.
    assert CacheConfig(tiers=list(TIERS)) == CacheConfig(tiers=TIERS)
    assert RopeConfig(dim=2).pairing is Pairing.HALF
