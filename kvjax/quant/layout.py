"""What codes consist of beside words and scales."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    mean: bool  # a mean per block and dim
    offset: bool  # an offset per token
