"""A program: the instructions of one kernel of an ISA text, with its labels and metadata."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from .errors import ProgramError
from .metadata import Metadata, parse_metadata
from .syntax import Instruction, Name, Register, parse_instruction

_LABEL = re.compile(r"^([.\w$@]+):")
_BRANCHES = ("s_branch", "s_cbranch_")


@dataclass
class Program:
    """One kernel, parsed.

    Attributes
    ----------
    name : str
        Kernel symbol. Not unique across builds: key on ``digest``.
    digest : str
        SHA-256 of the ISA text and the name.
    instructions : list of Instruction
    labels : dict
        Label to index of the instruction that follows it.
    vgprs, agprs : int
        Registers that the text uses of either file.
    """

    name: str
    digest: str
    text: str
    instructions: list[Instruction]
    labels: dict[str, int]
    metadata: Metadata
    vgprs: int = 0
    agprs: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def lds_size(self) -> int:
        """Static LDS bytes of one workgroup."""
        return self.metadata.lds_size

    def describe(self, index: int) -> str:
        """``line N: text`` of an instruction."""
        instruction = self.instructions[index]
        return f"line {instruction.line}: {instruction.text}"

    @classmethod
    def parse(cls, text: str, kernel: str | None = None) -> Program:
        """Parse one kernel of an ISA text.

        Parameters
        ----------
        text : str
            What FlyDSL's compiler emits: functions, `.amdhsa_kernel` directives, `.amdgpu_metadata`.
        kernel : str, optional
            Its symbol; may be left out where the text holds one kernel.
        """
        kernels = parse_metadata(text)
        if kernel is None:
            if len(kernels) != 1:
                raise ProgramError(f"the text holds the kernels {sorted(kernels)}: say which one")
            kernel = next(iter(kernels))
        if kernel not in kernels:
            raise ProgramError(f"no kernel {kernel!r} in the text; it holds {sorted(kernels)}")
        metadata = kernels[kernel]
        if metadata.wavefront_size != 64:
            raise ProgramError(f"kernel {kernel}: wavefront size {metadata.wavefront_size}, only 64 exists on gfx950")
        if metadata.target and "gfx950" not in metadata.target:
            raise ProgramError(f"kernel {kernel} was compiled for {metadata.target}, not for gfx950")
        instructions, labels = _parse_body(text, kernel)
        program = cls(
            name=kernel,
            digest=hashlib.sha256(f"{kernel}\n{text}".encode()).hexdigest(),
            text=text,
            instructions=instructions,
            labels=labels,
            metadata=metadata,
        )
        for instruction in instructions:
            if instruction.mnemonic.startswith(_BRANCHES):
                target = instruction.operands[0]
                place = _find_label(target.text, instruction.index, labels) if isinstance(target, Name) else None
                if place is None:
                    raise ProgramError(f"line {instruction.line}: unknown label in {instruction.text!r}")
                instruction.target = place
            for operand in instruction.operands:
                if isinstance(operand, Register):
                    end = operand.index + operand.count
                    if operand.file == "v":
                        program.vgprs = max(program.vgprs, end)
                    elif operand.file == "a":
                        program.agprs = max(program.agprs, end)
        return program


def _find_label(text: str, index: int, labels: dict[str, int]) -> int | None:
    """Index that a branch goes to; ``1f`` and ``1b`` are the next and the last local label 1."""
    local = re.fullmatch(r"(\d+)([fb])", text)
    if local is None:
        return labels.get(text)
    places = [place for name, place in labels.items() if name.startswith(f"{local.group(1)}@")]
    if local.group(2) == "f":
        return min((place for place in places if place > index), default=None)
    return max((place for place in places if place <= index), default=None)


def _parse_body(text: str, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for number, raw in enumerate(text.splitlines(), start=1):
        line = re.split(r";|//", raw, maxsplit=1)[0].strip()
        match = _LABEL.match(line)
        while match:
            label = match.group(1)
            if label == kernel:
                inside = True
            elif inside and label.startswith(".Lfunc_end"):
                return instructions, labels
            if inside:
                # Local labels of inline assembly are numbers that may stand several times.
                name = f"{label}@{len(instructions)}" if label.isdigit() else label
                labels[name] = len(instructions)
            line = line[match.end() :].strip()
            match = _LABEL.match(line)
        if inside and line and not line.startswith("."):
            instructions.append(parse_instruction(line, index=len(instructions), line=number))
    if not inside:
        raise ProgramError(f"no label {kernel}: in the text")
    return instructions, labels
