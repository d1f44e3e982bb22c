"""A kernel and its launcher from one value of traits."""

from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .arguments import Arguments
from .pipeline import Pipeline
from .traits import Traits


@cache
def build(traits: Traits) -> Any:
    """The launcher of a specialisation.

    Parameters
    ----------
    traits : Traits
        What is compiled in.

    Returns
    -------
    callable
        ``launch(arguments, out, stream)``; give it to ``flyc.compile``. ``out`` is the output's address once more, as
        a pointer: a null pointer makes ``flyc.compile`` compile and launch nothing.
    """

    def body(arguments: Arguments) -> None:
        Pipeline(traits, arguments).run()

    body.__name__ = body.__qualname__ = traits.name
    kernel = flyc.kernel(known_block_size=[traits.threads, 1, 1])(body)

    def launch(arguments: Arguments, out: fx.Pointer, stream: fx.Stream = fx.Stream(None)) -> None:
        kernel(arguments).launch(
            grid=(arguments.kv_heads, arguments.requests, arguments.ranks),
            block=(traits.threads, 1, 1),
            stream=stream,
        )

    launch.__name__ = launch.__qualname__ = f"launch_{traits.name}"
    return flyc.jit(launch)
