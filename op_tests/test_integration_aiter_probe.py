"""The integration where there is no AITER, one that can't be imported, or another package of that name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, use_options
from aiter_paged_fp8.integrations import VARIABLE, _dispatch, install_from_environment
from aiter_paged_fp8.integrations import aiter as integration
from op_tests import stand_in_aiter
from op_tests.cases import Case, build, fresh_seed
from op_tests.test_integration_aiter import FEATURES, arguments, public_call

MARK = "__aiter_paged_fp8_shim__"


@pytest.fixture(autouse=True)
def no_aiter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that never saw an AITER, even where one is installed."""
    stand_in_aiter.forget()
    real = [path for path in sys.path if (Path(path or ".") / "aiter").is_dir()]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in real])
    yield
    stand_in_aiter.forget()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Put a folder with packages first on the path."""
    return lambda folder: monkeypatch.syspath_prepend(str(folder))


def assert_no_aiter() -> None:
    assert [name for name in sys.modules if name.split(".")[0] == "aiter" and hasattr(sys.modules[name], MARK)] == []


@pytest.mark.parametrize("hook", [False, True], ids=["install", "variable"])
def test_without_aiter_a_marked_shim_exports_the_function(hook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("aiter.ops.flydsl")
    monkeypatch.setenv(VARIABLE, "export")
    status = install_from_environment() if hook else integration.install()
    from aiter.ops.flydsl import flydsl_flash_attn_paged_prefill_func as exported

    assert exported is flydsl_flash_attn_paged_prefill_func
    assert status is not None
    assert status.shim
    assert (status.mode, status.aiter, status.version) == ("export", "absent", None)
    assert status.created == ("aiter", "aiter.ops", "aiter.ops.flydsl")
    assert status.skipped == {"aiter": "no package aiter is installed"}
    for name in status.created:
        assert getattr(sys.modules[name], MARK)
        assert "stand-in of aiter_paged_fp8" in str(sys.modules[name].__doc__)
        assert importlib.util.find_spec(name) is not None, "find_spec raises for modules without a spec"
    with pytest.raises(ImportError):
        importlib.import_module("aiter.mla")
    with pytest.raises(ImportError):
        exec("from aiter import mha_batch_prefill_func")
    assert integration.install() == status
    assert integration.uninstall() == integration.Status(None)
    assert_no_aiter()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("aiter.ops.flydsl")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise ImportError('libamdhip64.so')", "ImportError: libamdhip64.so"),
        ("raise RuntimeError('ROCm version file not found')", "RuntimeError: ROCm version file not found"),
        ("raise SystemExit('no working hipcc')", "SystemExit: no working hipcc"),
        ("import sys; sys.exit(1)", "SystemExit: 1"),
        ("open('/nowhere/at/all')", "FileNotFoundError"),
    ],
)
@pytest.mark.parametrize("dispatch", [False, True])
def test_an_aiter_that_fails_to_import_ends_nothing(
    tmp_path: Path, use: Callable[[Path], None], statement: str, words: str, dispatch: bool
) -> None:
    use(stand_in_aiter.broken(tmp_path, statement))
    status = integration.install(dispatch=dispatch)
    assert (status.aiter, status.shim) == ("unusable", True)
    assert words in status.skipped["aiter"]
    from aiter.ops.flydsl import flydsl_flash_attn_paged_prefill_func as exported

    assert exported is flydsl_flash_attn_paged_prefill_func
    integration.uninstall()
    assert_no_aiter()
    with pytest.raises((Exception, SystemExit)) as raised:
        importlib.import_module("aiter")
    assert type(raised.value).__name__ in words, "AITER's own error is back"


def test_a_failed_import_does_not_swallow_an_interrupt(tmp_path: Path, use: Callable[[Path], None]) -> None:
    use(stand_in_aiter.broken(tmp_path, "raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        integration.install()
    assert integration.status().mode is None


def test_dispatch_through_the_shim_takes_what_it_can(use: Callable[[Path], None]) -> None:
    status = integration.install(dispatch=True)
    from aiter import mha_batch_prefill_func as at_top
    from aiter.ops.mha import mha_batch_prefill_func as in_mha

    assert status.created[-1] == "aiter.ops.mha"
    assert at_top is in_mha
    assert {"aiter.mha_batch_prefill_func", "aiter.ops.mha.mha_batch_prefill_func"} < set(status.replaced)
    named = arguments(causal=True)
    with use_options(executor="torch"):
        assert torch.equal(at_top(**named), public_call(named))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        at_top(**named, fresh=1)


OTHER: dict[str, Any] = {
    "q": torch.zeros(5, 4, 128, dtype=torch.bfloat16),
    "k_descale": None,
    "kv_last_page_lens": None,
}


@pytest.mark.parametrize("argument", [*FEATURES, *OTHER])
def test_a_call_that_the_shim_would_hand_back_names_its_feature(argument: str) -> None:
    integration.install(dispatch=True)
    import aiter

    named = arguments(causal=True, **{argument: {**FEATURES, **OTHER}[argument]})
    with pytest.raises(NotImplementedError, match=f"^{argument}: got .*; accepted: .*AITER itself"):
        aiter.mha_batch_prefill_func(**named)


@pytest.mark.parametrize("changes", [{}, {"causal": False}, {"causal": False, "q_lens": (1, 1)}])
def test_the_shim_says_why_a_call_is_not_native(changes: dict[str, Any]) -> None:
    integration.install(dispatch=True)
    import aiter

    q_lens = changes.pop("q_lens", (2, 3))
    built = build(Case(q_lens, (70, 5), table="csr", seed=fresh_seed()))
    names = ("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")
    named = {**dict(zip(names, built.args, strict=True)), **built.kwargs, **changes}
    with pytest.raises(NotImplementedError, match="the native kernel runs on gfx950, the call is on cpu"):
        aiter.mha_batch_prefill_func(**named)


def test_every_argument_of_the_contract_is_a_feature_or_served() -> None:
    """A new argument of the dispatcher must join the features that go back, here and in the table of the tests."""
    served = set(_dispatch._DESCRIBED) | {"deterministic"}
    assert set(_dispatch.CONTRACT) == served | set(FEATURES)


def test_the_unrelated_package_is_recognised_and_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    use(stand_in_aiter.unrelated(tmp_path))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"aiter: got another package .*/aiter/__init__.py.*accepted: AMD's"):
            integration.install()
    assert "aiter" not in sys.modules, "it was not even imported"
    assert integration.status() == integration.Status(None)


def test_the_unrelated_package_is_refused_when_it_is_loaded_already() -> None:
    module = type(sys)("aiter")
    sys.modules["aiter"] = module
    with pytest.raises(RuntimeError, match="aiter: got another package"):
        integration.install(dispatch=True)
    assert sys.modules["aiter"] is module


def test_a_folder_of_that_name_is_no_aiter(tmp_path: Path, use: Callable[[Path], None]) -> None:
    """A checkout of AITER's repository, seen from the folder above it, is a package to Python."""
    (tmp_path / "aiter" / "csrc").mkdir(parents=True)
    use(tmp_path)
    with pytest.raises(RuntimeError, match=r"it has no aiter\.ops"):
        integration.install()
