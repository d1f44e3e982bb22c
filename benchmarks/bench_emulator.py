"""Speed of the emulator: wave-instructions per second on a kernel shaped like an attention loop, and a small launch.

The kernel is written here: each round stages 16 bytes per lane to LDS by DMA, passes a barrier, reads four 128-bit
fragments (two that a workgroup's waves share, as they share K, and two of their own, like Q), multiplies them on the
matrix unit (about 3 % of its instructions), and runs the softmax mix of max, exp,
fma, packed and conversion instructions on the result. Process time counts, so that neighbours on the machine do not.

    python -m benchmarks.bench_emulator
"""

from __future__ import annotations

import struct
import time

import numpy as np

from aiter_paged_fp8.emulator import Checks, Launch, LoadedProgram, Machine, Memory, Options, Program, Result, load

ROUNDS = 24
WAVES_PER_WORKGROUP = 8
HEAD = """\t.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"
loop_kernel:
	s_load_dwordx4 s[12:15], s[0:1], 0x0
	v_lshrrev_b32_e32 v1, 6, v0
	v_and_b32_e32 v2, 63, v0
	v_readfirstlane_b32 s16, v1
	v_lshlrev_b32_e32 v3, 4, v0
	v_lshlrev_b32_e32 v4, 4, v2
	s_lshl_b32 s17, s16, 10
	s_waitcnt lgkmcnt(0)
	s_mov_b32 s4, s12
	s_and_b32 s5, s13, 0xffff
	s_mov_b32 s6, 0x{extent:x}
	s_mov_b32 s7, 0x20000
	s_mov_b32 s20, 0
	v_mov_b32_e32 v5, 0
	v_mov_b32_e32 v6, 0x3e000000
	v_mov_b32_e32 v7, 0
	v_mov_b32_e32 v8, 0x3f000000
	v_mov_b32_e32 v9, 0x3f000000
	v_mov_b32_e32 v10, 0
	v_mov_b32_e32 v11, 0
"""
STAGE = """.LBB0_1:
	s_and_b32 s21, s20, 1
	s_lshl_b32 s21, s21, 13
	s_add_i32 s22, s21, s17
	s_mov_b32 m0, s22
	s_nop 0
	buffer_load_dwordx4 v3, s[4:7], 0 offen lds
	v_add_u32_e32 v3, 0x2000, v3
	v_add_u32_e32 v12, s21, v4
	v_add_u32_e32 v14, s22, v4
	s_waitcnt vmcnt(0)
	s_barrier
	ds_read_b128 v[16:19], v12
	ds_read_b128 v[20:23], v12 offset:1024
	ds_read_b128 v[24:27], v14
	ds_read_b128 v[28:31], v12 offset:2048
	s_waitcnt lgkmcnt(0)
	s_barrier
"""
PRODUCT = """	v_mfma_f32_32x32x64_f8f6f4 v[32:47], v[16:23], v[24:31], 0
	v_mfma_f32_32x32x64_f8f6f4 v[32:47], v[24:31], v[16:23], v[32:47]
	v_mfma_f32_32x32x64_f8f6f4 v[32:47], v[16:23], v[24:31], v[32:47]
	s_nop 15
	s_nop 3
"""
EXTREME = "	v_max3_f32 v13, v13, v{a}, v{b}\n"
SCALE = "	v_pk_mul_f32 v[{a}:{b}], v[{a}:{b}], v[8:9]\n"
FUSE = "	v_fma_f32 v{a}, v{a}, v6, -v13\n"
EXPONENTIAL = "	v_exp_f32_e32 v{a}, v{a}\n"
SUM = "	v_add_f32_e32 v7, v7, v{a}\n"
PACK = "	v_cvt_pk_fp8_f32 v{c}, v{a}, v{b}{half}\n"
TAIL = """	s_add_i32 s20, s20, 1
	s_cmp_lt_i32 s20, {rounds}
	s_cbranch_scc1 .LBB0_1
	v_lshlrev_b32_e32 v3, 2, v0
	s_lshl_b32 s23, s2, 11
	v_add_u32_e32 v3, s23, v3
	v_add_u32_e32 v7, v7, v48
	global_store_dword v3, v7, s[14:15]
	s_endpgm
.Lfunc_end0:
	.amdhsa_kernel loop_kernel
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
      - .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           8
        .value_kind:     global_buffer
    .group_segment_fixed_size: 16384
    .kernarg_segment_size: 16
    .name:           loop_kernel
    .wavefront_size: 64
...
	.end_amdgpu_metadata
"""


def kernel() -> LoadedProgram:
    """The benchmark's kernel, decoded."""
    scores = range(32, 48)
    body = [HEAD.format(extent=0x2000 * (ROUNDS + 1)), "\tv_mov_b32_e32 v13, 0xff800000\n"]
    body += [f"\tv_mov_b32_e32 v{row}, 0\n" for row in range(48, 52)]
    body += [STAGE, PRODUCT]
    body += [EXTREME.format(a=row, b=row + 1) for row in scores[::2]]
    body += [SCALE.format(a=row, b=row + 1) for row in scores[::2]]
    body += [FUSE.format(a=row) for row in scores]
    body += [EXPONENTIAL.format(a=row) for row in scores] + ["\ts_nop 0\n"]
    body += [SUM.format(a=row) for row in scores[::2]]
    for position, row in enumerate(scores[::2]):
        half = " op_sel:[0,0,1]" if position % 2 else ""
        body.append(PACK.format(c=48 + position // 2, a=row, b=row + 1, half=half))
    body.append(TAIL.format(rounds=ROUNDS))
    return load(Program.parse("".join(body)))


def measure(loaded: LoadedProgram, workgroups: int, options: Options) -> tuple[Result, float]:
    """Run once; return the result and process seconds."""
    source = np.random.default_rng(0).integers(0, 0x40, 0x2000 * (ROUNDS + 1), dtype=np.uint8)
    target = np.zeros(workgroups * WAVES_PER_WORKGROUP * 64, np.float32)
    memory = Memory()
    memory.register_array("source", source, writable=False)
    memory.register_array("target", target)
    kernarg = struct.pack("<QQ", source.ctypes.data, target.ctypes.data)
    launch = Launch(loaded, (workgroups, 1, 1), (WAVES_PER_WORKGROUP * 64, 1, 1), kernarg)
    start = time.process_time()
    result = Machine(launch, memory, options).run()
    return result, time.process_time() - start


def main() -> None:
    """Print the figures."""
    loaded = kernel()
    measure(loaded, 1, Options())
    cases = {
        "latest, all checks": Options(),
        "earliest, all checks": Options(memory="earliest"),
        "latest, no checks": Options(checks=Checks.none()),
        "earliest, no checks": Options(memory="earliest", checks=Checks.none()),
        "latest, skewed, all checks": Options(schedule="skewed"),
    }
    for name, options in cases.items():
        result, seconds = min((measure(loaded, 32, options) for _ in range(3)), key=lambda pair: pair[1])
        counts = result.counts
        share = counts.by_class["mfma"] / counts.instructions
        print(
            f"{name:28s} {counts.instructions / seconds / 1e6:6.2f} million wave-instructions/s "
            f"({counts.waves} waves, {share:.1%} matrix, {len(result.reports)} reports)"
        )
    seconds = min(measure(loaded, 1, Options())[1] for _ in range(5))
    print(f"launch of 8 waves            {seconds * 1e3:6.1f} ms ({ROUNDS} rounds)")
    result, _ = measure(loaded, 32, Options(profile=True))
    total = sum(result.counts.seconds.values())
    print("where the time goes          " + ", ".join(f"{k} {v / total:.0%}" for k, v in result.counts.seconds.items()))


if __name__ == "__main__":
    main()
