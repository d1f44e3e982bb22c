"""AMDGPU assembly text, one line at a time: mnemonic, operands, modifiers.

Purely lexical: what an operand means to an instruction is decided by the instruction's decoder.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import ProgramError

# Scalar registers that have names; the numbers are their operand encodings (manual, "Scalar operands").
VCC_LO, VCC_HI, M0, EXEC_LO, EXEC_HI = 106, 107, 124, 126, 127
SPECIAL_SCALARS = {
    "vcc": (VCC_LO, 2),
    "vcc_lo": (VCC_LO, 1),
    "vcc_hi": (VCC_HI, 1),
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
    "m0": (M0, 1),
    "exec": (EXEC_LO, 2),
    "exec_lo": (EXEC_LO, 1),
    "exec_hi": (EXEC_HI, 1),
}
TTMP_BASE = 108

# Names that stand as an operand but are no register.
KEYWORDS = frozenset(
    {"off", "null", "scc", "src_scc", "src_vccz", "src_execz", "src_shared_base", "src_shared_limit"}
    | {"src_private_base", "src_private_limit", "lds_direct", "src_lds_direct"}
)

_REGISTER = re.compile(r"^([vsa]|ttmp)(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_INTEGER = re.compile(r"^-?(?:0x[0-9a-fA-F]+|\d+)$")
_FLOAT = re.compile(r"^-?\d+\.\d*(?:[eE][-+]?\d+)?$")


@dataclass(frozen=True)
class Register:
    """``count`` registers from ``index``; file "v", "a" or "s"; source modifiers as written."""

    file: str
    index: int
    count: int = 1
    neg: bool = False
    abs: bool = False
    sext: bool = False


@dataclass(frozen=True)
class Constant:
    """An integer as written, or the float of a floating-point inline constant."""

    value: int | float
    neg: bool = False
    abs: bool = False

    def bits32(self) -> int:
        """Return the 32-bit pattern that the instruction sees, source modifiers not applied."""
        if isinstance(self.value, float):
            return int(struct.unpack("<I", struct.pack("<f", self.value))[0])
        return self.value & 0xFFFFFFFF

    def bits16(self) -> int:
        """Return the pattern for an operand of 16 bits: a float constant becomes a half."""
        if isinstance(self.value, float):
            return int(struct.unpack("<H", struct.pack("<e", self.value))[0])
        return self.value & 0xFFFF

    def bits64(self, *, signed: bool = True, floating: bool = False) -> int:
        """Return the 64-bit pattern: float constants widen to double, a 32-bit literal of a double is its high half."""
        if isinstance(self.value, float):
            return int(struct.unpack("<Q", struct.pack("<d", self.value))[0])
        if floating and not -16 <= self.value <= 64:
            return (self.value & 0xFFFFFFFF) << 32
        if signed and 0x80000000 <= self.value <= 0xFFFFFFFF:
            return (self.value - (1 << 32)) & 0xFFFFFFFFFFFFFFFF
        return self.value & 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Name:
    """A keyword, label or expression, kept as text."""

    text: str


Operand = Register | Constant | Name


@dataclass
class Instruction:
    """One line of the program.

    Attributes
    ----------
    index : int
        Position among the instructions of the kernel: what the program counter counts.
    line : int
        1-based line of the ISA text.
    mnemonic : str
        Without an encoding suffix (``_e32``, ``_e64``, ``_dpp``, ``_sdwa``).
    encoding : str
        That suffix, or "".
    """

    index: int
    line: int
    text: str
    mnemonic: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str | bool]
    raw: str = ""
    target: int | None = None
    annotations: dict[str, object] = field(default_factory=dict)

    def integer(self, name: str, default: int = 0) -> int:
        """Value of an integer modifier."""
        value = self.modifiers.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return int(value)
        return int(value, 0)

    def bits(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Value of a list modifier such as ``op_sel:[0,1]``."""
        value = self.modifiers.get(name)
        if value is None:
            return default
        assert isinstance(value, str)
        return tuple(int(part, 0) for part in value.strip("[]").split(","))

    def flag(self, name: str) -> bool:
        """Whether a modifier without value is present."""
        return bool(self.modifiers.get(name, False))


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split at ``separator`` wherever no bracket is open."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def parse_operand(text: str) -> Operand:
    """Parse one operand."""
    neg = absolute = sext = False
    while True:
        if text.startswith("-") and not (_INTEGER.match(text) or _FLOAT.match(text)):
            neg, text = not neg, text[1:]
        elif text.startswith("|") and text.endswith("|"):
            absolute, text = True, text[1:-1]
        elif text.startswith("neg(") and text.endswith(")"):
            neg, text = True, text[4:-1]
        elif text.startswith("abs(") and text.endswith(")"):
            absolute, text = True, text[4:-1]
        elif text.startswith("sext(") and text.endswith(")"):
            sext, text = True, text[5:-1]
        else:
            break
    match = _REGISTER.match(text)
    if match:
        file, single, first, last = match.groups()
        index = int(single if single is not None else first)
        count = 1 if last is None else int(last) - index + 1
        if file == "ttmp":
            file, index = "s", index + TTMP_BASE
        return Register(file, index, count, neg, absolute, sext)
    if text in SPECIAL_SCALARS:
        index, count = SPECIAL_SCALARS[text]
        return Register("s", index, count, neg, absolute, sext)
    if _INTEGER.match(text):
        return Constant(int(text, 0), neg, absolute)
    if _FLOAT.match(text):
        return Constant(float(text), neg, absolute)
    return Name(text)


ENCODINGS = ("_e32", "_e64", "_sdwa", "_dpp", "_e64_dpp")


def parse_instruction(text: str, *, index: int, line: int) -> Instruction:
    """Parse one instruction line, comments already removed."""
    head, _, rest = text.strip().partition(" ")
    head = head.strip()
    rest = rest.strip()
    mnemonic, encoding = head, ""
    for suffix in ("_e64_dpp", "_e32", "_e64", "_sdwa", "_dpp"):
        if head.endswith(suffix):
            mnemonic, encoding = head[: -len(suffix)], suffix[1:]
            break
    operands: list[Operand] = []
    modifiers: dict[str, str | bool] = {}
    if mnemonic in NO_OPERANDS:
        modifiers.update(dict.fromkeys(rest.split(), True))
    elif mnemonic not in RAW_OPERANDS:
        pieces = split_outside_brackets(rest, ",")
        if pieces:
            last = split_outside_brackets(pieces[-1], " ")
            pieces[-1] = last[0]
            for word in last[1:]:
                name, colon, value = word.partition(":")
                modifiers[name] = value if colon else True
        for piece in pieces:
            if not piece or (" " in piece and "(" not in piece):
                raise ProgramError(f"line {line}: can't read the operand {piece!r} of {text!r}")
            operands.append(parse_operand(piece))
    return Instruction(index, line, text.strip(), mnemonic, encoding, tuple(operands), modifiers, raw=rest)


# Mnemonics that have modifiers alone.
NO_OPERANDS = frozenset({"buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol"})
# Mnemonics whose operand text is an expression of its own.
RAW_OPERANDS = frozenset({"s_waitcnt", "s_waitcnt_depctr", "s_sendmsg", "s_sendmsghalt"})
