"""Instructions on chosen register contents: ISA text that loads registers, runs a body and stores registers, executed
by the emulator. One workgroup of one wave is one case.

The statements that results are held against are the tests' own: data or scalar Python, never the emulator's functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aiter_paged_fp8.emulator import Launch, Machine, Memory, Options, Program, load
from op_tests.emulator_kernels import isa_text

LANES = 64
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
# What a destination holds before the body: shows what the body leaves alone.
PREFILL = 0xA5C3960F
# Registers of the frame; bodies use v0-v199 and s3-s63.
OUT_OFFSET, IN_OFFSET, SCRATCH = "v251", "v250", "v252"
FIRST_BUFFER = 64
# Longest wait states that any body needs before it and after it (a 16-pass matrix product).
SETTLE = "    s_nop 7\n    s_nop 7\n    s_nop 7"
PAIRS = ("vcc", "exec")


def run_text(
    body: str,
    outputs: Sequence[str],
    *,
    vectors: Mapping[Any, np.ndarray] | None = None,
    scalars: Mapping[Any, np.ndarray] | None = None,
    buffers: Sequence[np.ndarray] = (),
    cases: int | None = None,
    lds: int = 0,
    directives: str = "",
    reports: bool = False,
    **options: Any,
) -> dict[str, np.ndarray] | tuple[dict[str, np.ndarray], list[Any]]:
    """Run a body once per case.

    Parameters
    ----------
    body : str
        Instructions; v and s registers hold what `vectors` and `scalars` say, s[64:65], s[66:67], ... point to buffers.
    outputs : sequence of str
        Registers to return: "v30", "a3", "s40", "scc", "vcc", "exec". All others are forgotten.
    vectors : mapping
        Register number (or "a3") to uint32 ``[cases, 64]``, or what broadcasts to it.
    scalars : mapping
        Register number, "vcc", "exec", "scc" or "m0" to an array ``[cases]``; uint64 fills a pair.
    reports : bool
        Return the reports too; otherwise there must be none.

    Returns
    -------
    dict
        Name to uint32 ``[cases, 64]`` for vectors, ``[cases]`` for scalars, uint64 for pairs.
    """
    vectors, scalars = dict(vectors or {}), dict(scalars or {})
    if cases is None:
        sizes = [np.shape(v)[0] for v in vectors.values() if np.ndim(v) == 2 and np.shape(v)[0] > 1]
        sizes += [np.shape(s)[0] for s in scalars.values() if np.ndim(s) == 1 and np.shape(s)[0] > 1]
        cases = max(sizes, default=1)
    vector_in = np.zeros((cases, max(len(vectors), 1), LANES), np.uint32)
    for k, value in enumerate(vectors.values()):
        vector_in[:, k] = value
    columns: list[np.ndarray] = []
    lines = [
        "    s_load_dwordx2 s[88:89], s[0:1], 0x0",
        "    s_load_dwordx2 s[90:91], s[0:1], 0x8",
        "    s_load_dwordx2 s[92:93], s[0:1], 0x10",
        *(f"    s_load_dwordx2 s[{r}:{r + 1}], s[0:1], {24 + 8 * k}" for k, r in _buffer_registers(buffers)),
        f"    s_mul_i32 s94, s2, {vector_in[0].nbytes}",
        f"    v_lshlrev_b32_e32 {IN_OFFSET}, 2, v0",
        f"    v_add_u32_e32 {IN_OFFSET}, s94, {IN_OFFSET}",
        f"    s_mul_i32 s95, s2, {4 * LANES * len(outputs)}",
        f"    v_lshlrev_b32_e32 {OUT_OFFSET}, 2, v0",
        f"    v_add_u32_e32 {OUT_OFFSET}, s95, {OUT_OFFSET}",
        f"    s_mul_i32 s96, s2, {4 * sum(_registers_of(value) for value in scalars.values())}",
        "    s_waitcnt lgkmcnt(0)",
    ]
    for name in vectors:
        lines.append(f"    global_load_dword {name if isinstance(name, str) else f'v{name}'}, {IN_OFFSET}, s[88:89]")
        lines.append(f"    v_add_u32_e32 {IN_OFFSET}, 0x100, {IN_OFFSET}")
    known = {name if isinstance(name, str) else f"v{name}" for name in vectors}
    known |= {f"s{name}" for name in scalars} | {
        f"s{name + 1}" for name, value in scalars.items() if isinstance(name, int) and value.dtype == np.uint64
    }
    for name in outputs:
        if name not in known and name[0] in "vsa" and name not in ("scc", "vcc"):
            move = {"v": "v_mov_b32_e32", "s": "s_mov_b32", "a": "v_accvgpr_write_b32"}[name[0]]
            source = f"{PREFILL:#x}" if name[0] != "a" else SCRATCH
            if name[0] == "a":
                lines.append(f"    v_mov_b32_e32 {SCRATCH}, {PREFILL:#x}")
            lines.append(f"    {move} {name}, {source}")
    special = []
    for name, value in scalars.items():
        wide = np.asarray(value).dtype == np.uint64
        place = 4 * len(columns)
        words = [value & M32, value >> np.uint64(32)] if wide else [value]
        columns += [np.broadcast_to(np.asarray(word).astype(np.uint32), (cases,)) for word in words]
        if isinstance(name, int):
            register = f"s[{name}:{name + 1}]" if wide else f"s{name}"
        else:
            first = {"scc": 80, "m0": 81, "vcc": 82, "exec": 84}[name]
            register = f"s[{first}:{first + 1}]" if wide else f"s{first}"
            if name == "scc":
                special.append("    s_cmp_lg_u32 s80, 0")
            else:
                special.insert(0, f"    s_mov_b{64 if wide else 32} {name}, {register}")
        lines.append(f"    s_load_dword{'x2' if wide else ''} {register}, s[90:91], s96 offset:{place}")
    lines += ["    s_waitcnt vmcnt(0) lgkmcnt(0)", *special, SETTLE, "    ; body", body, SETTLE]
    if "scc" in outputs:
        lines.append("    s_cselect_b32 s97, 1, 0")
    if "exec" in outputs:
        lines.append("    s_mov_b64 s[98:99], exec")
    lines.append("    s_mov_b64 exec, -1")
    lines.append("    s_waitcnt vmcnt(0) lgkmcnt(0)")
    for name in outputs:
        halves = {"vcc": ("vcc_lo", "vcc_hi"), "exec": ("s98", "s99"), "scc": ("s97",)}.get(name, (name,))
        for k, half in enumerate(halves):
            source = half
            if half[0] not in "va" or half.startswith("vcc"):
                lines.append(f"    v_mov_b32_e32 {SCRATCH}, {half}")
                source = SCRATCH
            if k:
                # The high half of a pair lies in the upper lanes of the output.
                lines.append("    s_mov_b32 exec_lo, 0")
            lines.append(f"    global_store_dword {OUT_OFFSET}, {source}, s[92:93]")
        lines.append("    s_mov_b64 exec, -1")
        lines.append(f"    v_add_u32_e32 {OUT_OFFSET}, 0x100, {OUT_OFFSET}")
    lines.append("    s_endpgm")
    scalar_in = np.ascontiguousarray(np.stack(columns, axis=-1)) if columns else np.zeros(1, np.uint32)
    vector_out = np.zeros((cases, len(outputs), LANES), np.uint32)
    arrays = [vector_in, scalar_in, vector_out, *buffers]
    text = isa_text("\n".join(lines), len(arrays), lds)
    if directives:
        text = text.replace("\t.end_amdhsa_kernel", f"{directives}\n\t.end_amdhsa_kernel")
    memory = Memory()
    for k, array in enumerate(arrays):
        memory.register_array(f"buffer{k - 3}" if k > 2 else ("vectors", "scalars", "results")[k], array)
    kernarg = struct.pack(f"<{len(arrays)}Q", *(array.ctypes.data for array in arrays))
    launch = Launch(load(Program.parse(text)), (cases, 1, 1), (LANES, 1, 1), kernarg)
    options.setdefault("max_waves", 1024)
    result = Machine(launch, memory, Options(**options)).run()
    found: dict[str, np.ndarray] = {}
    for k, name in enumerate(outputs):
        value = vector_out[:, k]
        if name in PAIRS:
            found[name] = value[:, 0].astype(np.uint64) | value[:, -1].astype(np.uint64) << np.uint64(32)
        elif name[0] in "va":
            found[name] = value.copy()
        else:
            found[name] = value[:, 0].copy()
    if reports:
        return found, result.reports
    assert result.reports == [], [report.message for report in result.reports]
    return found


def _registers_of(scalar: Any) -> int:
    return 2 if np.asarray(scalar).dtype == np.uint64 else 1


def _buffer_registers(buffers: Sequence[np.ndarray]) -> Iterable[tuple[int, int]]:
    return ((k, FIRST_BUFFER + 2 * k) for k in range(len(buffers)))


def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two registers as uint64."""
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def signed(value: int, bits: int = 32) -> int:
    """Two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def agree(
    mnemonic: str, got: np.ndarray, want: Sequence[Any], *sources: np.ndarray, nan: Callable[[int], bool] | None = None
) -> None:
    """Compare flat results; the first difference is shown with its sources.

    Parameters
    ----------
    want : sequence
        Integers; None where any result will do; "nan" where any NaN will do, as `nan` recognises it.
    """
    for k, (g, w) in enumerate(zip(np.asarray(got).ravel().tolist(), want, strict=True)):
        if w is None or (w == "nan" and nan is not None and nan(g)) or g == w:
            continue
        given = [hex(int(np.asarray(source).ravel()[k])) for source in sources]
        wanted = w if isinstance(w, str) else hex(w)
        raise AssertionError(f"{mnemonic} of {', '.join(given)}: {g:#x}, not {wanted} (element {k})")


EDGES32 = (
    *(0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0xFFFFFF),
    *(0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFF8000, 0xFFFFFF80, 0x00FF00FF, 0x12345678),
    *(0xFF000000, 0x800000, 0x001F0010, 0x00200008, 0x00080005, 0xDEADBEEF),
)


def random32(count: int, seed: int) -> np.ndarray:
    """Random words, a third of them small or with few bits."""
    generator = np.random.default_rng(seed)
    value = generator.integers(0, 1 << 32, count, dtype=np.uint64)
    value[::3] >>= generator.integers(0, 32, len(value[::3]), dtype=np.uint64)
    return value.astype(np.uint32)


def operand_table(count: int, total: int, seed: int = 1) -> list[np.ndarray]:
    """`count` columns of `total` words: edge values against each other, then random ones."""
    generator = np.random.default_rng(seed)
    edges = np.array(EDGES32, np.uint32)
    columns = []
    for k in range(count):
        column = random32(total, seed + 17 * k)
        column[: total // 2] = edges[generator.integers(0, len(edges), total // 2)]
        if k > 0:
            # Equal operands are an edge of compares, minima and differences.
            column[total // 3 : total // 3 + 8] = columns[0][total // 3 : total // 3 + 8]
        columns.append(column)
    if count >= 2:
        grid = np.array([(a, b) for a in EDGES32 for b in EDGES32], np.uint32)
        generator.shuffle(grid)
        grid = grid[: total // 2]
        columns[0][: len(grid)], columns[1][: len(grid)] = grid[:, 0], grid[:, 1]
    return columns
