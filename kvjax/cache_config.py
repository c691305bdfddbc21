"""What a KV cache keeps and at which precision, as a frozen dataclass; no arrays."""

import dataclasses
import enum

from .errors import KvjaxError, choose


class Overflow(enum.Enum):
    """What happens to a sequence longer than the capacity."""

    ERROR = "error"  # refused before anything is written
    SLIDE = "slide"  # the oldest tokens after the sinks are dropped


@dataclasses.dataclass(frozen=True)
class Tier:
    """Tokens of one age: how many, and at how many bits."""

    key_bits: int
    value_bits: int
    tokens: int | None = None  # a multiple of the block; None: all that are older (last tier only)

    @property
    def name(self) -> str:
        if self.key_bits == self.value_bits:
            return f"{self.key_bits} bit"
        return f"{self.key_bits}/{self.value_bits} bit"


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sinks and recent tokens exact; older ones in tiers of falling precision.

    A sequence is laid out by age, youngest last:

        sinks exact | tiers[-1] | ... | tiers[0] | hot exact

    At least `hot` tokens are exact; a whole block moves on once there are `hot + block` of them.
    Without tiers it is a plain cache. Where a token stands depends on its position and that of the
    reader alone, so neither the chunks of a prefill nor the rest of a batch change a result.
    """

    tiers: tuple[Tier, ...] = ()  # youngest first
    sinks: int = 4  # first tokens, exact for ever
    hot: int = 128
    block: int = 64  # tokens that are coded and moved together
    code: str = "nested"  # a name in kvjax.quant.CODES
    exempt_first: int = 2  # first and last layers that keep a plain cache
    exempt_last: int = 1
    capacity: int | None = None  # tokens; None: what a call needs
    dtype: str | None = None  # of exact tokens; None: the model's
    overflow: Overflow = Overflow.ERROR

    def __post_init__(self):
        object.__setattr__(self, "tiers", tuple(self.tiers))
        for tier in self.tiers:
            if not isinstance(tier, Tier):
                raise KvjaxError(f"a tier is {tier!r}: expected Tier(key_bits, value_bits, tokens)")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name == "capacity":
                continue
            if not isinstance(value, int):
                raise KvjaxError(f"cache {name} is {value!r}: expected a whole number")
            if value < least:
                raise KvjaxError(f"cache {name} is {value}: expected at least {least}")
        if not isinstance(self.overflow, Overflow):
            choose("overflow", self.overflow, [policy.value for policy in Overflow])
            object.__setattr__(self, "overflow", Overflow(self.overflow))
        choose("code", self.code, ("nested", "literal"))
        if self.dtype is not None:
            choose("cache dtype", self.dtype, DTYPES)
        allowed = (1, 2, 4) if self.code == "nested" else (1, 2, 4, 8)
        for index, tier in enumerate(self.tiers):
            for bits in (tier.key_bits, tier.value_bits):
                if bits not in allowed:
                    raise KvjaxError(f"tier {index} has {bits} bits: expected one of {allowed}")
            last = index == len(self.tiers) - 1
            if (tier.tokens is None) != last:
                raise KvjaxError(
                    f"tier {index} has tokens={tier.tokens}: expected a number for every tier but "
                    "the last, and None for the last"
                )
            if tier.tokens is not None and (tier.tokens <= 0 or tier.tokens % self.block):
                raise KvjaxError(
                    f"tier {index} has {tier.tokens} tokens: expected a multiple of {self.block}"
                )
        for young, old in zip(self.tiers, self.tiers[1:], strict=False):
            if old.key_bits > young.key_bits or old.value_bits > young.value_bits:
                raise KvjaxError(
                    f"a tier of {old.name} follows one of {young.name}: bits can only fall with age"
                )

    @staticmethod
    def preset(name: str, **changes) -> "CacheConfig":
        """A ready configuration, with `changes` to its fields.

        Raises:
          KvjaxError: unknown name (lists the known ones) or a field that does not fit.

        Example:
          >>> CacheConfig.preset("balanced", sinks=8).tiers[-1].name
          '2 bit'
        """
        preset = PRESETS[choose("preset", name, tuple(PRESETS))]
        unknown = set(changes) - {field.name for field in dataclasses.fields(CacheConfig)}
        if unknown:
            raise KvjaxError(f"CacheConfig has no field {sorted(unknown)[0]!r}")
        return dataclasses.replace(preset, **changes)

    def plain(self) -> "CacheConfig":
        """The configuration of an exempt layer, and of the cache to compare with: no tiers."""
        return dataclasses.replace(self, tiers=())

    def is_exempt(self, layer: int, num_layers: int) -> bool:
        """Whether this layer keeps all its tokens exact."""
        if not self.tiers:
            return True
        return layer < self.exempt_first or layer >= num_layers - self.exempt_last

    @property
    def is_static(self) -> bool:
        """Whether a token stays in the slot where it was first written."""
        return not self.tiers and self.overflow is Overflow.ERROR

    def slots(self, capacity: int) -> "Slots":
        """How much storage `capacity` tokens take.

        Every ring has one block to spare (see `kvjax.cache.tiered`); a ring that never fills is as
        long as what it can receive, and no ring is empty.

        Raises:
          KvjaxError: a sliding cache whose capacity does not even hold its bounded tiers.
        """
        if self.is_static:
            return Slots(sinks=0, hot=capacity, tier_blocks=())
        after, block = max(capacity - self.sinks, 1), self.block
        slides = self.overflow is Overflow.SLIDE
        if not self.tiers:
            return Slots(self.sinks, _round_up(after, block) + block, ())
        hot = _round_up(self.hot, block) + 2 * block
        bounded = sum((tier.tokens or 0) // block for tier in self.tiers)
        left = max(after - self.hot, 0) // block
        if slides and left <= bounded:
            least = self.sinks + self.hot + (bounded + 1) * block
            raise KvjaxError(
                f"capacity is {capacity}: a sliding cache needs at least {least} tokens"
            )
        blocks = []
        for tier in self.tiers:
            room = left + slides if tier.tokens is None else min(left, tier.tokens // block + 1)
            blocks.append(max(room, 1))
            left = max(left - (tier.tokens or 0) // block, 0)
        hot = hot if slides else min(hot, _round_up(after, block))
        return Slots(self.sinks, hot, tuple(blocks))


@dataclasses.dataclass(frozen=True)
class Slots:
    """Allocated tokens (exact) and blocks (coded) per sequence and layer."""

    sinks: int
    hot: int
    tier_blocks: tuple[int, ...]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_LEAST = {
    "sinks": 0,
    "hot": 1,
    "block": 1,
    "exempt_first": 0,
    "exempt_last": 0,
    "capacity": 1,
}
DTYPES = ("float32", "bfloat16", "float16")

PRESETS = {
    "full": CacheConfig(),
    "safe": CacheConfig(tiers=(Tier(4, 4),)),
    "balanced": CacheConfig(tiers=(Tier(4, 4, 1024), Tier(2, 2))),
    "extreme": CacheConfig(tiers=(Tier(4, 4, 1024), Tier(1, 1))),
    "literal": CacheConfig(tiers=(Tier(4, 4, 1024), Tier(1, 1)), code="literal"),
}
