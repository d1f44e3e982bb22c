"""Arithmetic of gfx950 as pure functions on numpy arrays: no state, no machine, no operand decoding.

A register is a ``uint32`` array whose last axis is the lane (64 of them) and whose leading axes are waves; anything
that broadcasts against that serves as an operand, so a scalar register is ``[waves, 1]`` or a ``numpy.uint32``.
Functions take and return bit patterns, never floats, so that a NaN keeps its payload unless the instruction itself
quiets it.

lanes       which lane an operand comes from: DPP, swaps, LDS permutes and swizzles, transpose reads
bits        integer and bit-field instructions
floats      f32 arithmetic: single-rounded FMA, minima and maxima, comparisons, classes, output modifiers
division    ldexp and the helpers of the f32 division macro
conversion  f32, f16, bf16, f64 and integers into each other
functions   exp2, log2, rcp, rsq, sqrt, sin, cos, and the exact ones: floor, fract, frexp, ldexp
halves      f16 and packed f16 arithmetic, dot products with f32 accumulation
narrow      fp8, bf8, fp6, bf6 and fp4 to and from wider formats
mfma        matrix instructions: operand layouts and products
"""

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]
Index = NDArray[np.intp]

LANES = 64
