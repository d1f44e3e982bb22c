"""Every number of the native kernel's specialisations. Imports neither FlyDSL nor a GPU.

This file says what the kernel is to serve (`HEAD_DIMS`, `PAGES`) and which of it exists (`BUILT`); plan reads both
from here.
"""

from __future__ import annotations

#: The architecture that the kernel is compiled for.
ARCH = "gfx950"

#: (D, Dv) of the matrix steps: multiples of the 64-deep fp8 MFMA whose operands fit the register and LDS budget.
HEAD_DIMS = ((128, 128), (192, 128), (192, 192))

#: Native page sizes of each layout, in tokens.
PAGES = {"linear": (1,), "vectorized": (16, 64, 1024)}

#: (layout, page, D, Dv) for which a kernel exists in this version.
BUILT: frozenset[tuple[str, int, int, int]] = frozenset()
