"""Every instruction that the emulator implements has a row in one of the tables of instruction tests."""

from pathlib import Path

import pytest

from aiter_paged_fp8.emulator.coverage import isa_coverage
from aiter_paged_fp8.emulator.loader import load_table
from op_tests import (
    test_emulator_isa_compare,
    test_emulator_isa_control,
    test_emulator_isa_conversion,
    test_emulator_isa_crosslane,
    test_emulator_isa_float,
    test_emulator_isa_half,
    test_emulator_isa_lds,
    test_emulator_isa_matrix,
    test_emulator_isa_memory,
    test_emulator_isa_scalar,
    test_emulator_isa_vector,
)

TABLES = {
    module.__name__.rpartition(".")[2]: module.ROWS
    for module in (
        test_emulator_isa_compare,
        test_emulator_isa_control,
        test_emulator_isa_conversion,
        test_emulator_isa_crosslane,
        test_emulator_isa_float,
        test_emulator_isa_half,
        test_emulator_isa_lds,
        test_emulator_isa_matrix,
        test_emulator_isa_memory,
        test_emulator_isa_scalar,
        test_emulator_isa_vector,
    )
}


def test_every_implemented_instruction_has_a_row():
    rows = {mnemonic for table in TABLES.values() for mnemonic in table}
    assert sorted(load_table().keys() - rows) == []


def test_every_row_is_an_implemented_instruction():
    rows = {mnemonic for table in TABLES.values() for mnemonic in table}
    assert sorted(rows - load_table().keys()) == []


def test_no_instruction_has_two_rows():
    rows = [mnemonic for table in TABLES.values() for mnemonic in table]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("module", TABLES)
def test_rows_stand_in_the_text_of_their_file(module):
    """What `inspect --isa-coverage` calls tested is what the tests' texts name."""
    text = (Path(__file__).parent / f"{module}.py").read_text()
    named = {row.mnemonic for row in isa_coverage(tests=[text]) if row.tested}
    assert sorted(set(TABLES[module]) - named) == []


def test_coverage_says_what_is_tested():
    coverage = isa_coverage(tests=[" ".join(table) for table in TABLES.values()])
    assert [row.mnemonic for row in coverage if not row.tested] == []
    assert not any(row.tested for row in isa_coverage())
