"""Global, buffer and scalar memory and loads to LDS, executed from ISA text, against a bytearray."""

import numpy as np
import pytest

from aiter_paged_fp8.emulator import MachineFault, MemoryFault
from op_tests.emulator_text import FIRST_BUFFER, LANES, M32, M64, PREFILL, operand_table, run_text, signed

CASES = 3
SOME_LANES = 0xF0F0_1234_8000_0001
BYTES = 4096
WAIT = "    s_waitcnt vmcnt(0) lgkmcnt(0)"
MASKS = {"all lanes": M64, "some lanes": SOME_LANES}

LOADS = ("global_load_dword", "global_load_dwordx2", "global_load_dwordx3", "global_load_dwordx4")
STORES = ("global_store_dword", "global_store_dwordx2", "global_store_dwordx3", "global_store_dwordx4")
BUFFER_LOADS = ("buffer_load_dword", "buffer_load_dwordx2", "buffer_load_dwordx3", "buffer_load_dwordx4")
BUFFER_STORES = ("buffer_store_dword", "buffer_store_dwordx2", "buffer_store_dwordx3", "buffer_store_dwordx4")
# Bytes, whether the sign is extended, which half of the register is written.
NARROW_LOADS = {
    "global_load_ubyte": (1, False, None),
    "global_load_sbyte": (1, True, None),
    "global_load_ushort": (2, False, None),
    "global_load_sshort": (2, True, None),
    "global_load_ubyte_d16": (1, False, "low"),
    "global_load_ubyte_d16_hi": (1, False, "high"),
    "global_load_sbyte_d16": (1, True, "low"),
    "global_load_sbyte_d16_hi": (1, True, "high"),
    "global_load_short_d16": (2, False, "low"),
    "global_load_short_d16_hi": (2, False, "high"),
    "buffer_load_ubyte": (1, False, None),
    "buffer_load_sbyte": (1, True, None),
    "buffer_load_ushort": (2, False, None),
    "buffer_load_sshort": (2, True, None),
    "buffer_load_ubyte_d16": (1, False, "low"),
    "buffer_load_ubyte_d16_hi": (1, False, "high"),
    "buffer_load_sbyte_d16": (1, True, "low"),
    "buffer_load_sbyte_d16_hi": (1, True, "high"),
    "buffer_load_short_d16": (2, False, "low"),
    "buffer_load_short_d16_hi": (2, False, "high"),
}
# Bytes and shift.
NARROW_STORES = {
    "global_store_byte": (1, 0),
    "global_store_short": (2, 0),
    "global_store_byte_d16_hi": (1, 16),
    "global_store_short_d16_hi": (2, 16),
    "buffer_store_byte": (1, 0),
    "buffer_store_short": (2, 0),
    "buffer_store_byte_d16_hi": (1, 16),
    "buffer_store_short_d16_hi": (2, 16),
}
SCALAR = {
    "s_load_dword": 1,
    "s_load_dwordx2": 2,
    "s_load_dwordx4": 4,
    "s_load_dwordx8": 8,
    "s_load_dwordx16": 16,
    "s_buffer_load_dword": 1,
    "s_buffer_load_dwordx2": 2,
    "s_buffer_load_dwordx4": 4,
    "s_buffer_load_dwordx8": 8,
    "s_buffer_load_dwordx16": 16,
}
TO_LDS = ("global_load_lds_dword", "global_load_lds_dwordx3", "global_load_lds_dwordx4")
ROWS = (*LOADS, *STORES, *BUFFER_LOADS, *BUFFER_STORES, *NARROW_LOADS, *NARROW_STORES, *SCALAR, *TO_LDS)


def size_of(mnemonic):
    suffix = mnemonic.rsplit("dword", 1)[1]
    return 4 * int(suffix[1:] or 1)


def memory_bytes():
    return operand_table(1, BYTES // 4, seed=21)[0].view(np.uint8).copy()


def block(first, count, file="v"):
    return f"{file}[{first}:{first + count - 1}]" if count > 1 else f"{file}{first}"


def places(step, room, seed=0):
    generator = np.random.default_rng(seed)
    return (generator.integers(0, (BYTES - room) // step + 1, (CASES, LANES)) * step).astype(np.uint32)


def active(mask, lane):
    return mask >> lane & 1


def merged(old, data, size, sign, half):
    value = int.from_bytes(data[:size], "little")
    value = signed(value, 8 * size) & M32 if sign else value
    if half == "low":
        return old & 0xFFFF0000 | value & 0xFFFF
    if half == "high":
        return old & 0xFFFF | (value & 0xFFFF) << 16
    return value


def resource(records, *, word1=0, word3=0x20000):
    """Instructions that make s[40:43] the resource of the buffer at s[64:65]."""
    return (
        f"    s_mov_b32 s40, s{FIRST_BUFFER}\n    s_and_b32 s41, s{FIRST_BUFFER + 1}, 0xffff\n"
        f"    s_or_b32 s41, s41, {word1:#x}\n    s_mov_b32 s42, {records:#x}\n    s_mov_b32 s43, {word3:#x}\n"
    )


def execute(body, outputs, vectors, memory, *, mask=M64, scalars=None, **options):
    scalars = {46: np.full(CASES, mask, np.uint64), **(scalars or {})}
    body = f"    s_nop 4\n{body.replace('EXEC', 's_mov_b64 exec, s[46:47]')}\n{WAIT}"
    return run_text(body, outputs, vectors=vectors, scalars=scalars, buffers=[memory], cases=CASES, **options)


def held_against(got, outputs, want):
    for case, lane in np.ndindex(CASES, LANES):
        assert [int(got[name][case, lane]) for name in outputs] == want(case, lane), (case, lane)


# Address forms: text of the address operands, what is added to the place of each lane.
ADDRESS = {
    "scalar base": ("v10, {data}s[64:65]", 0),
    "scalar base, offset": ("v10, {data}s[64:65] offset:16", 16),
    "registers": ("v[12:13], {data}off", 0),
    "registers, negative offset": ("v[12:13], {data}off offset:-8", -8),
}


def address_vectors(at, shift):
    at = at if shift >= 0 else np.maximum(at, -shift + (8 if shift else 0))
    return {10: at}, at


PAIR = (
    "    v_mov_b32_e32 v13, s65\n    v_add_co_u32_e32 v12, vcc, s64, v10\n    s_nop 1\n"
    "    v_addc_co_u32_e32 v13, vcc, 0, v13, vcc\n"
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ADDRESS)
@pytest.mark.parametrize("mnemonic", LOADS)
def test_loads(mnemonic, form, mask):
    size = size_of(mnemonic)
    text, shift = ADDRESS[form]
    vectors, at = address_vectors(places(4, size + 16), shift)
    outputs = [f"v{30 + k}" for k in range(size // 4)]
    text = text.format(data="")
    body = f"{PAIR}    EXEC\n    {mnemonic} {block(30, size // 4)}, {text}"
    memory = memory_bytes()
    got = execute(body, outputs, vectors, memory, mask=MASKS[mask])

    def want(case, lane):
        start = int(at[case, lane]) + shift
        return (
            memory[start : start + size].view(np.uint32).tolist()
            if active(MASKS[mask], lane)
            else [PREFILL] * len(outputs)
        )

    held_against(got, outputs, want)


def distinct_places(size, room, seed):
    """Every lane of every workgroup has its own place."""
    slots = np.random.default_rng(seed).permutation((BYTES - room) // size)[: CASES * LANES]
    return (slots.reshape(CASES, LANES) * size).astype(np.uint32)


def sources(count, seed=22):
    return [column.reshape(CASES, LANES) for column in operand_table(count, CASES * LANES, seed=seed)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ADDRESS)
@pytest.mark.parametrize("mnemonic", STORES)
def test_stores(mnemonic, form, mask):
    size = size_of(mnemonic)
    text, shift = ADDRESS[form]
    at = distinct_places(size, 32, 1) + np.uint32(max(-shift, 0))
    data = sources(size // 4)
    text = text.format(data=f"{block(20, size // 4)}, ")
    memory = memory_bytes()
    expected = memory.copy()
    execute(
        f"{PAIR}    EXEC\n    {mnemonic} {text}",
        [],
        {10: at} | {20 + k: word for k, word in enumerate(data)},
        memory,
        mask=MASKS[mask],
    )
    for case, lane in np.ndindex(CASES, LANES):
        if active(MASKS[mask], lane):
            start = int(at[case, lane]) + shift
            expected[start : start + size] = np.array([word[case, lane] for word in data]).view(np.uint8)
    np.testing.assert_array_equal(memory, expected)


def addressed(mnemonic, data):
    """Operands of a narrow access at v10, offset 5 or 6."""
    offset = 5 if "byte" in mnemonic else 6
    if mnemonic.startswith("buffer"):
        return f"{data}, v10, s[40:43], 0 offen offset:{offset}", offset
    if "store" in mnemonic:
        return f"v10, {data}, s[64:65] offset:{offset}", offset
    return f"{data}, v10, s[64:65] offset:{offset}", offset


@pytest.mark.parametrize("mnemonic", NARROW_LOADS)
def test_loads_of_bytes_and_shorts(mnemonic):
    size, sign, half = NARROW_LOADS[mnemonic]
    at = places(size, 16)
    text, offset = addressed(mnemonic, "v30")
    memory = memory_bytes()
    got = execute(f"{resource(BYTES)}    EXEC\n    {mnemonic} {text}", ["v30"], {10: at}, memory, mask=SOME_LANES)

    def want(case, lane):
        start = int(at[case, lane]) + offset
        data = memory[start : start + size].tobytes()
        return [merged(PREFILL, data, size, sign, half) if active(SOME_LANES, lane) else PREFILL]

    held_against(got, ["v30"], want)


@pytest.mark.parametrize("mnemonic", NARROW_STORES)
def test_stores_of_bytes_and_shorts(mnemonic):
    size, shift = NARROW_STORES[mnemonic]
    # Workgroups keep to dwords of their own: which workgroup wrote is known per dword.
    at = distinct_places(4, 16, 2) + np.uint32(2 if size == 2 else 3)
    (data,) = sources(1)
    text, offset = addressed(mnemonic, "v20")
    memory = memory_bytes()
    expected = memory.copy()
    execute(f"{resource(BYTES)}    EXEC\n    {mnemonic} {text}", [], {10: at, 20: data}, memory, mask=SOME_LANES)
    for case, lane in np.ndindex(CASES, LANES):
        if active(SOME_LANES, lane):
            start = int(at[case, lane]) + offset
            expected[start : start + size] = np.frombuffer(
                (int(data[case, lane]) >> shift).to_bytes(4, "little"), np.uint8
            )[:size]
    np.testing.assert_array_equal(memory, expected)


# Text of a buffer address, what it adds to the place of a lane (voffset counts only with offen).
BUFFER_ADDRESS = {
    "offen": ("v10, s[40:43], 0 offen", True, 0),
    "offen, offset": ("v10, s[40:43], 0 offen offset:20", True, 20),
    "soffset": ("v10, s[40:43], s50 offen offset:4", True, 40),
    "soffset constant": ("v10, s[40:43], 32 offen", True, 32),
    "no register": ("off, s[40:43], s50 offset:8", False, 44),
    "m0 as soffset": ("v10, s[40:43], m0 offen", True, 36),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", BUFFER_ADDRESS)
@pytest.mark.parametrize("mnemonic", BUFFER_LOADS)
def test_buffer_loads_give_zeros_beyond_num_records(mnemonic, form, mask):
    size = size_of(mnemonic)
    text, uses_register, shift = BUFFER_ADDRESS[form]
    records = 2050
    at = places(2 if size == 4 else 4, 0, seed=3)
    at[0, :4] = np.array([records - shift - size, records - shift - 4, records - shift, records - shift - 2])
    at[1, :2] = M32 - 7, 1 << 31
    if size > 4:
        at &= np.uint32(M32 - 3)
    scalars = {50: np.full(CASES, 36, np.uint32)}
    outputs = [f"v{30 + k}" for k in range(size // 4)]
    body = f"{resource(records)}    s_mov_b32 m0, s50\n    EXEC\n    {mnemonic} {block(30, size // 4)}, {text}"
    memory = memory_bytes()
    got = execute(body, outputs, {10: at}, memory, mask=MASKS[mask], scalars=scalars)

    def want(case, lane):
        if not active(MASKS[mask], lane):
            return [PREFILL] * len(outputs)
        result = []
        for element in range(size // 4):
            start = shift + 4 * element + (int(at[case, lane]) if uses_register else 0)
            inside = start + 4 <= records
            result.append(int.from_bytes(memory[start : start + 4].tobytes(), "little") if inside else 0)
        return result

    held_against(got, outputs, want)


@pytest.mark.parametrize("mnemonic", BUFFER_STORES)
def test_buffer_stores_drop_what_lies_beyond_num_records(mnemonic):
    size = size_of(mnemonic)
    records = BYTES // 2 + 8
    at = distinct_places(size, size, 4)
    at[0, :2] = records - 4, M32 - 3
    if size > 4:
        # Its neighbours on either side stay away.
        taken = (at > records - 4 - size) & (at < records + size)
        taken[0, 0] = False
        at[taken] = BYTES
    data = sources(size // 4)
    memory = memory_bytes()
    expected = memory.copy()
    body = f"{resource(records)}    EXEC\n    {mnemonic} {block(20, size // 4)}, v10, s[40:43], 0 offen"
    execute(body, [], {10: at} | {20 + k: word for k, word in enumerate(data)}, memory, mask=SOME_LANES)
    for case, lane in np.ndindex(CASES, LANES):
        for element in range(size // 4):
            start = int(at[case, lane]) + 4 * element
            if active(SOME_LANES, lane) and start + 4 <= records:
                expected[start : start + 4] = data[element][case, lane : lane + 1].view(np.uint8)
    np.testing.assert_array_equal(memory, expected)


def test_a_narrow_load_beyond_num_records_gives_zero():
    at = np.resize(np.array([98, 99, 100, 4000], np.uint32), (CASES, LANES))
    memory = memory_bytes()
    got = execute(f"{resource(100)}    buffer_load_ubyte v30, v10, s[40:43], 0 offen", ["v30"], {10: at}, memory)
    assert got["v30"][0, :4].tolist() == [memory[98], memory[99], 0, 0]


def test_a_structured_buffer_counts_records_of_its_stride():
    stride, records = 24, 50
    index = np.random.default_rng(5).integers(0, 70, (CASES, LANES)).astype(np.uint32)
    offset = np.random.default_rng(6).integers(0, 5, (CASES, LANES)).astype(np.uint32) * np.uint32(4)
    memory = memory_bytes()
    start = resource(records, word1=stride << 16)
    got = execute(
        f"{start}    buffer_load_dword v30, v[10:11], s[40:43], 0 idxen offen offset:4",
        ["v30"],
        {10: index, 11: offset},
        memory,
    )
    for case, lane in np.ndindex(CASES, LANES):
        at = stride * int(index[case, lane]) + int(offset[case, lane]) + 4
        want = memory[at : at + 4].view(np.uint32)[0] if index[case, lane] < records else 0
        assert got["v30"][case, lane] == want
    got = execute(f"{start}    buffer_load_dword v30, v10, s[40:43], 0 idxen", ["v30"], {10: index}, memory)
    assert got["v30"][0, 0] == (memory[24 * int(index[0, 0]) :][:4].view(np.uint32)[0] if index[0, 0] < records else 0)


def test_a_raw_buffer_counts_bytes_whatever_its_stride():
    # Without idxen the range is num_records bytes (manual, "Range checking", raw buffer).
    at = np.resize(np.array([0, 96, 100, 400], np.uint32), (CASES, LANES))
    memory = memory_bytes()
    got = execute(
        f"{resource(100, word1=16 << 16)}    buffer_load_dword v30, v10, s[40:43], 0 offen", ["v30"], {10: at}, memory
    )
    words = memory.view(np.uint32)
    assert got["v30"][0, :4].tolist() == [words[0], words[24], 0, 0]


@pytest.mark.parametrize(("word1", "word3"), [(1 << 31, 0x20000), (0, 0x20000 | 1 << 23)], ids=["swizzle", "add_tid"])
def test_a_resource_that_is_not_modelled_is_refused(word1, word3):
    body = f"{resource(BYTES, word1=word1, word3=word3)}    buffer_load_dword v30, v10, s[40:43], 0 offen"
    with pytest.raises((MachineFault, MemoryFault)):
        execute(body, ["v30"], {10: places(4, 64)}, memory_bytes())


def test_agprs_serve_as_data_of_memory():
    at = distinct_places(8, 16, 7)
    a, b = sources(2)
    memory = memory_bytes()
    body = (
        f"{resource(BYTES)}    buffer_store_dwordx2 a[2:3], v10, s[40:43], 0 offen\n{WAIT}\n"
        "    global_load_dwordx2 a[4:5], v10, s[64:65]"
    )
    got = execute(body, ["a4", "a5"], {10: at, "a2": a, "a3": b}, memory)
    np.testing.assert_array_equal(got["a4"], a)
    np.testing.assert_array_equal(got["a5"], b)


# -- scalar loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mnemonic", SCALAR)
def test_scalar_loads(mnemonic):
    count = SCALAR[mnemonic]
    buffered = "buffer" in mnemonic
    offsets = np.array([0, 64, 1027], np.uint32)
    outputs = [f"s{20 + k}" for k in range(count)]
    base = "s[40:43]" if buffered else "s[64:65]"
    memory = memory_bytes()
    words = memory.view(np.uint32)
    for text, constant, variable in (("0x20", 32, False), ("s50", 0, True), ("s50 offset:0x10", 16, True)):
        body = f"{resource(BYTES)}    s_nop 4\n    {mnemonic} {block(20, count, 's')}, {base}, {text}"
        got = execute(body, outputs, {}, memory, scalars={50: offsets})
        for case in range(CASES):
            first = (constant + (int(offsets[case]) if variable else 0)) // 4
            assert [int(got[name][case]) for name in outputs] == words[first : first + count].tolist()


def test_a_scalar_buffer_load_gives_zeros_beyond_num_records():
    memory = memory_bytes()
    outputs = [f"s{20 + k}" for k in range(4)]
    body = f"{resource(100)}    s_nop 4\n    s_buffer_load_dwordx4 s[20:23], s[40:43], 0x5c"
    got = execute(body, outputs, {}, memory)
    assert [int(got[name][0]) for name in outputs] == [*memory.view(np.uint32)[23:25].tolist(), 0, 0]


# -- straight to LDS ---------------------------------------------------------------------------------------------------

LDS = 4096


def lds_back(count=16):
    return "    v_lshlrev_b32_e32 v9, 2, v0\n" + "\n".join(
        f"    ds_read_b32 v{100 + k}, v9 offset:{256 * k}" for k in range(count)
    )


BEFORE = "    v_lshlrev_b32_e32 v9, 2, v0\n    v_mov_b32_e32 v8, 0x11223344\n" + "\n".join(
    f"    ds_write_b32 v9, v8 offset:{256 * k}" for k in range(16)
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "mnemonic",
    ["buffer_load_dword", "buffer_load_dwordx3", "buffer_load_dwordx4", *TO_LDS],
)
def test_loads_to_lds(mnemonic, mask):
    buffered = mnemonic.startswith("buffer")
    size = size_of(mnemonic)
    stride = 4 if size == 4 else 16
    offset, m0 = 12, 516
    records = BYTES - 300 if buffered else BYTES
    at = places(4, 0 if buffered else size + offset, seed=8)
    if buffered:
        at[0, :3] = records - offset - 4, records - offset, 1 << 31
    text = f"v10, s[40:43], 0 offen offset:{offset} lds" if buffered else f"v10, s[64:65] offset:{offset}"
    # Bits above 18 do not count; the global form drops the two lowest as well.
    set_m0 = f"    s_mov_b32 m0, {m0 | 0xFFFC0000 | (0 if buffered else 3):#x}"
    memory = memory_bytes()
    body = (
        f"{BEFORE}\n{WAIT}\n{resource(records)}{set_m0}\n    EXEC\n    s_nop 4\n    {mnemonic} {text}\n"
        f"{WAIT}\n    s_mov_b64 exec, -1\n{lds_back()}"
    )
    names = [f"v{100 + k}" for k in range(16)]
    got = execute(body, names, {10: at}, memory, mask=MASKS[mask], lds=LDS)
    for case in range(CASES):
        expected = bytearray(bytes.fromhex("44332211") * (LDS // 4))
        for lane in range(LANES):
            if not active(MASKS[mask], lane):
                continue
            for element in range(size // 4):
                start = int(at[case, lane]) + offset + 4 * element
                data = memory[start : start + 4].tobytes() if start + 4 <= records else bytes(4)
                place = m0 + offset + stride * lane + 4 * element
                expected[place : place + 4] = data
        assert b"".join(got[name][case].tobytes() for name in names) == bytes(expected)


def test_a_load_to_lds_takes_soffset_for_memory_but_not_for_lds():
    memory = memory_bytes()
    at = np.resize(np.arange(LANES, dtype=np.uint32) * 4, (CASES, LANES))
    body = (
        f"{BEFORE}\n{WAIT}\n{resource(BYTES)}    s_mov_b32 m0, 0\n    s_movk_i32 s50, 0x400\n    s_nop 4\n"
        f"    buffer_load_dword v10, s[40:43], s50 offen lds\n{WAIT}\n{lds_back(1)}"
    )
    got = execute(body, ["v100"], {10: at}, memory, lds=LDS)["v100"]
    np.testing.assert_array_equal(got[0], memory.view(np.uint32)[256 : 256 + LANES])


@pytest.mark.parametrize("mnemonic", ["buffer_load_dword", "global_load_lds_dword"])
def test_m0_reaches_all_of_lds(mnemonic):
    # 160 KiB take 18 bits.
    top = 160 * 1024 - 256
    memory = memory_bytes()
    at = np.resize(np.arange(LANES, dtype=np.uint32) * 4, (CASES, LANES))
    operands = "v10, s[40:43], 0 offen lds" if mnemonic.startswith("buffer") else "v10, s[64:65]"
    body = (
        f"{resource(BYTES)}    s_mov_b32 m0, {top:#x}\n    v_add_u32_e32 v11, {top:#x}, v10\n    s_nop 4\n"
        f"    {mnemonic} {operands}\n{WAIT}\n    ds_read_b32 v30, v11"
    )
    got = execute(body, ["v30"], {10: at}, memory, lds=160 * 1024)["v30"]
    np.testing.assert_array_equal(got, np.broadcast_to(memory.view(np.uint32)[:LANES], (CASES, LANES)))
