"""The KV cache of a model: one pytree, passed in and returned."""

from .accounting import bits_per_element as bits_per_element
from .accounting import cache_bytes as cache_bytes
from .accounting import measured_bytes as measured_bytes
from .model_cache import Cache as Cache
from .model_cache import cache_groups as cache_groups
from .model_cache import init_cache as init_cache
from .tiered import TieredLayers as TieredLayers
