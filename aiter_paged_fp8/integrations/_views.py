"""Views of the engines' caches that both integrations need."""

from __future__ import annotations

import torch

from ..request import E4M3


def as_fp8(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with bytes seen as e4m3: engines keep uint8 storage where torch has no fp8 scatter."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}; accepted: a tensor of {E4M3} or of its bytes")
    if tensor.dtype is torch.uint8:
        return tensor.view(E4M3)
    if tensor.dtype is not E4M3:
        raise TypeError(f"{name}: got {tensor.dtype}; accepted: {E4M3}, or torch.uint8 that holds its bytes")
    return tensor


def packed_in_blocks(name: str, cache: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes of a block]: a view, with the stride between blocks that the cache has."""
    packed = 1
    for dim in range(cache.dim() - 1, 0, -1):
        if cache.shape[dim] > 1 and cache.stride(dim) != packed:
            raise ValueError(
                f"{name}: got stride {cache.stride(dim)} in dim {dim} of {list(cache.shape)}; accepted: {packed} "
                "there, a block without gaps (only the stride between blocks is free)"
            )
        packed *= cache.shape[dim]
    return cache.as_strided((cache.shape[0], packed), (cache.stride(0), 1))
