"""Codes for stored vectors: how they are made, and how they lose bits with age.

A code is a module with `encode`, `demote`, `layout`, `correction` and `basis`; `CODES` names them.
Reading is the same for all (`kvjax_kernels.codes.Codes`).
"""

from types import ModuleType

from . import literal, nested

CODES: dict[str, ModuleType] = {"nested": nested, "literal": literal}
