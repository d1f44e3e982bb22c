"""What the native kernel executes for one tile of 128 keys in its steady loop, counted in the emulator.

The difference of two runs that differ by some whole tiles, of one workgroup: nothing of the start, of tiles with a
mask or of the end is left in it. Counts are of the wave-instructions executed, not modelled times.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from .api import flydsl_flash_attn_paged_prefill_func
from .emulator import Options, Result, load
from .kernels.fmha_gfx950.traits import Traits
from .layouts import PACK
from .options import use_options
from .runtime import emulated

#: Issue slots of a VALU instruction that takes more than one.
SLOTS = {"v_exp_f32": 2, "v_permlane32_swap_b32": 2}


@dataclass(frozen=True)
class LoopCounts:
    """One wave, one tile of a steady loop; the wave groups have a loop each.

    Attributes
    ----------
    mnemonics, kinds : dict
        Executed instructions, encoding suffixes dropped; the same by the emulator's classes ("valu", "mfma", ...).
    valu_slots : int
        VALU and transcendental instructions, weighted by `SLOTS`.
    lds_dma_bytes, lds_conflict_cycles : float
        The bytes are the mean of both groups.
    lines : tuple of int
        Lines of the ISA text that the loop executes.
    """

    mnemonics: dict[str, int]
    kinds: dict[str, int]
    valu_slots: int
    lds_dma_bytes: float
    lds_conflict_cycles: float
    lines: tuple[int, ...]


def _run(tiles: int, table: str, lse: bool) -> Result:
    """One query of one head on ``tiles`` whole tiles; scores are 0, so that no maximum moves after the first tile."""
    page, dim = 64, 128
    pages = tiles * Traits.tile_keys // page
    shapes = ((1, 1, dim), (pages, 1, dim // PACK, page, PACK), (pages, 1, page // PACK, dim, PACK))
    q, k, v = (torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn) for shape in shapes)
    one, ids = torch.ones(1), torch.arange(pages, dtype=torch.int32)
    length, ends = torch.tensor([pages * page], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    more: dict[str, Any] = {"block_table": ids[None], "seqlen_k": length}
    if table == "csr":
        more = {"kv_indptr": ends * pages, "kv_page_indices": ids, "kv_last_page_lens": length // pages}
    more |= {"q_descale": one, "k_descale": one, "v_descale": one, "return_lse": lse}
    with emulated(Options(on_report="raise")) as session, use_options(executor="emulator"):
        flydsl_flash_attn_paged_prefill_func(q, k, v, ends, 1, pages * page, **more)
    return session.launches[-1]


def steady_loop_counts(table: str = "block", lse: bool = True, *, first: int = 3, more: int = 6) -> list[LoopCounts]:
    """Counts of each wave group's steady loop in one specialisation: `Traits.table` and `Traits.lse`.

    Parameters
    ----------
    first, more : int
        Tiles of the shorter run, and by how many the other is longer.

    Raises ValueError where the difference of the runs is not one loop for each wave group.
    """
    short, long = _run(first, table, lse), _run(first + more, table, lse)
    program, before, after = long.program, short.counts, long.counts
    assert program is not None
    extra = {line: count - before.by_line.get(line, 0) for line, count in after.by_line.items()}
    steady = {line: count for line, count in extra.items() if count}
    operations = {operation.instruction.line: operation for operation in load(program).operations}
    turns = more * Traits.waves // Traits.groups
    found = []
    for line in sorted(steady):
        target = operations[line].instruction.target
        if target is None or (start := program.instructions[target].line) > line:
            continue
        body = [at for at in sorted(steady) if start <= at <= line]
        mnemonics: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for at in body:
            times, rest = divmod(steady[at], turns)
            if rest:
                raise ValueError(f"line {at} is not executed equally often by every wave and tile")
            mnemonics[operations[at].instruction.mnemonic.removesuffix("_e32").removesuffix("_e64")] += times
            kinds[operations[at].kind] += times
        slots = {name: n * SLOTS.get(name, 1) for name, n in mnemonics.items() if re.match("v_(?!mfma)", name)}
        conflicts = sum(after.lds_conflicts_by_line.get(at, 0) - before.lds_conflicts_by_line.get(at, 0) for at in body)
        moved = (after.bytes["lds dma"] - before.bytes["lds dma"]) / (more * Traits.waves)
        found.append(
            LoopCounts(dict(mnemonics), dict(kinds), sum(slots.values()), moved, conflicts / turns, tuple(body))
        )
    if len(found) != Traits.groups or sorted(at for loop in found for at in loop.lines) != sorted(steady):
        raise ValueError(f"{len(found)} steady loops; expected one for each of {Traits.groups} wave groups")
    return found


def table_of(loops: list[LoopCounts]) -> str:
    """The counts as a table for reading."""
    rows: dict[str, list[float]] = {
        "VALU slots": [loop.valu_slots for loop in loops],
        "LDS-DMA bytes": [loop.lds_dma_bytes for loop in loops],
        "LDS conflict cycles": [loop.lds_conflict_cycles for loop in loops],
    }
    for name in sorted({name for loop in loops for name in loop.mnemonics}):
        rows[name] = [loop.mnemonics.get(name, 0) for loop in loops]
    return "\n".join(f"{name:<30}" + "".join(f"{value:>8g}" for value in row) for name, row in rows.items())
