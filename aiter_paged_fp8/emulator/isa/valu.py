"""The common part of vector ALU instructions: sources with their modifiers, DPP and SDWA, and the result's way back.

The arithmetic itself is a function from uint32 arrays (or uint64 for pairs) to one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..lanewise import Lanewise, Source
from ..math import floats, lanes
from ..operation import Environment, Operation, Unimplemented
from ..state import SCALAR_ID, Group
from ..syntax import EXEC_HI, EXEC_LO, Constant, Instruction, Name, Operand, Register
from .operands import (
    MAGNITUDE32,
    SIGN32,
    Getter,
    mask_source,
    vector_source,
    vector_wide_source,
    want_register,
    write_vector,
    write_vector_wide,
)

U32, U64 = np.uint32, np.uint64
EXEC_IDS = frozenset({SCALAR_ID + EXEC_LO, SCALAR_ID + EXEC_HI})

DPP_MODIFIERS = frozenset(
    {"quad_perm", "row_shl", "row_shr", "row_ror", "wave_shl", "wave_rol", "wave_shr", "wave_ror", "row_mirror"}
    | {"row_half_mirror", "row_bcast", "row_newbcast", "row_mask", "bank_mask", "bound_ctrl", "fi"}
)
SDWA_MODIFIERS = frozenset({"dst_sel", "dst_unused", "src0_sel", "src1_sel"})
OUTPUT_MODIFIERS = frozenset({"clamp", "mul", "div"})
COMMON_MODIFIERS = DPP_MODIFIERS | SDWA_MODIFIERS
FLOAT_MODIFIERS = COMMON_MODIFIERS | OUTPUT_MODIFIERS

# Shift and mask of an SDWA selection (manual, "SDWA").
SELECTIONS = {
    "BYTE_0": (0, 0xFF),
    "BYTE_1": (8, 0xFF),
    "BYTE_2": (16, 0xFF),
    "BYTE_3": (24, 0xFF),
    "WORD_0": (0, 0xFFFF),
    "WORD_1": (16, 0xFFFF),
    "DWORD": (0, 0xFFFFFFFF),
}


def dpp_control(ins: Instruction) -> int | None:
    """DPP_CTRL as a number, or None where the instruction has no DPP."""
    modifiers = ins.modifiers
    if "quad_perm" in modifiers:
        picks = ins.bits("quad_perm", ())
        return sum(pick << (2 * position) for position, pick in enumerate(picks))
    for name, base in (
        ("row_shl", 0x100),
        ("row_shr", 0x110),
        ("row_ror", 0x120),
        ("row_newbcast", 0x150),
    ):
        if name in modifiers:
            return base + ins.integer(name)
    if "row_bcast" in modifiers:
        return {15: 0x142, 31: 0x143}[ins.integer("row_bcast")]
    for name, value in (
        ("wave_shl", 0x130),
        ("wave_rol", 0x134),
        ("wave_shr", 0x138),
        ("wave_ror", 0x13C),
        ("row_mirror", 0x140),
        ("row_half_mirror", 0x141),
    ):
        if name in modifiers:
            return value
    return None


def _selected(raw: Getter, operand: Operand, selection: str) -> Getter:
    shift, mask = SELECTIONS[selection]
    if selection == "DWORD":
        return raw
    extend = isinstance(operand, Register) and operand.sext

    def get(g: Group) -> Any:
        value = np.asarray(raw(g)) >> U32(shift) & U32(mask)
        if extend:
            value = value.astype(np.int8 if mask == 0xFF else np.int16).astype(np.int32).view(U32)
        return value

    return get


def _without_modifiers(operand: Operand) -> Operand:
    if isinstance(operand, Register):
        return Register(operand.file, operand.index, operand.count)
    return operand


def source(env: Environment, ins: Instruction, position: int, kind: str) -> Getter:
    """Getter of a source.

    Parameters
    ----------
    position : int
        Operand of the instruction.
    kind : str
        "u": 32 bits; "f": 32-bit float bits, neg and abs allowed; "h": 16 bits, op_sel picks the half, neg and abs
        allowed (as float); "w": 16 bits without sign modifiers; "q": 64 bits; "d": double bits; "m": lane mask.
    """
    operand = ins.operands[position]
    if kind == "m":
        return mask_source(operand)
    if kind in "qd":
        return _wide(env, operand, floating=kind == "d")
    if isinstance(operand, Constant) and kind in "hw":
        bits = operand.bits16()
        if kind == "h" and operand.abs:
            bits &= 0x7FFF
        if kind == "h" and operand.neg:
            bits ^= 0x8000
        value = U32(bits)
        return lambda g: value
    if isinstance(operand, Constant):
        get = vector_source(env, operand, "f32" if kind == "f" else "u32")
        constant = np.asarray(get(None)).view(U32)[()]  # type: ignore[arg-type]
        return lambda g: constant
    get = vector_source(env, _without_modifiers(operand), "u32")
    number = position - 1 if "sdwa" not in ins.encoding else position - first_source(ins)
    if ins.encoding == "sdwa":
        get = _selected(get, operand, str(ins.modifiers.get(f"src{number}_sel", "DWORD")))
    elif isinstance(operand, Register) and operand.sext:
        raise Unimplemented("sext without SDWA")
    if kind in "hw":
        get = _half(get, ins, position)
    if isinstance(operand, Register) and (operand.neg or operand.abs):
        if kind not in "fh":
            raise Unimplemented("neg or abs of an integer operand")
        get = _signed(get, operand, 16 if kind == "h" else 32)
    return get


def first_source(ins: Instruction) -> int:
    """Position of the first source: 1, or 2 where a carry or mask stands between it and the result."""
    return int(ins.annotations.get("first source", 1))  # type: ignore[call-overload]


def _half(get: Getter, ins: Instruction, position: int) -> Getter:
    high = ins.bits("op_sel", (0, 0, 0, 0))
    index = position - first_source(ins)
    if index < len(high) and high[index]:
        return lambda g: np.asarray(get(g)) >> U32(16)
    return lambda g: np.asarray(get(g)) & U32(0xFFFF)


def _signed(get: Getter, operand: Register, bits: int) -> Getter:
    sign = SIGN32 if bits == 32 else U32(0x8000)
    magnitude = MAGNITUDE32 if bits == 32 else U32(0x7FFF)

    def modified(g: Group) -> Any:
        value = get(g)
        if operand.abs:
            value = value & magnitude
        if operand.neg:
            value = value ^ sign
        return value

    return modified


def _wide(env: Environment, operand: Operand, *, floating: bool) -> Getter:
    get = vector_wide_source(env, _without_modifiers(operand), floating=floating)
    if isinstance(operand, (Register, Constant)) and (operand.neg or operand.abs):
        if not floating:
            raise Unimplemented("neg or abs of an integer operand")
        absolute, neg = operand.abs, operand.neg

        def modified(g: Group) -> Any:
            value = get(g)
            if absolute:
                value = value & U64(0x7FFFFFFFFFFFFFFF)
            if neg:
                value = value ^ U64(0x8000000000000000)
            return value

        return modified
    return get


def output_modifiers(ins: Instruction, env: Environment) -> Callable[[Any], Any] | None:
    """Clamp and output multiplier of a 32-bit float result."""
    omod = 0
    if "mul" in ins.modifiers:
        omod = {2: 1, 4: 2}[ins.integer("mul")]
    elif "div" in ins.modifiers:
        omod = 3
    clamp = ins.flag("clamp")
    if not (omod or clamp):
        return None
    dx10 = bool(env.program.metadata.directives.get("dx10_clamp", 1))

    def finish(value: Any) -> Any:
        if omod:
            value = floats.omod_f32(value, omod)
        return floats.clamp_f32(value, dx10_clamp=dx10) if clamp else value

    return finish


def write_half(g: Group, row: int, value: Any, high: bool) -> None:
    """Write a 16-bit result to one half of the active lanes; the other half is kept."""
    old = g.v[row]
    if high:
        write_vector(g, row, old & U32(0xFFFF) | np.asarray(value) << U32(16))
    else:
        write_vector(g, row, old & U32(0xFFFF0000) | np.asarray(value) & U32(0xFFFF))


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without its own ``np.errstate``: the machine runs inside one, and entering it costs microseconds."""
    if isinstance(function, partial):
        return partial(bare(function.func), *function.args, **function.keywords)
    return getattr(function, "__wrapped__", function)


def valu(
    ins: Instruction,
    env: Environment,
    function: Callable[..., Any],
    kinds: str,
    *,
    result: str = "u",
    kind: str = "valu",
    target_is_source: bool = False,
    extra: tuple[Operand, ...] = (),
    order: tuple[int, ...] | None = None,
) -> Operation:
    """Build a vector instruction with one result.

    Parameters
    ----------
    function : callable
        From the sources (see ``source`` for ``kinds``) to the result's bits.
    kinds : str
        One letter per source.
    result : str
        "u": 32 bits; "f": 32-bit float, clamp and multiplier apply; "h": 16 bits into the half that op_sel[3] picks,
        the other one kept; "z": 16 bits, the upper half cleared; "q": 64 bits.
    target_is_source : bool
        The destination is also the last source (FMAC).
    order : tuple of int, optional
        Operand positions of the sources, where they do not stand in order.
    """
    target = want_register(ins.operands[0], "va", 2 if result == "q" else 1)
    row = env.row(target)
    positions = order or tuple(range(1, 1 + len(kinds) - (1 if target_is_source else 0)))
    operands = [ins.operands[position] for position in positions]
    if len(ins.operands) != 1 + len(positions) and order is None:
        raise Unimplemented(f"{len(ins.operands)} operands")
    function = bare(function)
    getters = [source(env, ins, position, letter) for position, letter in zip(positions, kinds, strict=False)]
    if target_is_source:
        getters.append(lambda g: g.v[row])
    finish = output_modifiers(ins, env) if result == "f" else None
    control = dpp_control(ins)
    reads = env.ids(*operands, *extra)
    if target_is_source or result == "h":
        reads |= env.ids(target)
    write: Callable[[Group, Any], None]
    if result == "q":
        write = lambda g, value: write_vector_wide(g, row, value)  # noqa: E731
    elif result == "h":
        high = bool((*ins.bits("op_sel", ()), 0, 0, 0, 0)[3]) if len(ins.bits("op_sel", ())) > 3 else _last_op_sel(ins)
        write = lambda g, value: write_half(g, row, value, high)  # noqa: E731
    else:
        write = lambda g, value: write_vector(g, row, value)  # noqa: E731
    if ins.encoding == "sdwa":
        write = _sdwa_write(ins, row, write)
        if ins.modifiers.get("dst_unused") == "UNUSED_PRESERVE":
            reads |= env.ids(target)

    run: Callable[[Group], None]
    moves: Any = None
    if control is not None:
        run, moves = _dpp_run(ins, env, control, getters, function, finish, row, reads, target)
    elif finish is not None:
        done = finish

        def run(g: Group) -> None:
            write(g, done(np.asarray(function(*[get(g) for get in getters]))))
    elif len(getters) == 1 and result in "ufz":
        (a,) = getters

        def run(g: Group) -> None:
            write_vector(g, row, function(a(g)))

        if ins.encoding == "sdwa":

            def run(g: Group) -> None:
                write(g, function(a(g)))
    elif len(getters) == 2:
        a, b = getters

        def run(g: Group) -> None:
            write(g, function(a(g), b(g)))
    else:

        def run(g: Group) -> None:
            write(g, function(*[get(g) for get in getters]))

    lanewise: tuple[Lanewise, ...] = ()
    if control is None and ins.encoding != "sdwa" and finish is None and result in "ufzq":
        lanewise = separate(ins, env, function, positions, kinds, row, target_is_source=target_is_source, result=result)
    return Operation(ins, kind, run, reads=reads, writes=env.ids(target), moves=moves, lanewise=lanewise)


def separate(
    ins: Instruction,
    env: Environment,
    function: Callable[..., Any],
    positions: tuple[int, ...],
    kinds: str,
    row: int,
    *,
    target_is_source: bool,
    result: str,
) -> tuple[Lanewise, ...]:
    """An instruction as what blocks may compute together with others of its kind; nothing where it is not so."""
    if result == "q":
        operand = ins.operands[positions[0]]
        if kinds != "q" or function is not unchanged or not isinstance(operand, Register):
            return ()
        sources = [_plain_source(env, operand, part) for part in (0, 1)]
        return tuple(Lanewise(function, (source,), row + part) for part, source in enumerate(sources))
    found = []
    for position, letter in zip(positions, kinds, strict=False):
        operand = ins.operands[position]
        if letter not in "ufm" or isinstance(operand, Name) or (letter == "m" and not isinstance(operand, Register)):
            return ()
        if isinstance(operand, Constant):
            constant: Any = np.asarray(source(env, ins, position, letter)(None))  # type: ignore[arg-type]
            found.append(Source("c", int(constant)))
        elif letter == "m":
            found.append(Source("m", operand.index))
        else:
            found.append(_plain_source(env, operand))
    if target_is_source:
        found.append(Source("v", row))
    return (Lanewise(function, tuple(found), row),)


def _plain_source(env: Environment, register: Register, part: int = 0) -> Source:
    scalar = register.file == "s"
    value = register.index if scalar else env.row(register)
    return Source("s" if scalar else "v", value + part, register.neg, register.abs)


def unchanged(value: Any) -> Any:
    """What a move computes."""
    return value


def _last_op_sel(ins: Instruction) -> bool:
    bits = ins.bits("op_sel", ())
    return bool(bits[-1]) if bits else False


def _dpp_run(
    ins: Instruction,
    env: Environment,
    control: int,
    getters: list[Getter],
    function: Callable[..., Any],
    finish: Callable[[Any], Any] | None,
    row: int,
    reads: set[int],
    target: Register,
) -> tuple[Callable[[Group], None], Callable[[Any, Any], tuple[Any, Any]]]:
    fetch = partial(
        lanes.dpp_fetch,
        ctrl=control,
        row_mask=ins.integer("row_mask", 0xF),
        bank_mask=ins.integer("bank_mask", 0xF),
        bound_ctrl="bound_ctrl" in ins.modifiers,
    )
    try:
        lanes.dpp_source(control)
    except ValueError as error:
        raise Unimplemented(str(error)) from error
    first, rest = getters[0], getters[1:]

    def run(g: Group) -> None:
        operand, write = fetch(first(g), g.exec)
        value = np.asarray(function(operand, *[get(g) for get in rest]))
        if finish is not None:
            value = finish(value)
        np.copyto(g.v[row], value, where=write)

    reads |= env.ids(target)
    return run, fetch


def _sdwa_write(ins: Instruction, row: int, write: Callable[[Group, Any], None]) -> Callable[[Group, Any], None]:
    selection = str(ins.modifiers.get("dst_sel", "DWORD"))
    shift, mask = SELECTIONS[selection]
    unused = str(ins.modifiers.get("dst_unused", "UNUSED_PAD"))
    if selection == "DWORD":
        return write
    keep = U32(~(mask << shift) & 0xFFFFFFFF)

    def put(g: Group, value: Any) -> None:
        value = (np.asarray(value) & U32(mask)) << U32(shift)
        if unused == "UNUSED_PRESERVE":
            value = value | g.v[row] & keep
        elif unused == "UNUSED_SEXT":
            width = 8 if mask == 0xFF else 16
            value = (value << U32(32 - shift - width)).view(np.int32) >> np.int32(32 - shift - width)
            value = value.view(U32)
        write_vector(g, row, value)

    return put
