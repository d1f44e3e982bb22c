"""A FlyDSL kernel small enough to read at once: y = alpha * x + y. Shows a kernel running in the emulator."""

import flydsl.compiler as flyc
import flydsl.expr as fx

#: Threads of a workgroup: four waves.
BLOCK = 256


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def axpy_kernel(X: fx.Tensor, Y: fx.Tensor, alpha: fx.Float32):
    i = fx.block_idx.x * BLOCK + fx.thread_idx.x
    Y[i] = X[i] * alpha + Y[i]


@flyc.jit
def axpy(X: fx.Tensor, Y: fx.Tensor, alpha: fx.Float32, n: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    axpy_kernel(X, Y, alpha).launch(grid=(n // BLOCK, 1, 1), block=(BLOCK, 1, 1), stream=stream)
