"""Buffer loads and stores, and loads that go straight to LDS (manual, "Vector memory buffer instructions").

Range rule, per dword e of a lane: in range iff inst_offset + soffset + voffset + 4*(e+1) <= num_records. The manual
leaves soffset out; AMD's functional emulator counts it. Out-of-range loads give 0, stores are dropped, DMA writes zeros
to LDS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import MachineFault
from ..lds_check import FEW_WAVES
from ..memory import Access, Spread, load_small, load_words
from ..operation import Environment, Operation, Unimplemented, instruction
from ..pending import Pending
from ..state import LANES, SCALAR_ID, Group
from ..syntax import M0, Instruction, Name, Operand
from .operands import Getter, scalar_source, want_register
from .vmem import (
    CACHE_MODIFIERS,
    NARROW_LOADS,
    NARROW_STORES,
    WORDS,
    extend,
    global_address,
    put_narrow,
    store_words,
    write_words,
)

FAMILY = "buffer"
U32, U64, I64 = np.uint32, np.uint64, np.int64
MODIFIERS = ("offen", "idxen", "offset", "lds", *CACHE_MODIFIERS)
BASE_MASK = U64(0xFFFFFFFFFFFF)
# M0 holds a byte address of LDS in its low 18 bits.
M0_MASK = U32(0x3FFFF)
LDS_LANE_STRIDE = {1: 4, 3: 16, 4: 16}
LANE = np.arange(LANES, dtype=U32)


class Descriptors:
    """Resource descriptors of a group.

    Attributes
    ----------
    base, records, stride : numpy.ndarray
        Address, bytes in range and bytes per record, per wave.
    only : int or None
        The base, where all waves have the same.
    least : int
        Smallest number of bytes in range.
    """

    __slots__ = ("base", "content", "least", "only", "records", "stride")

    def __init__(self, g: Group, op: Operation, resource: int, content: bytes, *, structured: bool) -> None:
        for word, bit, name in ((1, 31, "swizzle"), (3, 23, "add_tid")):
            if (g.s[resource + word] >> U32(bit) & U32(1)).any():
                raise MachineFault(
                    f"kernel {g.machine.program.name}, {g.machine.program.describe(op.index)}: its buffer resource "
                    f"sets {name} (word {word}, bit {bit}), which is not modelled",
                    line=op.instruction.line,
                    text=op.instruction.text,
                )
        self.content = content
        self.base = g.wide(resource) & BASE_MASK
        self.stride = (g.s[resource + 1] >> U32(16) & U32(0x3FFF)).astype(I64)
        self.records = g.s[resource + 2].astype(I64)
        if structured:
            # With an index, records of the stride are counted, not bytes.
            self.records = self.records * np.maximum(self.stride, 1)
        self.least = int(self.records.min())
        first = int(self.base.flat[0])
        self.only = first if (self.base == np.uint64(first)).all() else None


@dataclass
class Address:
    """Decoded address of a buffer instruction."""

    resource: int
    offset_row: int | None
    index_row: int | None
    soffset: Getter
    immediate: int
    ids: set[int]
    known: Descriptors | None = None

    def descriptors(self, g: Group, op: Operation) -> Descriptors:
        """The waves' resource descriptors, decoded; they rarely change from one execution to the next."""
        w, h = g.rect.slices
        content = g.machine.files.scalar[self.resource : self.resource + 4, w, h].tobytes()
        known = self.known
        if known is None or known.content != content or known.base.shape != g.shape:
            known = self.known = Descriptors(g, op, self.resource, content, structured=self.index_row is not None)
        return known

    def offsets(self, g: Group, descriptors: Descriptors) -> np.ndarray:
        """Byte offsets per lane (int64)."""
        uniform = np.asarray(self.soffset(g)).astype(I64) + self.immediate
        if uniform.ndim:
            uniform = uniform[..., None]
        if self.offset_row is not None:
            offsets = g.v[self.offset_row] + uniform
        else:
            offsets = np.zeros((*g.shape, LANES), I64) + uniform
        if self.index_row is not None:
            offsets = offsets + g.v[self.index_row] * descriptors.stride[..., None]
        return offsets


def decode_address(ins: Instruction, env: Environment, position: int) -> Address:
    """Address operands from ``position``: vaddr (or off), resource, soffset."""
    vaddr: Operand = ins.operands[position]
    resource = want_register(ins.operands[position + 1], "s", 4)
    soffset = ins.operands[position + 2]
    offen, idxen = ins.flag("offen"), ins.flag("idxen")
    offset_row = index_row = None
    if offen or idxen:
        row = env.row(want_register(vaddr, "v", 2 if offen and idxen else 1))
        index_row = row if idxen else None
        offset_row = (row + 1 if idxen else row) if offen else None
    elif not (isinstance(vaddr, Name) and vaddr.text == "off"):
        raise Unimplemented("an address register without offen or idxen")
    ids = env.ids(resource, soffset)
    if offen or idxen:
        ids |= env.ids(vaddr)
    return Address(resource.index, offset_row, index_row, scalar_source(soffset), ins.integer("offset"), ids)


def resolve(
    op: Operation, g: Group, address: Address, count: int, unit: int, *, write: bool
) -> tuple[list[Access], bool]:
    """Find where an access goes.

    Returns
    -------
    accesses : list of Access
        One for all elements, or one per element where some lie out of range.
    whole : bool
        Which of the two.
    """
    descriptors = address.descriptors(g, op)
    offsets, records = address.offsets(g, descriptors), descriptors.records
    memory, mask = g.machine.memory, g.exec
    size = unit * count
    if g.full:
        highest, lowest = int(np.maximum.reduce(offsets, axis=None)), int(np.minimum.reduce(offsets, axis=None))
        inside = highest + size <= descriptors.least and lowest >= 0
        if inside and descriptors.only is not None:
            # One buffer for all lanes: two addresses decide.
            region = memory.find(descriptors.only + lowest, highest - lowest + size)
            if region is not None and (region.writable or not write):
                return [[(region, offsets + (descriptors.only - region.address), mask)]], True
    else:
        inside = not bool(((offsets + size > records[..., None]) & mask).any())
    addresses = offsets.view(U64) + descriptors.base[..., None]
    if inside:
        return [memory.resolve(op, g, addresses, mask, size, write=write)], True
    accesses = []
    for element in range(count):
        live = mask & (offsets + unit * (element + 1) <= records[..., None]) & (offsets >= 0)
        place = addresses + U64(unit * element)
        accesses.append(memory.resolve(op, g, place, live, unit, write=write) if live.any() else [])
    return accesses, False


def resolve_few(op: Operation, g: Group, address: Address, count: int, unit: int) -> tuple[list[Access], bool] | None:
    """Find where a load by all lanes of a few waves goes, and count it; None: the long way.

    A kernel's offset registers keep what they hold while the scalar offset moves on, so that what follows from their
    content is kept.
    """
    if not g.full or g.waves > FEW_WAVES or address.offset_row is None or address.index_row is not None:
        return None
    descriptors = address.descriptors(g, op)
    if descriptors.only is None:
        return None
    moving = np.asarray(address.soffset(g))
    first = int(moving.flat[0])
    if moving.size > 1 and np.count_nonzero(moving == moving.flat[0]) != moving.size:
        return None
    base = g.v[address.offset_row]
    lane0 = base.flat[0]
    key = (base - lane0).tobytes()
    spread = g.patterns.get(key)
    if spread is None:
        spread = g.patterns[key] = Spread(base)
    origin = int(lane0)
    if not (origin + spread.lowest >= 0 and origin + spread.highest < 1 << 32):
        # Differences that wrapped around.
        return None
    shift, size = origin + first + address.immediate, unit * count
    lowest, highest = spread.lowest + shift, spread.highest + shift
    if lowest < 0 or highest + size > descriptors.least:
        return None
    region = g.machine.memory.find(descriptors.only + lowest, highest - lowest + size)
    if region is None:
        return None
    start = shift + descriptors.only - region.address
    g.machine.hazards.spread_read(region, spread, start, size)
    return [[(region, spread.offsets + start, g.exec)]], True


def gather(accesses: list[Access], whole: bool, count: int, shape: tuple[int, ...]) -> list[Any]:
    """Dwords of every element; 0 where out of range."""
    if whole:
        return load_words(accesses[0], count, shape)
    values = []
    for access in accesses:
        value = np.zeros(shape, U32)
        for region, offsets, mask in access:
            np.copyto(value, region.load_words(offsets, 1)[0], where=mask)
        values.append(value)
    return values


def note(g: Group, op: Operation, accesses: list[Access], unit: int, count: int, whole: bool, *, write: bool) -> None:
    """Count and check the global side of an access."""
    size = unit * count if whole else unit
    for access in accesses:
        if write:
            g.machine.hazards.global_write(g, op, access, size)
        else:
            g.machine.hazards.global_read(g, op, access, size)


@instruction(
    *(f"buffer_load_dword{suffix}" for suffix in WORDS),
    family=FAMILY,
    section="BUFFER_LOAD_DWORD",
    modifiers=MODIFIERS,
)
def buffer_load_dword(ins: Instruction, env: Environment) -> Operation:
    """Load consecutive dwords to registers, or with ``lds`` to LDS."""
    count = WORDS[ins.mnemonic.removeprefix("buffer_load_dword")]
    if ins.flag("lds"):
        return _buffer_to_lds(ins, env, count)
    target = want_register(ins.operands[0], "va", count)
    row = env.row(target)
    address = decode_address(ins, env, 1)

    def effect(g: Group, payload: Any) -> None:
        accesses, whole, mask = payload
        write_words(g, row, gather(accesses, whole, count, mask.shape), mask)

    def run(g: Group) -> None:
        accesses, whole = load_places(op, g, address, count)
        g.machine.issue(g, Pending(op, effect, (accesses, whole, g.exec)), lgkm=False)

    op = Operation(ins, "vmem", run, reads=address.ids, writes=env.ids(target), sinks=address.ids)
    return op


def load_places(op: Operation, g: Group, address: Address, count: int) -> tuple[list[Access], bool]:
    """Where a load of dwords goes, counted and checked."""
    few = resolve_few(op, g, address, count, 4)
    if few is not None:
        return few
    accesses, whole = resolve(op, g, address, count, 4, write=False)
    note(g, op, accesses, 4, count, whole, write=False)
    return accesses, whole


@instruction(
    *(f"buffer_load_{name}" for name in NARROW_LOADS),
    family=FAMILY,
    section="BUFFER_LOAD_UBYTE and others",
    modifiers=[modifier for modifier in MODIFIERS if modifier != "lds"],
)
def buffer_load_narrow(ins: Instruction, env: Environment) -> Operation:
    """Load a byte or a short."""
    size, signed, half = NARROW_LOADS[ins.mnemonic.removeprefix("buffer_load_")]
    target = want_register(ins.operands[0], "va", 1)
    row = env.row(target)
    address = decode_address(ins, env, 1)

    def effect(g: Group, payload: Any) -> None:
        accesses, whole, mask = payload
        if whole:
            value = load_small(accesses[0], size, mask.shape)
        else:
            value = np.zeros(mask.shape, U32)
            for region, offsets, live in accesses[0]:
                np.copyto(value, region.load_small(offsets, size), where=live)
        put_narrow(g, row, extend(value, size, signed), half, mask)

    def run(g: Group) -> None:
        accesses, whole = resolve(op, g, address, 1, size, write=False)
        note(g, op, accesses, size, 1, whole, write=False)
        g.machine.issue(g, Pending(op, effect, (accesses, whole, g.exec)), lgkm=False)

    reads = address.ids | (env.ids(target) if half else set())
    op = Operation(ins, "vmem", run, reads=reads, writes=env.ids(target), sinks=address.ids)
    return op


@instruction(
    *(f"buffer_store_dword{suffix}" for suffix in WORDS),
    family=FAMILY,
    section="BUFFER_STORE_DWORD",
    modifiers=[modifier for modifier in MODIFIERS if modifier != "lds"],
)
def buffer_store_dword(ins: Instruction, env: Environment) -> Operation:
    """Store consecutive dwords; the data is read at issue."""
    count = WORDS[ins.mnemonic.removeprefix("buffer_store_dword")]
    data = want_register(ins.operands[0], "va", count)
    row = env.row(data)
    address = decode_address(ins, env, 1)

    def effect(g: Group, payload: Any) -> None:
        accesses, whole, values = payload
        if whole:
            store_words(accesses[0], values)
        else:
            for access, value in zip(accesses, values, strict=True):
                store_words(access, [value])

    def run(g: Group) -> None:
        accesses, whole = resolve(op, g, address, count, 4, write=True)
        note(g, op, accesses, 4, count, whole, write=True)
        values = [g.v[row + k].copy() for k in range(count)]
        g.machine.issue(g, Pending(op, effect, (accesses, whole, values)), lgkm=False)

    reads = address.ids | env.ids(data)
    op = Operation(ins, "vmem", run, reads=reads, sinks=reads)
    return op


@instruction(
    *(f"buffer_store_{name}" for name in NARROW_STORES),
    family=FAMILY,
    section="BUFFER_STORE_BYTE and others",
    modifiers=[modifier for modifier in MODIFIERS if modifier != "lds"],
)
def buffer_store_narrow(ins: Instruction, env: Environment) -> Operation:
    """Store a byte or a short."""
    size, shift = NARROW_STORES[ins.mnemonic.removeprefix("buffer_store_")]
    data = want_register(ins.operands[0], "va", 1)
    row = env.row(data)
    address = decode_address(ins, env, 1)

    def effect(g: Group, payload: Any) -> None:
        accesses, value = payload
        for region, offsets, mask in accesses[0]:
            region.store_small(offsets, value, mask, size)

    def run(g: Group) -> None:
        accesses, whole = resolve(op, g, address, 1, size, write=True)
        note(g, op, accesses, size, 1, whole, write=True)
        g.machine.issue(g, Pending(op, effect, (accesses, g.v[row] >> U32(shift))), lgkm=False)

    reads = address.ids | env.ids(data)
    op = Operation(ins, "vmem", run, reads=reads, sinks=reads)
    return op


# -- straight to LDS ------------------------------------------------------------------------------------------


def _lds_target(m0: np.ndarray, immediate: int, count: int) -> np.ndarray:
    """LDS address of each lane: M0 + inst_offset + the lane's place; the lane is the physical one."""
    base = m0 + U32(immediate & 0xFFFFFFFF)
    return base[..., None] + LANE * U32(LDS_LANE_STRIDE[count])


def _to_lds(ins: Instruction, reads: set[int], locate: Any, immediate: int, count: int, m0_mask: Any) -> Operation:
    if count not in LDS_LANE_STRIDE:
        raise Unimplemented("a load to LDS has 1, 3 or 4 dwords")

    def effect(g: Group, payload: Any) -> None:
        accesses, whole, addresses, places, mask = payload
        lds = g.machine.lds
        if places is not None and whole and len(accesses[0]) == 1:
            region, offsets, _ = accesses[0][0]
            if region.quads is not None and not int(np.bitwise_or.reduce(offsets, axis=None)) & 15:
                lds.quads[places] = region.quads.take(offsets >> 4)
                return
        lds.write(g, addresses, gather(accesses, whole, count, mask.shape), mask)

    def run(g: Group) -> None:
        accesses, whole = locate(g)
        checks = g.machine.hazards.lds

        def target(base: np.ndarray) -> np.ndarray:
            return _lds_target(base, immediate, count)

        base = g.s[M0] & m0_mask
        pattern = checks.find(g, op, base, target, immediate, 4 * count, 4)
        aims = target(base) if pattern is None else pattern.addresses
        addresses, events = checks.access(g, op, aims, 4 * count, 4, write=True, dma=True, pattern=pattern)
        places = None if pattern is None or count != 4 else g.machine.lds.places(g, pattern, count)
        payload = (accesses, whole, addresses, places, g.exec)
        g.machine.issue(g, Pending(op, effect, payload, events=events), lgkm=False)

    ids = reads | {SCALAR_ID + M0}
    op = Operation(ins, "vmem", run, reads=ids, sinks=ids)
    return op


def _buffer_to_lds(ins: Instruction, env: Environment, count: int) -> Operation:
    address = decode_address(ins, env, 0)

    def locate(g: Group) -> tuple[list[Access], bool]:
        return load_places(op, g, address, count)

    op = _to_lds(ins, address.ids, locate, address.immediate, count, M0_MASK)
    return op


@instruction(
    *(f"global_load_lds_dword{suffix}" for suffix in ("", "x3", "x4")),
    family=FAMILY,
    section="GLOBAL_LOAD_LDS_DWORD",
    modifiers=["offset", *CACHE_MODIFIERS],
)
def global_load_lds(ins: Instruction, env: Environment) -> Operation:
    """Load from global memory to LDS; M0 counts whole dwords here."""
    count = WORDS[ins.mnemonic.removeprefix("global_load_lds_dword")]
    address = global_address(ins, env, 0)

    def locate(g: Group) -> tuple[list[Access], bool]:
        access = g.machine.memory.resolve(op, g, address(g), g.exec, 4 * count, write=False)
        g.machine.hazards.global_read(g, op, access, 4 * count)
        return [access], True

    op = _to_lds(ins, env.ids(*ins.operands), locate, ins.integer("offset"), count, M0_MASK & U32(0x3FFFC))
    return op
