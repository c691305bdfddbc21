"""Attention variants: modules that project to streams and mix heads back."""

from .grouped import GroupedAttention as GroupedAttention
