"""kvjax: long-context transformers in JAX, with a tiered key-value cache.

Importing touches no device.
"""

from .cache import Cache as Cache
from .cache import bits_per_element as bits_per_element
from .cache import cache_bytes as cache_bytes
from .cache import init_cache as init_cache
from .cache import measured_bytes as measured_bytes
from .cache_config import CacheConfig as CacheConfig
from .cache_config import Overflow as Overflow
from .cache_config import Tier as Tier
from .config import AttentionConfig as AttentionConfig
from .config import BlockConfig as BlockConfig
from .config import ModelConfig as ModelConfig
from .config import Pairing as Pairing
from .config import RopeConfig as RopeConfig
from .decode import decode_step as decode_step
from .decode import generate as generate
from .decode import prefill as prefill
from .decode import stream as stream
from .errors import KvjaxError as KvjaxError
from .importers import load as load
from .model import Model as Model
from .sampling import Sampling as Sampling
from .variants import GroupedAttention as GroupedAttention

__version__ = "0.1.0"
