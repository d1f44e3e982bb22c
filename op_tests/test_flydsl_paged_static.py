"""The compiled code of every specialisation of the native kernel, without running it: resources, forbidden
instructions, wait states, and what the steady loop may not hold."""

from __future__ import annotations

import re
from functools import cache

import pytest

from aiter_paged_fp8.emulator import LoadedProgram, Program, load
from aiter_paged_fp8.kernel_counts import steady_loop_counts
from aiter_paged_fp8.kernels.fmha_gfx950.traits import Traits
from op_tests.cases import Case, build
from op_tests.native_cases import SPECIALISATIONS, run_native

PACKED_F32 = re.compile(r"v_pk_(add|mul|fma|mov)_(f32|b32)")


@cache
def compiled(table: str, lse: bool) -> LoadedProgram:
    """The code that a call of this specialisation launches."""
    built = build(Case([1], [1], heads=1, kv_heads=1, table=table))
    program = run_native(built, return_lse=lse).launch.program
    assert program is not None
    return load(program)


@pytest.fixture(params=SPECIALISATIONS, ids=lambda value: f"{value[0]}-{'lse' if value[1] else 'no-lse'}")
def specialisation(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param


def traits_of(specialisation: tuple[str, bool]) -> Traits:
    return Traits("vectorized", 64, 128, 128, *specialisation)


def mnemonics(program: Program) -> list[str]:
    return [instruction.mnemonic for instruction in program.instructions]


def test_nothing_is_spilled(specialisation: tuple[str, bool]) -> None:
    program = compiled(*specialisation).program
    metadata = program.metadata
    assert (metadata.vgpr_spills, metadata.sgpr_spills) == (0, 0)
    assert metadata.scratch_size == 0
    assert metadata.directives["private_segment_fixed_size"] == 0
    assert metadata.directives["enable_private_segment"] == 0
    assert metadata.directives["uses_dynamic_stack"] == 0
    # The text itself, in case the metadata should ever not say it.
    assert re.search(r"\.vgpr_spill_count:\s+0\b", program.text)
    assert re.search(r"\.sgpr_spill_count:\s+0\b", program.text)
    assert not [name for name in mnemonics(program) if name.startswith(("scratch_", "flat_"))]
    assert not [name for name in mnemonics(program) if name in ("v_writelane_b32", "v_readlane_b32")], "scalar spills"


def test_registers_let_all_waves_be_resident(specialisation: tuple[str, bool]) -> None:
    program, traits = compiled(*specialisation).program, traits_of(specialisation)
    directives = program.metadata.directives
    assert traits.registers == 256
    assert 0 < program.metadata.vgprs <= traits.registers
    # Both files of registers together, as the hardware allocates them.
    assert directives["next_free_vgpr"] <= traits.registers
    assert program.vgprs + program.agprs <= traits.registers
    assert program.metadata.sgprs <= 102
    assert program.metadata.max_workgroup_size == traits.threads == 512
    print(specialisation, program.metadata.vgprs, "VGPRs", program.agprs, "AGPRs", program.metadata.sgprs, "SGPRs")


def test_lds_is_what_traits_say(specialisation: tuple[str, bool]) -> None:
    metadata = compiled(*specialisation).program.metadata
    assert metadata.lds_size == metadata.directives["group_segment_fixed_size"]
    assert metadata.lds_size == traits_of(specialisation).lds_bytes <= 163_840


def test_target(specialisation: tuple[str, bool]) -> None:
    program = compiled(*specialisation).program
    assert program.metadata.target.split("-")[-1].split(":")[0] == "gfx950"
    assert re.search(r'^\s*\.amdgcn_target "amdgcn-amd-amdhsa-[^"]*-gfx950(:[^"]*)?"', program.text, re.M)
    assert program.metadata.wavefront_size == 64


def test_no_packed_float32(specialisation: tuple[str, bool]) -> None:
    # They can read stale operands beside MFMAs on gfx950 (ROCm/rocMLIR issue 2459, LLVM issue 206825).
    assert not traits_of(specialisation).packed_f32
    packed = [name for name in mnemonics(compiled(*specialisation).program) if PACKED_F32.match(name)]
    assert packed == []


def test_wait_states(specialisation: tuple[str, bool]) -> None:
    assert [report.message for report in compiled(*specialisation).wait_states()] == []


def test_conversions_may_saturate_nowhere(specialisation: tuple[str, bool]) -> None:
    # The mode that turns overflow into 448 would hide a P beyond the range, which the lift forbids; denormals stay.
    program = compiled(*specialisation).program
    assert program.metadata.directives["fp16_overflow"] == 0
    assert program.metadata.directives["float_denorm_mode_32"] == 3
    assert not [name for name in mnemonics(program) if name.startswith("s_setreg")]


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("table", ["block", "csr"])
def test_no_accumulator_moves_in_the_steady_loop(table: str, lse: bool) -> None:
    loaded = compiled(table, lse)
    operations = {operation.instruction.line: operation for operation in loaded.operations}
    for loop in steady_loop_counts(table, lse):
        body = [operations[line] for line in loop.lines]
        products = [operation for operation in body if operation.kind == "mfma"]
        assert len(products) == 18
        accumulators = frozenset().union(*(operation.writes for operation in products))
        assert len(accumulators) == 16 * 9, "accumulators of 4 strips of keys, 4 of dims, and the row sums"
        moves = [
            operation.instruction.text
            for operation in body
            if operation.instruction.mnemonic.startswith(("v_mov", "v_accvgpr", "v_swap", "v_pk_mov"))
            and operation.regs & accumulators
        ]
        assert moves == []
        assert not [operation for operation in body if operation.instruction.mnemonic.startswith("v_accvgpr")]


def test_the_waits_of_the_matrix_phase_are_partial(specialisation: tuple[str, bool]) -> None:
    # Operands are read ahead: between the MFMAs of the steady loop no wait drains all of LDS but the last ones.
    loaded = compiled(*specialisation)
    operations = {operation.instruction.line: operation for operation in loaded.operations}
    for loop in steady_loop_counts(*specialisation):
        body = [operations[line].instruction for line in loop.lines]
        places = [at for at, instruction in enumerate(body) if "mfma" in instruction.mnemonic]
        between = body[places[0] : places[-1]]
        waits = [instruction.text for instruction in between if instruction.mnemonic == "s_waitcnt"]
        assert waits
        assert sum("lgkmcnt(0)" in text for text in waits) <= 2, waits
        assert not [text for text in waits if "vmcnt(0)" in text], waits
