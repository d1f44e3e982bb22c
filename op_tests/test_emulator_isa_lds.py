"""LDS instructions, executed from ISA text, against a bytearray; exchanges through the LDS crossbar lane by lane."""

import numpy as np
import pytest

from aiter_paged_fp8.emulator import MemoryFault
from op_tests.emulator_text import LANES, M32, M64, PREFILL, operand_table, run_text, signed

CASES = 3
SOME_LANES = 0xF0F0_1234_8000_0001
# LDS of a workgroup: 16 registers of 64 lanes, written before the body and read back after it.
ROWS_OF_LDS = 16
SIZE = 4 * LANES * ROWS_OF_LDS
CONTENT = 100
FILL = "\n".join(f"    ds_write_b32 v9, v{CONTENT + k} offset:{256 * k}" for k in range(ROWS_OF_LDS))
READ_BACK = "\n".join(f"    ds_read_b32 v{CONTENT + k}, v9 offset:{256 * k}" for k in range(ROWS_OF_LDS))
WAIT = "    s_waitcnt lgkmcnt(0)"

# Bytes, whether the sign is extended, which half of the register is written.
NARROW_READS = {
    "ds_read_u8": (1, False, None),
    "ds_read_i8": (1, True, None),
    "ds_read_u16": (2, False, None),
    "ds_read_i16": (2, True, None),
    "ds_read_u8_d16": (1, False, "low"),
    "ds_read_u8_d16_hi": (1, False, "high"),
    "ds_read_i8_d16": (1, True, "low"),
    "ds_read_i8_d16_hi": (1, True, "high"),
    "ds_read_u16_d16": (2, False, "low"),
    "ds_read_u16_d16_hi": (2, False, "high"),
}
# Bytes, and the unit of the two offsets in bytes where there are two.
READS = {
    "ds_read_b32": (4, None),
    "ds_read_b64": (8, None),
    "ds_read_b96": (12, None),
    "ds_read_b128": (16, None),
    "ds_read2_b32": (4, 4),
    "ds_read2_b64": (8, 8),
    "ds_read2st64_b32": (4, 256),
    "ds_read2st64_b64": (8, 512),
}
WRITES = {
    "ds_write_b32": (4, None),
    "ds_write_b64": (8, None),
    "ds_write_b96": (12, None),
    "ds_write_b128": (16, None),
    "ds_write2_b32": (4, 4),
    "ds_write2_b64": (8, 8),
    "ds_write2st64_b32": (4, 256),
    "ds_write2st64_b64": (8, 512),
}
NARROW_WRITES = {
    "ds_write_b8": (1, 0),
    "ds_write_b16": (2, 0),
    "ds_write_b8_d16_hi": (1, 16),
    "ds_write_b16_d16_hi": (2, 16),
}
TRANSPOSED = {"ds_read_b64_tr_b4": 4, "ds_read_b64_tr_b8": 8, "ds_read_b64_tr_b16": 16, "ds_read_b96_tr_b6": 6}
EXCHANGES = ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")
ROWS = (*NARROW_READS, *READS, *WRITES, *NARROW_WRITES, *TRANSPOSED, *EXCHANGES)


def contents():
    return operand_table(1, CASES * ROWS_OF_LDS * LANES, seed=3)[0].reshape(CASES, ROWS_OF_LDS, LANES)


def lds_bytes(content):
    return [bytearray(case.tobytes()) for case in content]


def addresses(step, room, seed=0):
    """Random multiples of `step` with `room` bytes left behind them."""
    generator = np.random.default_rng(seed)
    return (generator.integers(0, (SIZE - room) // step + 1, (CASES, LANES)) * step).astype(np.uint32)


def run_lds(body, outputs, vectors, *, mask=M64, content=None, **options):
    content = contents() if content is None else content
    vectors = {9: 4 * np.arange(LANES, dtype=np.uint32)[None], **vectors}
    vectors |= {CONTENT + k: content[:, k] for k in range(ROWS_OF_LDS)}
    scalars = {40: np.full(CASES, mask, np.uint64)}
    body = f"{FILL}\n{WAIT}\n    s_mov_b64 exec, s[40:41]\n    s_nop 7\n{body}\n{WAIT}"
    return run_text(body, outputs, vectors=vectors, scalars=scalars, lds=SIZE, cases=CASES, **options)


def block(first, count):
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


def held_against(got, outputs, want):
    """`want(case, lane)` gives the registers of a lane."""
    for case, lane in np.ndindex(CASES, LANES):
        assert [int(got[name][case, lane]) for name in outputs] == want(case, lane), (case, lane)


def active(mask, lane):
    return mask >> lane & 1


@pytest.mark.parametrize("mask", [M64, SOME_LANES], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("mnemonic", READS)
def test_reads(mnemonic, mask):
    size, unit = READS[mnemonic]
    words = size // 4 * (2 if unit else 1)
    outputs = [f"v{30 + k}" for k in range(words)]
    step = min(size, 8) if size != 12 else 4
    for offsets in ((5, 0), (1, 2), (0, 0)) if unit else ((0,), (4,), (1024,)):
        room = size + max(offsets) * (unit or 1)
        at = addresses(step, room)
        at[0, :4] = 0, SIZE - room - (SIZE - room) % step, 8, 8
        text = f" offset0:{offsets[0]} offset1:{offsets[1]}" if unit else f" offset:{offsets[0]}" if offsets[0] else ""
        text = text.replace(" offset0:0", "").replace(" offset1:0", "")
        if size > 4 and not unit and offsets[0] == 4:
            text, offsets = text.replace("4", "16"), (16,)
            at = np.minimum(at, SIZE - size - 16)
            at -= at % step
        got = run_lds(f"    {mnemonic} {block(30, words)}, v10{text}", outputs, {10: at}, mask=mask)
        lds = lds_bytes(contents())

        def want(case, lane, at=at, offsets=offsets, lds=lds):
            if not active(mask, lane):
                return [PREFILL] * words
            data = b"".join(
                lds[case][(start := int(at[case, lane]) + offset * (unit or 1)) : start + size] for offset in offsets
            )
            return np.frombuffer(data, np.uint32).tolist()

        held_against(got, outputs, want)


@pytest.mark.parametrize("mnemonic", NARROW_READS)
def test_reads_of_bytes_and_shorts(mnemonic):
    size, sign, half = NARROW_READS[mnemonic]
    at = addresses(size, size + 6)
    got = run_lds(f"    {mnemonic} v30, v10 offset:6", ["v30"], {10: at}, mask=SOME_LANES)
    lds = lds_bytes(contents())

    def want(case, lane):
        if not active(SOME_LANES, lane):
            return [PREFILL]
        start = int(at[case, lane]) + 6
        value = int.from_bytes(lds[case][start : start + size], "little")
        value = signed(value, 8 * size) & M32 if sign else value
        if half == "low":
            value = PREFILL & 0xFFFF0000 | value & 0xFFFF
        elif half == "high":
            value = PREFILL & 0xFFFF | (value & 0xFFFF) << 16
        return [value]

    held_against(got, ["v30"], want)


def scattered(size, seed):
    """Distinct places, so that the order of lanes does not matter: a permutation of slots."""
    generator = np.random.default_rng(seed)
    slots = np.stack([generator.permutation(SIZE // 2 // size)[:LANES] for _ in range(CASES)])
    return (slots * size).astype(np.uint32)


def written(at, data, size, offset, mask, lds):
    for case, lane in np.ndindex(CASES, LANES):
        if active(mask, lane):
            start = int(at[case, lane]) + offset
            lds[case][start : start + size] = data(case, lane)


@pytest.mark.parametrize("mask", [M64, SOME_LANES], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("mnemonic", WRITES)
def test_writes(mnemonic, mask):
    size, unit = WRITES[mnemonic]
    words = size // 4
    sources = [source.reshape(CASES, LANES) for source in operand_table(2 * words, CASES * LANES, seed=4)]
    at = scattered(size, 1)
    vectors = {10: at} | {20 + k: source for k, source in enumerate(sources)}
    # The second place lies beyond all first ones.
    offsets = (0, SIZE // 2 // unit) if unit else (SIZE // 2,)
    second = f", {block(20 + words, words)}" if unit else ""
    text = f" offset1:{offsets[1]}" if unit else f" offset:{offsets[0]}"
    body = f"    {mnemonic} v10, {block(20, words)}{second}{text}\n{WAIT}\n    s_mov_b64 exec, -1\n{READ_BACK}"
    names = [f"v{CONTENT + k}" for k in range(ROWS_OF_LDS)]
    got = run_lds(body, names, vectors, mask=mask)
    lds = lds_bytes(contents())
    for position, offset in enumerate(offsets):
        registers = sources[words * position : words * (position + 1)]
        written(
            at, lambda c, x, r=registers: b"".join(s[c, x].tobytes() for s in r), size, offset * (unit or 1), mask, lds
        )
    for case in range(CASES):
        assert b"".join(got[name][case].tobytes() for name in names) == bytes(lds[case])


@pytest.mark.parametrize("mnemonic", NARROW_WRITES)
def test_writes_of_bytes_and_shorts(mnemonic):
    size, shift = NARROW_WRITES[mnemonic]
    (source,) = (column.reshape(CASES, LANES) for column in operand_table(1, CASES * LANES, seed=6))
    at = scattered(size, 2)
    names = [f"v{CONTENT + k}" for k in range(ROWS_OF_LDS)]
    body = f"    {mnemonic} v10, v20 offset:34\n{WAIT}\n    s_mov_b64 exec, -1\n{READ_BACK}"
    got = run_lds(body, names, {10: at, 20: source}, mask=SOME_LANES)
    lds = lds_bytes(contents())
    written(at, lambda c, x: (int(source[c, x]) >> shift).to_bytes(4, "little")[:size], size, 34, SOME_LANES, lds)
    for case in range(CASES):
        assert b"".join(got[name][case].tobytes() for name in names) == bytes(lds[case])


def test_agprs_serve_as_data():
    at = scattered(8, 3)
    a, b = (column.reshape(CASES, LANES) for column in operand_table(2, CASES * LANES, seed=7))
    body = f"    ds_write_b64 v10, a[2:3]\n{WAIT}\n    ds_read_b64 a[4:5], v10"
    got = run_lds(body, ["a4", "a5"], {10: at, "a2": a, "a3": b})
    np.testing.assert_array_equal(got["a4"], a)
    np.testing.assert_array_equal(got["a5"], b)


@pytest.mark.parametrize("mnemonic", TRANSPOSED)
def test_transposing_reads(mnemonic):
    bits = TRANSPOSED[mnemonic]
    words = 3 if bits == 6 else 2
    at = addresses(4 if words == 3 else 8, 4 * words + 16)
    outputs = [f"v{30 + k}" for k in range(words)]
    got = run_lds(f"    {mnemonic} {block(30, words)}, v10 offset:16", outputs, {10: at})
    lds = lds_bytes(contents())
    count = 32 * words // bits

    def fetched(case, lane):
        start = int(at[case, lane]) + 16
        return int.from_bytes(lds[case][start : start + 4 * words], "little")

    def want(case, lane):
        row, place = lane - lane % 16, lane % 16
        result = 0
        for n in range(count):
            source = row + place // count + 16 // count * n
            element = fetched(case, source) >> bits * (place % count) & (1 << bits) - 1
            result |= element << bits * n
        return [result >> 32 * k & M32 for k in range(words)]

    held_against(got, outputs, want)


def test_the_byte_transpose_as_the_facts_state_it():
    at = np.resize(np.arange(LANES, dtype=np.uint32) * 8, (CASES, LANES))
    got = run_lds("    ds_read_b64_tr_b8 v[30:31], v10", ["v30", "v31"], {10: at})
    memory = np.stack([np.frombuffer(case, np.uint8) for case in lds_bytes(contents())])
    for lane in range(LANES):
        for n in range(8):
            source, byte = 16 * (lane // 16) + 2 * n + (lane >> 3 & 1), lane & 7
            result = got["v30" if n < 4 else "v31"][:, lane] >> np.uint32(8 * (n % 4)) & np.uint32(0xFF)
            np.testing.assert_array_equal(result, memory[:, 8 * source + byte])


# -- exchange through the crossbar -------------------------------------------------------------------------------------


def exchanged(text, vectors, mask):
    scalars = {"exec": np.array([mask], np.uint64)}
    return run_text(f"    {text}\n{WAIT}", ["v30"], vectors=vectors, scalars=scalars)["v30"]


@pytest.mark.parametrize("mask", [M64, SOME_LANES], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("offset", [0, 8])
def test_bpermute_pulls(mask, offset):
    where, data = (column.reshape(CASES, LANES) for column in operand_table(2, CASES * LANES, seed=8))
    got = exchanged(f"ds_bpermute_b32 v30, v10, v11 offset:{offset}", {10: where, 11: data}, mask)
    for case, lane in np.ndindex(CASES, LANES):
        source = (int(where[case, lane]) + offset) // 4 % LANES
        value = int(data[case, source]) if active(mask, source) else 0
        assert got[case, lane] == (value if active(mask, lane) else PREFILL)


@pytest.mark.parametrize("mask", [M64, SOME_LANES], ids=["all lanes", "some lanes"])
def test_permute_pushes(mask):
    generator = np.random.default_rng(9)
    target = np.stack([generator.permutation(LANES) for _ in range(CASES)])
    # Two lanes without a sender.
    target[:, :2] = target[:, 2:4]
    (data,) = (column.reshape(CASES, LANES) for column in operand_table(1, CASES * LANES, seed=10))
    data[:, 2:4] = data[:, :2]
    got = exchanged("ds_permute_b32 v30, v10, v11", {10: (4 * target + 256 * 3).astype(np.uint32), 11: data}, mask)
    for case in range(CASES):
        want = [0] * LANES
        for lane in range(LANES):
            if active(mask, lane):
                want[target[case, lane]] = int(data[case, lane])
        assert got[case].tolist() == [want[lane] if active(mask, lane) else PREFILL for lane in range(LANES)]


def bitmask(keep, force, flip):
    return lambda lane: lane & 32 | ((lane & 31 & keep | force) ^ flip)


def rotated(amount, mask):
    return lambda lane: lane & 32 | (lane & mask | (lane + amount) & ~mask) & 31


def fft(mask):
    def source(lane):
        reverse = int(f"{lane & 31:05b}"[::-1], 2)
        return lane & 32 | (reverse >> bin(mask).count("1") | lane & mask) & 31

    return source


SWIZZLES = {
    "swizzle(QUAD_PERM,1,0,3,2)": lambda lane: lane ^ 1,
    "swizzle(QUAD_PERM,3,3,0,2)": lambda lane: lane - lane % 4 + (3, 3, 0, 2)[lane % 4],
    "swizzle(SWAP,1)": bitmask(31, 0, 1),
    "swizzle(SWAP,16)": bitmask(31, 0, 16),
    "swizzle(REVERSE,8)": bitmask(31, 0, 7),
    "swizzle(REVERSE,32)": bitmask(31, 0, 31),
    "swizzle(BROADCAST,4,2)": lambda lane: lane - lane % 4 + 2,
    "swizzle(BROADCAST,32,17)": lambda lane: lane - lane % 32 + 17,
    'swizzle(BITMASK_PERM,"01pip")': bitmask(0b00111, 0b01000, 0b00010),
    "0x041f": bitmask(31, 0, 1),
    "0x80b1": lambda lane: lane - lane % 4 + (1, 0, 3, 2)[lane % 4],
    "0xc020": rotated(1, 0),
    "0xc420": rotated(-1, 0),
    "0xc061": rotated(3, 1),
    "0xe000": fft(0),
    "0xe010": fft(16),
    "0xe01f": fft(31),
}


@pytest.mark.parametrize("mask", [M64, SOME_LANES], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("offset", SWIZZLES)
def test_swizzle(offset, mask):
    (data,) = (column.reshape(CASES, LANES) for column in operand_table(1, CASES * LANES, seed=11))
    got = exchanged(f"ds_swizzle_b32 v30, v10 offset:{offset}", {10: data}, mask)
    for case, lane in np.ndindex(CASES, LANES):
        source = SWIZZLES[offset](lane)
        value = int(data[case, source]) if active(mask, source) else 0
        assert got[case, lane] == (value if active(mask, lane) else PREFILL), lane


# -- bounds and alignment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["ds_read_b32 v30, v10", "ds_read_b128 v[30:33], v10", "ds_write_b64 v10, v[20:21]", "ds_read_u8 v30, v10"]
)
def test_an_access_past_the_end_names_its_lane(text):
    size = {"2": 4, "8": 16, "4": 8}.get(text.split()[0][-1], 1) if "u8" not in text else 1
    at = np.zeros((CASES, LANES), np.uint32)
    at[1, 17] = SIZE - size + (4 if size > 1 else 1)
    vectors = {10: at, 20: at, 21: at}
    with pytest.raises(MemoryFault, match="lane 17") as fault:
        run_lds(f"    {text}", ["v30"], vectors)
    assert fault.value.details["text"].startswith(text)
    assert fault.value.details["workgroup"] == (1, 0, 0)
    # Its neighbour is in range, and so is a lane that takes no part.
    at[1, 17] -= 4 if size > 1 else 1
    run_lds(f"    {text}", ["v30"], vectors)
    at[1, 17] += 4 if size > 1 else 1
    run_lds(f"    {text}", ["v30"], vectors, mask=M64 ^ 1 << 17)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("ds_read_b32 v30, v10", 4),
        ("ds_read_u16 v30, v10", 2),
        ("ds_write_b16 v10, v20", 2),
        ("ds_read_b64_tr_b8 v[30:31], v10", 8),
    ],
)
def test_a_misaligned_access_is_a_fault(text, step):
    at = np.zeros((CASES, LANES), np.uint32)
    at[2, 5] = step // 2
    with pytest.raises(MemoryFault, match=rf"lane 5 .*multiple of {step}"):
        run_lds(f"    {text}", ["v30"], {10: at, 20: at})
