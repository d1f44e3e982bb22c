"""Options and their defaults from the environment, the record of calls, and the check of metadata."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import (
    Launch,
    Options,
    flydsl_flash_attn_batch_prefill_func,
    flydsl_flash_attn_paged_prefill_func,
    plan,
    record,
    use_executor,
    use_options,
)
from aiter_paged_fp8.options import current_options
from op_tests.cases import Built, Case, build, named, on_served, run, served
from op_tests.test_contract import FORMS, Form

ROOT = Path(__file__).parents[1]
BLOCK = Case((7, 0, 2, 3, 4), (129, 64, 0, 65, 2))
CSR = replace(BLOCK, table="csr")
SLOTS = replace(CSR, layout="slots", page=1)
WIDE = replace(BLOCK, dim=272)
FULL = replace(BLOCK, causal=False)


# Defaults.


def child(code: str, **variables: str | None) -> str:
    """Output of a fresh process in an environment of its own; its last error line where it failed."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("AITER_PAGED", "XDG_CACHE"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "HOME": "/nobody"}
    environment |= {name: value for name, value in variables.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


SHOW = "o = options.current_options(); print(o.executor, o.check_metadata, o.cache_dir)"


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, "auto False /nobody/.cache/aiter_paged_fp8"),
        ({"XDG_CACHE_HOME": "/c"}, "auto False /c/aiter_paged_fp8"),
        ({"AITER_PAGED_FP8_EXECUTOR": "torch"}, "torch False /nobody/.cache/aiter_paged_fp8"),
        ({"AITER_PAGED_FP8_EXECUTOR": ""}, "auto False /nobody/.cache/aiter_paged_fp8"),
        ({"AITER_PAGED_FP8_CACHE_DIR": "/there"}, "auto False /there"),
        ({"AITER_PAGED_FP8_CACHE_DIR": "/there", "XDG_CACHE_HOME": "/c"}, "auto False /there"),
        ({"AITER_PAGED_FP8_CACHE_DIR": ""}, "auto False /nobody/.cache/aiter_paged_fp8"),
        *(
            ({"AITER_PAGED_FP8_CHECK": text}, "auto True /nobody/.cache/aiter_paged_fp8")
            for text in ("1", "True", "on")
        ),
        *(({"AITER_PAGED_FP8_CHECK": text}, "auto False /nobody/.cache/aiter_paged_fp8") for text in ("0", "off", "")),
    ],
    ids=str,
)
def test_defaults_come_from_the_environment(variables: dict[str, str], shown: str) -> None:
    assert child(f"from aiter_paged_fp8 import options; {SHOW}", **variables) == shown


@pytest.mark.parametrize(("name", "value"), [("EXECUTOR", "fastest"), ("CHECK", "maybe"), ("CHECK", "2")])
def test_bad_default_names_its_variable(name: str, value: str) -> None:
    error = child("from aiter_paged_fp8 import use_options", **{f"AITER_PAGED_FP8_{name}": value})
    assert error.startswith("ValueError")
    for word in (f"AITER_PAGED_FP8_{name}", value, "accepted"):
        assert word in error


@pytest.mark.parametrize("first", ["import aiter_paged_fp8", "from aiter_paged_fp8 import use_options"])
def test_environment_is_read_once_at_import(first: str) -> None:
    """A serving process changes its environment for its workers; the package must not move under a running one."""
    late = "import os; os.environ.update(AITER_PAGED_FP8_EXECUTOR='torch', AITER_PAGED_FP8_CHECK='1')"
    show = f"from aiter_paged_fp8 import options; {SHOW}"
    assert child(f"{first}; {late}; {show}") == "auto False /nobody/.cache/aiter_paged_fp8"


def test_default_executor_binds_calls() -> None:
    code = """
from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, plan
from op_tests.cases import Case, build, named
arguments = named(build(Case((2,), (3,))))
try:
    flydsl_flash_attn_paged_prefill_func(**arguments)
except RuntimeError as error:
    print(plan(**arguments).path, error)
"""
    assert child(code, AITER_PAGED_FP8_EXECUTOR="gpu").splitlines()[-1].startswith("None executor gpu was asked for")


# Options in a process.


def test_options_hold_for_their_block() -> None:
    outside = current_options()
    with use_options(executor="torch") as options:
        assert options == current_options() == replace(outside, executor="torch")
        with use_options(check_metadata=True, cache_dir="/there"):
            assert current_options() == Options("torch", True, Path("/there"))
            with use_options():
                assert current_options() == Options("torch", True, Path("/there"))
            with use_options(executor="auto", check_metadata=False), use_executor("emulator") as options:
                assert options == current_options() == Options("emulator", False, Path("/there"))
            assert current_options() == Options("torch", True, Path("/there"))
        assert current_options() == replace(outside, executor="torch")
    assert current_options() == outside


def test_options_end_with_an_exception() -> None:
    outside = current_options()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), use_options(executor="torch", check_metadata=True), use_executor("gpu"):
            raise error
        assert current_options() == outside


def test_refused_call_leaves_options_alone() -> None:
    with use_options(executor="torch"):
        with pytest.raises(ValueError):
            flydsl_flash_attn_paged_prefill_func(**{**named(build(BLOCK)), "max_seqlen_q": -1})
        assert current_options().executor == "torch"


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("executor", "fastest", ValueError),
        ("executor", "GPU", ValueError),
        ("executor", "", ValueError),
        ("executor", 1, ValueError),
        ("check_metadata", 1, TypeError),
        ("check_metadata", "yes", TypeError),
        ("cache_dir", 5, TypeError),
        ("cache_dir", b"/there", TypeError),
    ],
)
def test_bad_option_is_named(name: str, value: Any, error: type[Exception]) -> None:
    outside = current_options()
    with pytest.raises(error, match=rf"^{name}: got .*; accepted: "), use_options(**{name: value}):
        pass
    assert current_options() == outside
    if name == "executor":
        with pytest.raises(error, match=r"^executor: got .*gpu, emulator, triton, torch"), use_executor(value):
            pass


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"), use_options(colour="red"):  # type: ignore[call-arg]
        pass
    with pytest.raises(FrozenInstanceError):
        current_options().executor = "torch"  # type: ignore[misc]


def test_options_are_of_their_thread() -> None:
    """Each thread sets its own, all of them hold at once, and a new thread starts with the defaults."""
    outside, names = current_options().executor, ("torch", "gpu", "emulator", "auto")
    meet = threading.Barrier(len(names))

    def work(name: str) -> list[str]:
        seen = [current_options().executor]
        with use_executor(name):
            meet.wait(timeout=60)
            seen.append(current_options().executor)
            meet.wait(timeout=60)
        return [*seen, current_options().executor]

    with use_executor("torch"), ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(work, names))
        assert current_options().executor == "torch"
    assert results == [[outside, name, outside] for name in names]


def test_options_are_of_their_task() -> None:
    async def work(name: str) -> str:
        with use_executor(name):
            await asyncio.sleep(0)
            return current_options().executor

    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*map(work, ("torch", "gpu", "emulator"))))

    assert asyncio.run(all_of_them()) == ["torch", "gpu", "emulator"]


# Records.


def call(case: Case) -> None:
    flydsl_flash_attn_paged_prefill_func(**named(build(case)))


def test_record_collects_calls_in_order(executor: str) -> None:
    with use_executor(executor), record() as calls:
        assert calls == []
        call(BLOCK)
        assert len(calls) == 1, "it grows while the block runs"
        call(SLOTS if served(SLOTS, executor) else CSR)
        arguments = named(build(BLOCK))
        flydsl_flash_attn_batch_prefill_func(
            **{name: value for name, value in arguments.items() if name != "lse"}, kv_indptr=None, kv_page_indices=None
        )
        expected = plan(**arguments)
    call(BLOCK)
    assert [entry.plan for entry in calls] == [expected] * 3
    for entry in calls:
        assert all(isinstance(launch, Launch) for launch in entry.launches)
        assert bool(entry.launches) is (expected.path == "paged"), "the fallback in torch launches no kernel of its own"


def test_innermost_record_collects() -> None:
    with record() as outer:
        call(BLOCK)
        with record() as inner:
            call(BLOCK)
            call(BLOCK)
        with pytest.raises(NotImplementedError), record() as broken:
            call(WIDE)
        call(BLOCK)
    assert [len(calls) for calls in (outer, inner, broken)] == [2, 2, 1]


def test_record_says_what_could_not_run() -> None:
    with record() as calls:
        with pytest.raises(NotImplementedError):
            call(WIDE)
        with pytest.raises(RuntimeError), use_executor("gpu"):
            call(FULL)
        with pytest.raises(ValueError):
            flydsl_flash_attn_paged_prefill_func(**{**named(build(BLOCK)), "seqlen_k": None})
    assert [bool(entry.plan) for entry in calls] == [False, False], "a bad argument has no plan to be recorded"
    assert [entry.launches for entry in calls] == [[], []]


def test_records_are_of_their_thread() -> None:
    meet = threading.Barrier(3)

    def work(count: int) -> int:
        with record() as calls:
            meet.wait(timeout=60)
            for _ in range(count):
                call(BLOCK)
            meet.wait(timeout=60)
        return len(calls)

    with record() as calls, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, (1, 2, 3))) == [1, 2, 3]
        meet.reset()
        threads = [threading.Thread(target=call, args=(BLOCK,))]
        for thread in threads:
            thread.start()
            thread.join()
    assert calls == []


# The check of metadata.


@dataclass(frozen=True)
class Wild:
    """One number of a call's metadata that is not what it may be, and the request that it is for."""

    case: Case
    name: str
    place: tuple[int, ...]
    value: int
    request: int

    def __str__(self) -> str:
        case = self.case
        return f"{case.layout}-{case.table}-{self.name}{list(self.place)}={self.value}".replace(" ", "")


def wilds() -> Iterator[Wild]:
    """Valid: cu_seqlens_q [0, 7, 7, 9, 12, 16] of 16 rows, at most 7 each; kv_indptr [1, 4, 5, 5, 7, 8] of 9 ids."""
    low, high = -(2**31), 2**31 - 1
    for case in (BLOCK, CSR, SLOTS):
        for position, value, request in (
            (0, -1, 0),
            (0, low, 0),
            (0, high, 0),
            (5, 17, 4),
            (5, high, 4),
            (5, 11, 4),
            (2, 6, 1),
            (2, 0, 1),
            (3, high, 2),
            (3, low, 2),
        ):
            yield Wild(case, "cu_seqlens_q", (position,), value, request)
    for position in (0, 2, 4):
        for value in (-1, low, 130, high):
            yield Wild(BLOCK, "seqlen_k", (position,), value, position)
    for value in (-1, low, 10, high):
        for place in ((0, 0), (0, 2), (1, 0), (3, 1), (4, 0)):
            yield Wild(BLOCK, "block_table", place, value, place[0])
        for position, request in ((1, 0), (3, 0), (4, 1), (6, 3), (7, 4)):
            yield Wild(CSR, "kv_page_indices", (position,), value, request)
    for value in (-1, low, 263, high):
        for position, request in ((1, 0), (129, 0), (130, 1), (260, 4)):
            yield Wild(SLOTS, "kv_page_indices", (position,), value, request)
    for position, value, request in (
        (0, -1, 0),
        (0, low, 0),
        (0, high, 0),
        (5, 10, 4),
        (5, high, 4),
        (5, 6, 4),
        (2, 3, 1),
        (3, low, 2),
        (3, 10, 2),
    ):
        yield Wild(CSR, "kv_indptr", (position,), value, request)
    for position in (0, 1, 3, 4):
        for value in (0, -1, 65, low, high):
            yield Wild(CSR, "kv_last_page_lens", (position,), value, position)
    yield Wild(replace(SLOTS, table="csr_last"), "kv_last_page_lens", (0,), 2, 0)


WILDS = list(wilds())
MESSAGE = re.compile(r"^(\w+): got (-?\d+) at position (\d+), for request (\d+); accepted: (.+)$")


def assert_untouched(built: Built) -> None:
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards), (
        "it wrote before it checked"
    )


def refusal(built: Built, executor: str, **changes: Any) -> str:
    with use_options(executor=executor, check_metadata=True), pytest.raises(ValueError) as caught:
        flydsl_flash_attn_paged_prefill_func(**{**named(built), **changes})
    assert_untouched(built)
    return str(caught.value)


# The check is over before an executor has a part in the call: some rows tell that the others have none.
@on_served("wild", WILDS, thin=8)
def test_check_names_request_position_and_value(wild: Wild, executor: str) -> None:
    built = build(wild.case)
    tensor = named(built)[wild.name]
    tensor[wild.place] = wild.value
    # No bound on lengths that could catch a wild offset by accident.
    bound = {"max_seqlen_k": 2**40} if wild.name == "kv_indptr" else {}
    found = MESSAGE.match(message := refusal(built, executor, **bound))
    assert found, message
    name, value, position, request, _ = found.groups()
    assert name == wild.name, message
    # An offset ends one request and starts the next; either is the one. The number shown must be the one that is there.
    offsets = name in ("cu_seqlens_q", "kv_indptr")
    assert int(request) in ((wild.request, wild.place[0]) if offsets else (wild.request,)), message
    shown = tensor[int(request), int(position)] if tensor.dim() == 2 else tensor[int(position)]
    assert int(shown) == int(value), message
    if offsets:  # of a pair that falls, either may be shown
        assert int(request) <= int(position) <= int(request) + 1, message
    else:
        assert (int(value), int(position)) == (wild.value, wild.place[-1]), message


@on_served("case,name", [(CSR, "kv_indptr"), (SLOTS, "kv_indptr")])
def test_check_of_csr_length_shows_what_stands_there(case: Case, name: str, executor: str) -> None:
    """129 keys where max_seqlen_k says 128: the number in the message must be found in the tensor that it names."""
    built = build(case)
    found = MESSAGE.match(message := refusal(built, executor, max_seqlen_k=128))
    assert found, message
    named_there, value, position, request, _ = found.groups()
    assert int(request) == 0
    assert "128" in message
    assert int(named(built)[named_there][int(position)]) == int(value), message


def test_check_of_query_bound(executor: str) -> None:
    """Offsets that are fine in themselves, but for a request of 7 rows where max_seqlen_q says 6."""
    message = refusal(build(BLOCK), executor, max_seqlen_q=6)
    assert message.startswith("cu_seqlens_q: got 7 at position 1, for request 0; accepted: "), message
    assert "max_seqlen_q 6" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_check_names_descale(name: str, value: float, executor: str) -> None:
    message = refusal(build(BLOCK), executor, **{name: torch.tensor([value])})
    for word in (f"{name}: got {value} at position 0", "every request", "finite"):
        assert word in message


#: Lengths that the call cuts are what the check is there to find.
CUT = ("lengths above max_seqlen_k", "a length where the cache has no pages")
VALID = [form for form in FORMS if not form.name.startswith(CUT)]


@on_served("form", VALID, thin=16)
def test_check_lets_valid_metadata_through(form: Form, executor: str) -> None:
    """Whatever the contract accepts, wild numbers in places that nothing uses included; the result stays the same."""
    built = build(form.case)
    form.shape(built)
    plain = [result.clone() for result in run(built, executor, **form.given)]
    built.poison()
    with use_options(check_metadata=True):
        checked = run(built, executor, **form.given)
    rows = slice(built.cu[0], built.cu[-1])
    assert torch.equal(plain[0][rows], checked[0][rows])
    assert torch.equal(plain[1][:, rows], checked[1][:, rows])
    built.check_canaries()


def test_check_happens_only_when_asked_for(executor: str) -> None:
    """Metadata is never read for its own sake: a wild id runs, memory-safe, unless the check is on."""
    built = build(Case((3,), (65,)))
    named(built)["block_table"][0, 0] = 2**31 - 1
    with use_executor(executor):
        flydsl_flash_attn_paged_prefill_func(**named(built))
        with use_options(check_metadata=True), pytest.raises(ValueError, match=r"^block_table"):
            flydsl_flash_attn_paged_prefill_func(**named(built))
        flydsl_flash_attn_paged_prefill_func(**named(built))


def test_plan_does_not_check() -> None:
    built = build(BLOCK)
    named(built)["seqlen_k"][0] = -1
    with use_options(check_metadata=True):
        assert plan(**named(built))
