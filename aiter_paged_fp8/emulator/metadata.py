"""The kernel's descriptor: `.amdhsa_kernel` directives and the `.amdgpu_metadata` YAML at the end of the ISA text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .errors import ProgramError


@dataclass(frozen=True)
class Argument:
    """One entry of the kernarg segment."""

    offset: int
    size: int
    kind: str
    name: str = ""
    access: str = ""

    @property
    def hidden(self) -> bool:
        """Whether the runtime, not the caller, supplies it."""
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class Metadata:
    """Resources and layout of one kernel, as the compiler states them."""

    name: str
    target: str = ""
    arguments: tuple[Argument, ...] = ()
    kernarg_size: int = 0
    lds_size: int = 0
    scratch_size: int = 0
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    max_workgroup_size: int = 0
    wavefront_size: int = 64
    directives: dict[str, int] = field(default_factory=dict)


def _scalar(text: str) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text, 16)
    return text.strip("'\"")


def parse_yaml(text: str) -> Any:
    """Read the block-style YAML subset that the compiler writes: nested maps and lists of scalars."""
    lines = [(len(raw) - len(raw.lstrip(" ")), raw.strip()) for raw in text.splitlines() if raw.strip()]
    lines = [item for item in lines if item[1] not in ("---", "...")]

    def block(position: int, indent: int) -> tuple[Any, int]:
        if position < len(lines) and lines[position][1].startswith("- "):
            items = []
            while position < len(lines) and lines[position][0] == indent and lines[position][1].startswith("- "):
                content = lines[position][1][2:].lstrip()
                inner = indent + len(lines[position][1]) - len(content)
                if re.match(r"^[.\w]+:(\s|$)", content):
                    lines[position] = (inner, content)
                    value, position = block(position, inner)
                else:
                    value, position = _scalar(content), position + 1
                items.append(value)
            return items, position
        mapping: dict[str, Any] = {}
        while position < len(lines) and lines[position][0] == indent and not lines[position][1].startswith("- "):
            key, _, value_text = lines[position][1].partition(":")
            if value_text.strip():
                mapping[key] = _scalar(value_text)
                position += 1
            elif position + 1 < len(lines) and (
                lines[position + 1][0] > indent
                or (lines[position + 1][0] == indent and lines[position + 1][1].startswith("- "))
            ):
                mapping[key], position = block(position + 1, lines[position + 1][0])
            else:
                mapping[key], position = None, position + 1
        return mapping, position

    return block(0, lines[0][0])[0] if lines else {}


def parse_metadata(text: str) -> dict[str, Metadata]:
    """Read the metadata of every kernel of an ISA text, by name."""
    match = re.search(r"\.amdgpu_metadata\s*\n(.*?)\.end_amdgpu_metadata", text, re.S)
    if match is None:
        raise ProgramError("the ISA text has no .amdgpu_metadata section")
    root = parse_yaml(match.group(1))
    target = re.search(r'\.amdgcn_target\s+"([^"]+)"', text)
    kernels = {}
    for entry in root.get("amdhsa.kernels") or ():
        name = entry[".name"]
        arguments = tuple(
            Argument(
                argument[".offset"],
                argument[".size"],
                argument[".value_kind"],
                str(argument.get(".name", "")),
                str(argument.get(".access") or argument.get(".actual_access") or ""),
            )
            for argument in entry.get(".args") or ()
        )
        directives: dict[str, int] = {}
        body = re.search(rf"\.amdhsa_kernel {re.escape(name)}\s*\n(.*?)\.end_amdhsa_kernel", text, re.S)
        for key, value in re.findall(r"\.amdhsa_(\w+)\s+(-?\w+)\s*$", body.group(1), re.M) if body else ():
            if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", value):
                directives[key] = int(value, 0)
        kernels[name] = Metadata(
            name=name,
            target=target.group(1) if target else str(root.get("amdhsa.target", "")),
            arguments=arguments,
            kernarg_size=entry.get(".kernarg_segment_size", 0),
            lds_size=entry.get(".group_segment_fixed_size", 0),
            scratch_size=entry.get(".private_segment_fixed_size", 0),
            vgprs=entry.get(".vgpr_count", 0),
            agprs=entry.get(".agpr_count", 0),
            sgprs=entry.get(".sgpr_count", 0),
            vgpr_spills=entry.get(".vgpr_spill_count", 0),
            sgpr_spills=entry.get(".sgpr_spill_count", 0),
            max_workgroup_size=entry.get(".max_flat_workgroup_size", 0),
            wavefront_size=entry.get(".wavefront_size", 64),
            directives=directives,
        )
    return kernels
