"""Operands: from what the assembly says to functions that read and write arrays of a group.

A *getter* is ``get(group) -> array``. Vector getters give ``[waves, workgroups, 64]`` or what broadcasts to it; scalar
getters ``[waves, workgroups]`` or a numpy scalar. Getters return views where they can: never write to their result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..operation import Environment, Unimplemented
from ..state import SCALAR_ROWS, Group
from ..syntax import EXEC_LO, VCC_LO, Constant, Name, Operand, Register

Getter = Callable[[Group], Any]

SIGN32 = np.uint32(0x80000000)
MAGNITUDE32 = np.uint32(0x7FFFFFFF)
DTYPES = {"u32": np.uint32, "i32": np.int32, "f32": np.float32}


def want_register(operand: Operand, files: str, count: int | None = None) -> Register:
    """Check that an operand is a register of given files and size."""
    if not isinstance(operand, Register) or operand.file not in files or (count and operand.count != count):
        raise Unimplemented(f"operand {operand!r}: {count or 'some'} register(s) of {files!r} expected")
    return operand


def constant32(operand: Constant, kind: str) -> Any:
    """A constant as a numpy scalar of a 32-bit type, source modifiers applied."""
    bits = operand.bits32()
    if kind == "f32":
        if operand.abs:
            bits &= 0x7FFFFFFF
        if operand.neg:
            bits ^= 0x80000000
    elif operand.neg or operand.abs:
        raise Unimplemented("neg or abs of an integer constant")
    return np.uint32(bits).view(DTYPES[kind])


def scalar_source(operand: Operand) -> Getter:
    """32-bit scalar source as uint32 ``[waves, workgroups]`` or a numpy scalar."""
    if isinstance(operand, Constant):
        value = constant32(operand, "u32")
        return lambda g: value
    if isinstance(operand, Name):
        if operand.text in ("scc", "src_scc"):
            return lambda g: g.scc.astype(np.uint32)
        if operand.text == "null":
            zero = np.uint32(0)
            return lambda g: zero
        if operand.text in ("src_vccz", "src_execz"):
            row = VCC_LO if operand.text == "src_vccz" else EXEC_LO
            return lambda g: ((g.s[row] | g.s[row + 1]) == 0).astype(np.uint32)
        raise Unimplemented(f"scalar operand {operand.text}")
    register = want_register(operand, "s")
    row = register.index
    _check_rows(row, 1)
    return lambda g: g.s[row]


def scalar_wide_source(operand: Operand) -> Getter:
    """64-bit scalar source as uint64 ``[waves, workgroups]`` or a numpy scalar."""
    if isinstance(operand, Constant):
        value = np.uint64(operand.bits64())
        return lambda g: value
    register = want_register(operand, "s", 2)
    row = register.index
    _check_rows(row, 2)
    return lambda g: g.wide(row)


def _check_rows(row: int, count: int) -> None:
    if row + count > SCALAR_ROWS:
        raise Unimplemented(f"scalar register {row}")


def vector_source(env: Environment, operand: Operand, kind: str) -> Getter:
    """32-bit source of a vector instruction: ``kind`` "u32", "i32" or "f32"; neg and abs applied."""
    if isinstance(operand, Constant):
        value = constant32(operand, kind)
        return lambda g: value
    if isinstance(operand, Name):
        scalar = scalar_source(operand)
        dtype = DTYPES[kind]
        return lambda g: np.asarray(scalar(g))[..., None].view(dtype)
    if operand.sext:
        raise Unimplemented("sext without SDWA")
    plain = _plain_source(env, operand, kind)
    if not (operand.neg or operand.abs):
        return plain
    if kind != "f32":
        raise Unimplemented("neg or abs of an integer")
    return with_sign(_plain_source(env, operand, "u32"), operand.neg, operand.abs)


def with_sign(bits: Getter, neg: bool, absolute: bool) -> Getter:
    """Float source with its sign modified: the sign bit alone changes, so that a NaN keeps its payload."""

    def get(g: Group) -> np.ndarray:
        value = bits(g)
        if absolute:
            value = value & MAGNITUDE32
        if neg:
            value = value ^ SIGN32
        return value.view(np.float32)

    return get


def _plain_source(env: Environment, register: Register, kind: str) -> Getter:
    if register.file == "s":
        row = register.index
        _check_rows(row, 1)
        if kind == "u32":
            return lambda g: g.sb[row]
        if kind == "f32":
            return lambda g: g.sf[row]
        return lambda g: g.si[row]
    row = env.row(register)
    if kind == "u32":
        return lambda g: g.v[row]
    if kind == "f32":
        return lambda g: g.f[row]
    return lambda g: g.i[row]


def vector_wide_source(env: Environment, operand: Operand, *, floating: bool = False) -> Getter:
    """64-bit source of a vector instruction as uint64."""
    if isinstance(operand, Constant):
        value = np.uint64(operand.bits64(floating=floating))
        return lambda g: value
    register = want_register(operand, "vas", 2)
    if register.file == "s":
        row = register.index
        _check_rows(row, 2)
        return lambda g: g.wide(row)[..., None]
    row = env.row(register)
    return lambda g: g.vwide(row)


def mask_source(operand: Operand) -> Getter:
    """Lane mask in a scalar pair, as bools ``[waves, workgroups, 64]``."""
    if isinstance(operand, Constant):
        bits = operand.bits64()
        lanes = np.array([bits >> lane & 1 for lane in range(64)], np.bool_)
        return lambda g: lanes
    row = want_register(operand, "s", 2).index
    return lambda g: g.mask(row)


def write_vector(g: Group, row: int, value: Any) -> None:
    """Write a 32-bit result to the active lanes; ``value`` may be of any 4-byte type."""
    target = g.v[row]
    if value.dtype != np.uint32:
        value = value.view(np.uint32)
    if g.full:
        target[...] = value
    else:
        np.copyto(target, value, where=g.exec)


def write_vector_wide(g: Group, row: int, value: np.ndarray) -> None:
    """Write a 64-bit result (uint64) to the active lanes of a register pair."""
    low, high = value.astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32)
    if g.full:
        g.v[row][...] = low
        g.v[row + 1][...] = high
    else:
        np.copyto(g.v[row], low, where=g.exec)
        np.copyto(g.v[row + 1], high, where=g.exec)


def is_scalar_register(operand: Operand) -> bool:
    """Whether an operand is a scalar register."""
    return isinstance(operand, Register) and operand.file == "s"
