"""What is checked against AITER's real wheel, in a process of its own: `python integration_aiter_wheel.py` prints one
line for each check. Run by test_integration_aiter_wheel.py with what lets AITER import on a machine without ROCm."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

EXPORT, BATCH = "flydsl_flash_attn_paged_prefill_func", "mha_batch_prefill_func"
#: Arguments of release 0.1.7 that ask for what the native path has not.
FEATURES: dict[str, Any] = {
    "dropout_p": 0.1,
    "logits_soft_cap": 30.0,
    "window_size": (128, -1),
    "alibi_slopes": "tensor",
    "return_attn_probs": True,
}
#: Those that only later releases know: the wheel's own function must be the one that refuses them.
LATER: dict[str, Any] = {"kv_block_descale": "tensor", "sink_ptr": "tensor", "sink_size": 4}


def report(name: str, value: Any = True) -> None:
    print("CHECK", json.dumps({name: value}), flush=True)


def main() -> None:
    """Every check; the first one that fails ends the process."""
    import aiter
    import pytest
    import torch

    from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, use_options
    from aiter_paged_fp8.integrations import aiter as integration
    from op_tests.test_integration_aiter import arguments, public_call

    mha = importlib.import_module("aiter.ops.mha")
    report("file", Path(aiter.__file__).parts[-2:])
    original = [mha.mha_batch_prefill_func]
    report("parameters", list(inspect.signature(original[0]).parameters))
    engine = ModuleType("engine")
    sys.modules["engine"] = engine
    exec(f"from aiter import {BATCH}", vars(engine))
    before = {name: id(value) for name, value in vars(aiter).items()}

    status = integration.install()
    from aiter.ops.flydsl import flydsl_flash_attn_paged_prefill_func as exported

    assert exported is flydsl_flash_attn_paged_prefill_func
    assert aiter.mha_batch_prefill_func is original[0]
    report("export", [status.mode, status.aiter, status.version, list(status.created)])

    status = integration.install(dispatch=True)
    wanted = {f"{name}.{BATCH}" for name in ("aiter", "aiter.ops.mha", "engine")}
    assert wanted <= set(status.replaced), status
    report("dispatch", sorted(status.replaced))
    named = arguments(causal=True)
    expected = public_call(named)
    with use_options(executor="torch"):
        for module in (aiter, mha, engine):
            assert torch.equal(getattr(module, BATCH)(**named), expected)
    report("taken", ["aiter", "aiter.ops.mha", "engine"])

    # What lies behind the original's own Python: it would compile a kernel for a GPU.
    behind: list[tuple[Any, ...]] = []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        behind.append((args, kwargs))
        raise RuntimeError("the wheel's kernel")

    mha.mha_batch_prefill = compiled
    older = {key: value for key, value in named.items() if key in inspect.signature(original[0]).parameters}
    for name, value in {**FEATURES, "causal": True}.items():
        call = {**older, name: torch.ones(4) if value == "tensor" else value}
        with pytest.raises(RuntimeError, match="the wheel's kernel"):
            aiter.mha_batch_prefill_func(**call)
        assert behind.pop()[0][0] is call["q"]
        report(f"back {name}")
    with use_options(executor="torch"):
        for name, value in {**FEATURES, **LATER}.items():
            call = {**named, name: torch.ones(4) if value == "tensor" else value}
            # The descales are later, too: the wheel says so, as it would without us.
            with pytest.raises(TypeError, match=f"{BATCH}.* got an unexpected keyword argument"):
                aiter.mha_batch_prefill_func(**call)
            report(f"refused by the wheel {name}")
    assert behind == []

    left = integration.uninstall()
    assert left == integration.Status(None), left
    assert aiter.mha_batch_prefill_func is mha.mha_batch_prefill_func is original[0]
    assert vars(engine)[BATCH] is original[0]
    assert {name: id(value) for name, value in vars(aiter).items()} == before
    assert "aiter.ops.flydsl" not in sys.modules
    assert not hasattr(aiter.ops, "flydsl")
    report("uninstall")


if __name__ == "__main__":
    main()
