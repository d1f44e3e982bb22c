"""Small assembly programs for the emulator's tests: a body of instructions becomes ISA text with metadata, and runs."""

import struct
from dataclasses import dataclass, field

import numpy as np

from aiter_paged_fp8.emulator import Launch, Machine, Memory, Options, Program, load

TEMPLATE = """\t.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"
kernel:
{body}
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_float_denorm_mode_32 3
\t\t.amdhsa_dx10_clamp 1
\t\t.amdhsa_ieee_mode 1
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
{arguments}
    .group_segment_fixed_size: {lds}
    .kernarg_segment_size: {size}
    .max_flat_workgroup_size: 1024
    .name:           kernel
    .private_segment_fixed_size: 0
    .wavefront_size: 64
...
\t.end_amdgpu_metadata
"""
ARGUMENT = "      - .offset:         {offset}\n        .size:           8\n        .value_kind:     global_buffer"


def isa_text(body, arguments, lds=0):
    """ISA text of a kernel whose arguments are pointers; s[0:1] points to them, s2 is the workgroup, v0 the thread."""
    lines = "\n".join(ARGUMENT.format(offset=8 * k) for k in range(arguments))
    return TEMPLATE.format(body=body, arguments=lines, lds=lds, size=8 * arguments)


@dataclass
class Kernel:
    """A body with what it is launched on."""

    body: str
    lds: int = 0
    block: int = 64
    grid: int = 1
    extra: dict = field(default_factory=dict)

    def run(self, *arrays, read_only=(), **options):
        """Run on numpy arrays; return the launch's result."""
        program = load(Program.parse(isa_text(self.body, len(arrays), self.lds)))
        memory = Memory()
        for position, array in enumerate(arrays):
            memory.register_array(f"arg{position}", array, writable=position not in read_only)
        kernarg = struct.pack(f"<{len(arrays)}Q", *(array.ctypes.data for array in arrays))
        launch = Launch(program, (self.grid, 1, 1), (self.block, 1, 1), kernarg)
        return Machine(launch, memory, Options(**options)).run()

    def mutated(self, old, new):
        """The same kernel with one piece of text replaced; the piece must be there."""
        assert old in self.body
        return Kernel(self.body.replace(old, new, 1), self.lds, self.block, self.grid)

    def line_of(self, piece):
        """1-based line of a piece of the body in the ISA text."""
        text = isa_text(self.body, 1, self.lds)
        return text[: text.index(piece)].count("\n") + 1


def words(count, start=0):
    """Distinct values that are no accidents."""
    return (np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(start)).astype(np.uint32)
