"""Conversions between number formats (manual, "V_CVT_*")."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..lanewise import Lanewise
from ..math import conversion, narrow
from ..operation import Environment, Operation, instruction
from ..state import Group
from ..syntax import Instruction
from .arithmetic import denormals
from .operands import want_register, write_vector
from .scalar import MODE_FP16_OVFL, MODE_ROW
from .valu import COMMON_MODIFIERS, FLOAT_MODIFIERS, bare, separate, source, valu

FAMILY = "conversion"
U32 = np.uint32
Array = Any


def _ubyte(byte: int) -> Callable[[Array], Array]:
    return lambda value: conversion.cvt_f32_ubyte(value, byte)


# function, letters of the sources, letter of the result
PLAIN: dict[str, tuple[Callable[..., Array], str, str]] = {
    "v_cvt_f32_i32": (conversion.cvt_f32_i32, "u", "f"),
    "v_cvt_f32_u32": (conversion.cvt_f32_u32, "u", "f"),
    "v_cvt_i32_f32": (conversion.cvt_i32_f32, "f", "u"),
    "v_cvt_u32_f32": (conversion.cvt_u32_f32, "f", "u"),
    "v_cvt_rpi_i32_f32": (conversion.cvt_rpi_i32_f32, "f", "u"),
    "v_cvt_flr_i32_f32": (conversion.cvt_flr_i32_f32, "f", "u"),
    "v_cvt_f32_f16": (conversion.cvt_f32_f16, "h", "f"),
    "v_cvt_f32_bf16": (conversion.cvt_f32_bf16, "w", "f"),
    "v_cvt_pk_bf16_f32": (conversion.cvt_pk_bf16_f32, "ff", "u"),
    "v_cvt_pkrtz_f16_f32": (conversion.cvt_pkrtz_f16_f32, "ff", "u"),
    "v_cvt_pk_f16_f32": (conversion.cvt_pk_f16_f32, "ff", "u"),
    "v_cvt_pk_u8_f32": (conversion.cvt_pk_u8_f32, "fuu", "u"),
    "v_cvt_f32_f64": (conversion.cvt_f32_f64, "d", "f"),
    "v_cvt_f64_f32": (conversion.cvt_f64_f32, "f", "q"),
    "v_cvt_i32_f64": (conversion.cvt_i32_f64, "d", "u"),
    "v_cvt_u32_f64": (conversion.cvt_u32_f64, "d", "u"),
    "v_cvt_f64_i32": (conversion.cvt_f64_i32, "u", "q"),
    "v_cvt_f64_u32": (conversion.cvt_f64_u32, "u", "q"),
    **{f"v_cvt_f32_ubyte{byte}": (_ubyte(byte), "u", "f") for byte in range(4)},
}


@instruction(*PLAIN, family=FAMILY, section="V_CVT_F32_I32 and others", modifiers=FLOAT_MODIFIERS)
def plain(ins: Instruction, env: Environment) -> Operation:
    """Conversions that depend on their sources alone."""
    function, kinds, result = PLAIN[ins.mnemonic]
    return valu(ins, env, function, kinds, result=result)


def fixed_overflow(env: Environment) -> bool | None:
    """MODE.FP16_OVFL as the kernel starts, where the program never writes MODE."""
    if any(ins.mnemonic.startswith("s_setreg") for ins in env.program.instructions):
        return None
    return bool(env.program.metadata.directives.get("fp16_overflow", 0))


def overflow_clamps(env: Environment) -> Callable[[Group], bool]:
    """MODE.FP16_OVFL."""
    always = fixed_overflow(env)
    if always is not None:
        return lambda g: always
    return lambda g: bool(g.s[MODE_ROW].flat[0] >> U32(MODE_FP16_OVFL) & U32(1))


@instruction("v_cvt_f16_f32", family=FAMILY, section="V_CVT_F16_F32", modifiers=COMMON_MODIFIERS)
def v_cvt_f16_f32(ins: Instruction, env: Environment) -> Operation:
    """To half precision; the upper half of the register becomes 0 on this target."""
    clamps = bool(env.program.metadata.directives.get("fp16_overflow", 0))
    return valu(
        ins, env, lambda a: conversion.cvt_f16_f32(np.asarray(a), overflow_clamps=clamps) & U32(0xFFFF), "f", result="z"
    )


NARROW = {"fp8": narrow.FP8, "bf8": narrow.BF8}


@instruction("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32", family=FAMILY, section="V_CVT_PK_FP8_F32", modifiers=["op_sel"])
def v_cvt_pk_narrow_f32(ins: Instruction, env: Environment) -> Operation:
    """Two floats to one half of the register (op_sel's last bit); the other half is kept."""
    form = NARROW[ins.mnemonic.split("_")[3]]
    target = want_register(ins.operands[0], "v", 1)
    row = env.row(target)
    word = ins.bits("op_sel", (0, 0, 0))[-1]
    a, b = source(env, ins, 1, "f"), source(env, ins, 2, "f")
    clamps, mode = overflow_clamps(env), denormals(env)

    def run(g: Group) -> None:
        value = narrow.cvt_pk_narrow_f32(
            a(g), b(g), g.v[row], form=form, word=word, overflow_clamps=clamps(g), denorm=mode
        )
        write_vector(g, row, value)

    lanewise: tuple[Lanewise, ...] = ()
    always = fixed_overflow(env)
    if always is not None:
        function = _pack_narrow(form, word, always, mode)
        lanewise = separate(ins, env, function, (1, 2), "ff", row, target_is_source=True, result="u")
    return Operation(ins, "valu", run, reads=env.ids(*ins.operands), writes=env.ids(target), lanewise=lanewise)


@lru_cache(maxsize=64)
def _pack_narrow(form: narrow.Narrow, word: int, clamps: bool, denorm: int) -> Callable[..., Array]:
    function = bare(narrow.cvt_pk_narrow_f32)
    return partial(function, form=form, word=word, overflow_clamps=clamps, denorm=denorm)


@instruction(
    "v_cvt_f32_fp8", "v_cvt_f32_bf8", family=FAMILY, section="V_CVT_F32_FP8", modifiers=[*FLOAT_MODIFIERS, "op_sel"]
)
def v_cvt_f32_narrow(ins: Instruction, env: Environment) -> Operation:
    """One byte to a float; SDWA or op_sel chooses it."""
    form = NARROW[ins.mnemonic.split("_")[3]]
    picks = ins.bits("op_sel", (0, 0))
    byte = picks[0] | (picks[1] << 1 if len(picks) > 1 else 0)
    return valu(ins, env, lambda a: narrow.cvt_f32_narrow(np.asarray(a), form=form, byte=byte), "u", result="f")


@instruction(
    "v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8", family=FAMILY, section="V_CVT_PK_F32_FP8", modifiers=["op_sel", "src0_sel"]
)
def v_cvt_pk_f32_narrow(ins: Instruction, env: Environment) -> Operation:
    """Two bytes to two floats; SDWA or op_sel chooses the half."""
    form = NARROW[ins.mnemonic.split("_")[4]]
    row = env.row(want_register(ins.operands[0], "v", 2))
    word = ins.bits("op_sel", (0,))[0]
    if ins.modifiers.get("src0_sel") == "WORD_1":
        word = 1
    get = source(env, Instruction(**{**ins.__dict__, "encoding": ""}), 1, "u")

    def run(g: Group) -> None:
        first, second = narrow.cvt_pk_f32_narrow(np.asarray(get(g)), form=form, word=word)
        write_vector(g, row, first)
        write_vector(g, row + 1, second)

    return Operation(ins, "valu", run, reads=env.ids(ins.operands[1]), writes=env.ids(ins.operands[0]))


SCALED_FORMS = {"fp8": narrow.FP8, "bf8": narrow.BF8, "fp4": narrow.FP4}


@instruction(
    *(f"v_cvt_scalef32_pk_{name}_f32" for name in SCALED_FORMS),
    family=FAMILY,
    section="V_CVT_SCALEF32_PK_FP8_F32",
    modifiers=["op_sel"],
)
def v_cvt_scalef32_pk_narrow_f32(ins: Instruction, env: Environment) -> Operation:
    """Two floats divided by a power of two, to part of the register; the rest is kept."""
    form = SCALED_FORMS[ins.mnemonic.split("_")[4]]
    target = want_register(ins.operands[0], "v", 1)
    row = env.row(target)
    picks = (*ins.bits("op_sel", ()), 0, 0, 0, 0)
    part = picks[3] if form.bits == 8 else picks[2] | picks[3] << 1
    getters = [source(env, ins, position, "f") for position in (1, 2, 3)]
    clamps, mode = overflow_clamps(env), denormals(env)

    def run(g: Group) -> None:
        x, y, scale = np.broadcast_arrays(*[get(g) for get in getters])
        value = narrow.cvt_scalef32_pk_narrow(
            x, y, scale, g.v[row], form=form, part=part, overflow_clamps=clamps(g), denorm=mode
        )
        write_vector(g, row, value)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands), writes=env.ids(target))


@instruction(
    *(f"v_cvt_scalef32_pk_f32_{name}" for name in SCALED_FORMS),
    family=FAMILY,
    section="V_CVT_SCALEF32_PK_F32_FP8",
    modifiers=["op_sel"],
)
def v_cvt_scalef32_pk_f32_narrow(ins: Instruction, env: Environment) -> Operation:
    """Two narrow values times a power of two, to two floats."""
    form = SCALED_FORMS[ins.mnemonic.split("_")[5]]
    row = env.row(want_register(ins.operands[0], "v", 2))
    picks = (*ins.bits("op_sel", ()), 0, 0)
    part = picks[0] if form.bits == 8 else picks[0] | picks[1] << 1
    value, scale = source(env, ins, 1, "u"), source(env, ins, 2, "f")

    def run(g: Group) -> None:
        x, s = np.broadcast_arrays(value(g), scale(g))
        first, second = narrow.cvt_scalef32_pk_from_narrow(x, s, form=form, wide=narrow.Wide.F32, part=part)
        write_vector(g, row, first)
        write_vector(g, row + 1, second)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[1:]), writes=env.ids(ins.operands[0]))
