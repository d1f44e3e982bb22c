"""What is installed, what this machine is, and what would run here and why."""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from . import __version__, plan, use_executor
from .integrations import aiter as integration
from .kernels.fmha_gfx950 import traits
from .layouts import PACK
from .options import EXECUTORS, current_options
from .planner import device_arch
from .runtime.executors import flydsl_missing


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _aiter() -> str:
    found = _version("amd-aiter", "amd_aiter")
    if found == "not installed" and find_spec("aiter") is not None:
        return "a package named aiter is installed, but it is not AMD's (whose distribution is amd-aiter)"
    return found


def _call(layout: str, page: int, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One request of 128 queries over 512 keys, as metadata."""
    dim, heads, pages = 128, 2, max(1, 512 // page)

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    fp8, int32 = torch.float8_e4m3fn, torch.int32
    if layout == "vectorized":
        k, v = (pages, heads, dim // PACK, page, PACK), (pages, heads, page // PACK, dim, PACK)
        args: Any = (make((128, 8, dim), fp8), make(k, fp8), make(v, fp8))
    else:
        shape = (pages, heads, dim) if page == 1 else (pages, page, heads, dim)
        args = (make((128, 8, dim), fp8), make(shape, fp8), make(shape, fp8))
    scale = make((1,), torch.float32)
    kwargs = {"block_table": make((1, pages), int32), "seqlen_k": make((1,), int32)}
    kwargs |= {"q_descale": scale, "k_descale": scale, "v_descale": scale}
    return (*args, make((2,), int32), 128, 512), kwargs


def doctor() -> int:
    """Print the report; returns 0."""
    options = current_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"aiter_paged_fp8  {__version__}")
    print(f"python           {platform.python_version()}")
    print(f"torch            {torch.__version__} (HIP {torch.version.hip}, CUDA {torch.version.cuda})")
    print(f"numpy            {_version('numpy')}")
    print(f"FlyDSL           {_version('flydsl')}" + (f"; {missing}" if (missing := flydsl_missing()) else ""))
    print(f"Triton           {_version('triton', 'pytorch-triton-rocm', 'pytorch-triton')}")
    print(f"AITER            {_aiter()}")
    print(f"integration      {integration.status()}")
    print(f"architecture     {device_arch(torch.device(device))} (the native kernel is for {traits.ARCH})")
    print(f"cache directory  {options.cache_dir}")
    print(f"options          executor={options.executor}, check_metadata={options.check_metadata}")
    print("\nwhat a causal call with D = Dv = 128 would do")
    for layout, page in (("linear", 1), ("vectorized", 16), ("vectorized", 64), ("vectorized", 1024)):
        for arch, where in ((None, "here"), (traits.ARCH, f"on {traits.ARCH}")):
            args, kwargs = _call(layout, page, "meta" if arch else device)
            chosen = plan(*args, arch=arch, **kwargs)
            print(f"  {layout} pages of {page}, {where}: {chosen.path} on {chosen.executor}")
            print(f"    {chosen.code}: {chosen.reason}")
    print("\nwhat each executor answers to the vectorized page of 64 here")
    args, kwargs = _call("vectorized", 64, device)
    for name in EXECUTORS:
        with use_executor(name):
            chosen = plan(*args, **kwargs)
        answer = f"runs the {chosen.path} path" if chosen else "can't run it"
        print(f"  {name}: {answer} ({chosen.code}: {chosen.reason})")
    return 0
