"""LDS bank conflicts, by the phases in which the hardware serves an access.

Reads go over 64 banks of 4 bytes, 256 bytes per clock: `ds_read_b128` in 4 phases of 16 lanes (not consecutive ones),
`ds_read_b64` in 2 phases of 32 lanes, narrower ones in one phase of 64. Writes go over 32 banks: `ds_write_b64` in 4
phases of 16 consecutive lanes. The phases of `ds_write_b128` and `ds_write_b32` are not measured: 128 bytes per clock,
consecutive lanes, are assumed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .state import LANES

READ_BANKS, WRITE_BANKS = 64, 32


def _lanes(*ranges: tuple[int, int]) -> list[int]:
    return [lane for first, last in ranges for lane in range(first, last + 1)]


READ_B128_PHASES = (
    _lanes((0, 3), (12, 15), (20, 27)),
    _lanes((4, 11), (16, 19), (28, 31)),
    _lanes((32, 35), (44, 47), (52, 59)),
    _lanes((36, 43), (48, 51), (60, 63)),
)


def _consecutive(count: int) -> tuple[list[int], ...]:
    return tuple(list(range(first, first + count)) for first in range(0, LANES, count))


def phases(words: int, *, write: bool) -> tuple[list[int], ...]:
    """Lanes of each phase of an access of ``words`` dwords per lane."""
    if write:
        # 96-bit writes are served like 128-bit ones.
        return _consecutive(WRITE_BANKS // (4 if words == 3 else words))
    if words == 4:
        return READ_B128_PHASES
    # 96-bit reads are served like 128-bit ones.
    return READ_B128_PHASES if words == 3 else _consecutive(READ_BANKS // words)


def conflict_cycles(addresses: np.ndarray, active: np.ndarray, words: int, *, write: bool) -> int:
    """Cycles beyond one per phase, over all waves.

    Parameters
    ----------
    addresses : numpy.ndarray
        Byte addresses ``[..., 64]``.
    active : numpy.ndarray
        Lanes that take part.
    words : int
        Dwords per lane; narrower accesses count as one.
    """
    word = (addresses.reshape(-1, LANES) >> 2).astype(np.int32)
    active = active.reshape(-1, LANES)
    # Banks repeat, so that a wave's conflicts depend only on its addresses relative to its first lane.
    word -= word[:, :1]
    if (word == word[0]).all() and (active == active[0]).all():
        return len(word) * _wave_conflicts(word[0].tobytes(), active[0].tobytes(), words, write)
    return sum(
        _wave_conflicts(row.tobytes(), live.tobytes(), words, write) for row, live in zip(word, active, strict=True)
    )


@lru_cache(maxsize=65536)
def _wave_conflicts(row: bytes, taking_part: bytes, words: int, write: bool) -> int:
    """Extra cycles of one wave."""
    word = np.frombuffer(row, np.int32).reshape(1, LANES).astype(np.int64)
    active = np.frombuffer(taking_part, np.bool_).reshape(1, LANES)
    # Any base will do that keeps places of lanes positive.
    word = word - word.min()
    banks = WRITE_BANKS if write else READ_BANKS
    total = 0
    for lanes in phases(words, write=write):
        touched = (word[:, lanes, None] + np.arange(words)).reshape(len(word), -1)
        live = np.repeat(active[:, lanes], words, axis=1)
        # Lanes that do not take part repeat a place of their own that no bank counts.
        touched = np.where(live, touched, -1)
        touched.sort(axis=1)
        distinct = np.ones(touched.shape, np.bool_)
        distinct[:, 1:] = touched[:, 1:] != touched[:, :-1]
        distinct &= touched >= 0
        rows = np.broadcast_to(np.arange(len(word))[:, None], touched.shape)
        key = (rows * banks + touched % banks)[distinct]
        per_bank = np.bincount(key, minlength=len(word) * banks).reshape(len(word), banks)
        total += int(np.maximum(per_bank.max(axis=1) - 1, 0).sum())
    return total
