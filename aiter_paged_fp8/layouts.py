"""KV-cache layouts: from tensor shapes to geometry, and back to element addresses.

Two families of layouts exist in serving engines, and a cache is a value of one of these two classes:

``Linear``
    K ``[pages, page, Hkv, D]``, V ``[pages, page, Hkv, Dv]``. A pool of slots ``[slots, Hkv, D]`` is the same with
    pages of one token.
``Vectorized``
    K ``[pages, Hkv, D/x, page, x]``, V ``[pages, Hkv, page/x, Dv, x]`` with packs of ``x = 16`` fp8 elements (16
    bytes): K is contiguous along the head dim inside a pack, V along the tokens. AITER's vectorized_5d and vLLM's
    SHUFFLE cache.

Inside a page everything is packed; the stride from page to page is free, and K's and V's may differ.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, TypeVar

import torch

#: fp8 elements in a pack of the vectorized layout: the 16 bytes that one lane loads at once.
PACK = 16

#: Anything that adds and multiplies like an integer: an int, or an integer tensor.
Index = TypeVar("Index", int, torch.Tensor)


class _Cache(NamedTuple):
    """What both layouts have.

    Attributes
    ----------
    k, v : torch.Tensor
        The caches as the caller gave them.
    pages, page, kv_heads, head_dim, head_dim_v : int
        Page count, tokens per page, KV heads, QK head dim and V head dim.
    k_page_stride, v_page_stride : int
        Elements from one page to the next.
    """

    k: torch.Tensor
    v: torch.Tensor
    pages: int
    page: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    k_page_stride: int
    v_page_stride: int


class Linear(_Cache):
    """Token-major pages: ``[pages, page, Hkv, D]``, or a pool of slots ``[slots, Hkv, D]``."""

    __slots__ = ()
    name: ClassVar[str] = "linear"

    def k_offset(self, page: Index, slot: Index, head: Index, dim: Index) -> Index:
        """Element offset from the start of K; ``slot`` is the token's place inside its page."""
        return page * self.k_page_stride + (slot * self.kv_heads + head) * self.head_dim + dim

    def v_offset(self, page: Index, slot: Index, head: Index, dim: Index) -> Index:
        """Element offset from the start of V."""
        return page * self.v_page_stride + (slot * self.kv_heads + head) * self.head_dim_v + dim

    def k_part(self, heads: slice, slots: slice) -> torch.Tensor:
        """K of some heads and some slots of every page, pages first: a view."""
        return (self.k.unsqueeze(1) if self.k.dim() == 3 else self.k)[:, slots, heads]

    def v_part(self, heads: slice, slots: slice) -> torch.Tensor:
        """V of some heads and some slots of every page, pages first: a view."""
        return (self.v.unsqueeze(1) if self.v.dim() == 3 else self.v)[:, slots, heads]

    def k_by_head(self, part: torch.Tensor) -> torch.Tensor:
        """A `k_part` in the order head, page, slot, dim: a view whose leading dims flatten to head, token, dim."""
        return part.permute(2, 0, 1, 3)

    def v_by_head(self, part: torch.Tensor) -> torch.Tensor:
        """A `v_part` in the order head, page, slot, dim."""
        return part.permute(2, 0, 1, 3)


class Vectorized(_Cache):
    """Packs of 16 bytes: K ``[pages, Hkv, D/x, page, x]``, V ``[pages, Hkv, page/x, Dv, x]``."""

    __slots__ = ()
    name: ClassVar[str] = "vectorized"

    def k_offset(self, page: Index, slot: Index, head: Index, dim: Index) -> Index:
        """Element offset from the start of K; ``slot`` is the token's place inside its page."""
        block = head * (self.head_dim // PACK) + dim // PACK
        return page * self.k_page_stride + (block * self.page + slot) * PACK + dim % PACK

    def v_offset(self, page: Index, slot: Index, head: Index, dim: Index) -> Index:
        """Element offset from the start of V."""
        block = head * (self.page // PACK) + slot // PACK
        return page * self.v_page_stride + (block * self.head_dim_v + dim) * PACK + slot % PACK

    def k_part(self, heads: slice, slots: slice) -> torch.Tensor:
        """K of some heads and some slots of every page, pages first: a view."""
        return self.k[:, heads, :, slots]

    def v_part(self, heads: slice, slots: slice) -> torch.Tensor:
        """V of some heads and some slots of every page, pages first: a view. Slots start and end at multiples of a
        pack."""
        return self.v[:, heads, slots.start // PACK : slots.stop // PACK]

    def k_by_head(self, part: torch.Tensor) -> torch.Tensor:
        """A `k_part` in the order head, page, slot, pack of the head dim, element: flattens to head, token, dim."""
        return part.permute(1, 0, 3, 2, 4)

    def v_by_head(self, part: torch.Tensor) -> torch.Tensor:
        """A `v_part` in the order head, page, pack of tokens, token, dim: flattens to head, token, dim."""
        return part.permute(1, 0, 2, 4, 3)


Cache = Linear | Vectorized
