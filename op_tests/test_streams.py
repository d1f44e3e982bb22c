"""Calls that are put off: inside a stream of the emulator, and recorded into a graph that is replayed.

What a call does to memory happens in the order in which it was asked for, over what memory holds by then: strided
inputs are copied on the queue, metadata is read when the kernel runs. Copies that only the queue knows live as long as
it needs them; buffers that the caller has freed are used by nobody unnoticed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import (
    emulator,
    flydsl_flash_attn_paged_prefill_func,
    flydsl_flash_attn_paged_prefill_preload,
    plan,
    use_options,
)
from aiter_paged_fp8.emulator import MemoryFault
from op_tests import cases
from op_tests.cases import E4M3, NAN_BYTE, Built, Case, build, compare, submit

#: Two requests of two pages each; tails are finite, since changed page ids make tokens of them.
BLOCK = Case([6, 3], [100, 70], heads=2, kv_heads=1, tail_byte=0x34)
CSR = replace(BLOCK, table="csr")
METADATA = ("cu_seqlens_q", "block_table", "seqlen_k", "kv_indptr", "kv_page_indices", "kv_last_page_lens")


@pytest.fixture(params=[name for name in cases.CAPTURING if name == "emulator"])
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[BLOCK, CSR], ids=["block", "csr"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of the last dimension of a larger tensor."""
    raw = tensor.view(torch.uint8) if tensor.dtype is E4M3 else tensor
    fill = NAN_BYTE if tensor.dtype is E4M3 else -1
    whole = torch.full((*raw.shape, 2), fill, dtype=raw.dtype)
    whole[..., 0] = raw
    return whole.view(tensor.dtype)[..., 0]


def spread(built: Built) -> Built:
    """The same call with q and all metadata strided, so that each must be copied on the queue."""
    kwargs = {name: strided(value) if name in METADATA else value for name, value in built.kwargs.items()}
    q, k, v, cu, *bounds = built.args
    made = replace(built, args=(strided(q), k, v, strided(cu), *bounds), kwargs=kwargs)
    assert not made.q.is_contiguous()
    return made


def untouched(built: Built) -> bool:
    return all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards)


def states(built: Built) -> Iterator[Built]:
    """The call as it is, then changed in place again and again: lengths, page ids, rows, descales, q and K."""
    yield built
    case = built.case
    first, second = built.page_ids
    # Longer and shorter, within the bounds that the call was made with.
    ids = [second[::-1], first]
    changed = replace(built, case=replace(case, kv_lens=[71, 100]), page_ids=ids, cu=[0, 4, 9])
    if case.table == "block":
        for row, pages in enumerate(ids):
            built.kwargs["block_table"][row, :2] = torch.tensor(pages, dtype=torch.int32)
        built.kwargs["seqlen_k"].copy_(torch.tensor([71, 100], dtype=torch.int32))
    else:
        built.kwargs["kv_page_indices"][1:5] = torch.tensor([*ids[0], *ids[1]], dtype=torch.int32)
        built.kwargs["kv_last_page_lens"].copy_(torch.tensor([7, 36], dtype=torch.int32))
    built.args[3].copy_(torch.tensor(changed.cu, dtype=torch.int32))
    yield changed
    for name, number in (("q_descale", 0.25), ("k_descale", 2.5), ("v_descale", -1.5)):
        built.kwargs[name].fill_(number)
    yield changed
    built.q.copy_((-built.q.float()).to(E4M3))
    yield changed
    built.args[1].view(torch.uint8).bitwise_xor_(0x80)
    yield changed
    shorter = replace(changed, case=replace(case, kv_lens=[0, 64]), page_ids=[[], first[:1]])
    if case.table == "block":
        built.kwargs["seqlen_k"].copy_(torch.tensor([0, 64], dtype=torch.int32))
    else:
        built.kwargs["kv_indptr"].copy_(torch.tensor([3, 3, 4], dtype=torch.int32))
        built.kwargs["kv_last_page_lens"].copy_(torch.tensor([-7, 64], dtype=torch.int32))
    yield shorter


FORMS: dict[str, Callable[[Built], Built]] = {"packed": lambda built: built, "strided": spread}


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_reads_what_stands_there_then(executor: str, case: Case, form: str) -> None:
    built = FORMS[form](build(case))
    with emulator.graph() as graph:
        _, calls = submit(built, executor)
    assert untouched(built), "a recorded call ran"
    (launch,) = calls[0].launches
    assert launch.instructions is None
    done = 0
    for state in states(built):
        built.poison()
        graph.replay()
        compare(state, built.out, built.lse, executor)
        assert launch.instructions is not None
        assert launch.instructions > done, "a replay ran nothing"
        done = launch.instructions


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_runs_at_synchronize(executor: str, case: Case, form: str) -> None:
    built = FORMS[form](build(case))
    with emulator.stream() as stream:
        _, calls = submit(built, executor)
        assert untouched(built), "a call on a stream ran before it was waited for"
    assert untouched(built), "leaving the block is not waiting"
    *_, last = states(built)
    assert untouched(built)
    stream.synchronize()
    compare(last, built.out, built.lse, executor)
    cases.assert_ran(calls, executor)
    built.poison()
    stream.synchronize()
    assert untouched(built), "a call ran twice"


def test_calls_of_a_stream_run_in_order(executor: str, case: Case) -> None:
    # Both into the same outputs: the later one stands.
    first, second = spread(build(case)), build(replace(case, seed=1, kv_lens=[33, 128]))
    second = replace(second, out=first.out, lse=first.lse, _guards=first._guards)
    with emulator.stream() as stream:
        submit(first, executor)
        submit(second, executor)
    stream.synchronize()
    compare(second, first.out, first.lse, executor)


def test_a_graph_of_two_calls_hands_on_results(executor: str) -> None:
    # The second call's q is what the first one wrote, as bytes: it must run after it, at every replay.
    first = build(replace(BLOCK, kv_lens=[100, 70]))
    second = build(replace(BLOCK, seed=1, heads=4, kv_heads=1))
    total, heads, dim = first.out.shape
    as_bytes = first.out.view(torch.uint8).view(total, 2 * heads, dim).view(E4M3)
    second = replace(second, args=(as_bytes, *second.args[1:]))
    with emulator.graph() as graph:
        submit(first, executor)
        submit(second, executor)
    for number in (0.5, 0.125):
        first.kwargs["v_descale"].fill_(number)
        first.poison()
        second.poison()
        graph.replay()
        compare(first, first.out, first.lse, executor)
        compare(second, second.out, second.lse, executor)


def test_a_replay_inside_a_stream_waits(executor: str, case: Case) -> None:
    built = spread(build(case))
    with emulator.graph() as graph:
        submit(built, executor)
    with emulator.stream() as stream:
        graph.replay()
    assert untouched(built)
    *_, last = states(built)
    stream.synchronize()
    compare(last, built.out, built.lse, executor)


def test_outside_a_call_is_complete_on_return(executor: str, case: Case) -> None:
    built = spread(build(case))
    out, lse = cases.run(built, executor)
    compare(built, out, lse, executor)


@pytest.mark.parametrize("form", FORMS)
def test_empty_calls_are_recorded_like_others(executor: str, form: str) -> None:
    """Rows without keys are written at replay, not when the call is made."""
    built = FORMS[form](build(replace(BLOCK, kv_lens=[0, 0])))
    with emulator.graph() as graph:
        submit(built, executor)
    assert untouched(built)
    for _ in range(2):
        built.poison()
        graph.replay()
        compare(built, built.out, built.lse, executor)


def test_allocated_results_belong_to_the_caller(executor: str, case: Case) -> None:
    built = build(case)
    with emulator.stream() as stream:
        (out, lse), _ = submit(built, executor, out=None, lse=None)
    stream.synchronize()
    compare(built, out, lse, executor)


@pytest.mark.parametrize("kind", ["stream", "graph"])
def test_copies_live_as_long_as_the_queue(executor: str, case: Case, kind: str) -> None:
    built = spread(build(case))
    with getattr(emulator, kind)() as queue:
        submit(built, executor)
    gc.collect()
    # What would be handed out again if the copies had been freed.
    filled = [torch.full(shape, 0x7F, dtype=torch.uint8) for shape in [built.q.shape, (12,), (8,)] for _ in range(50)]
    for state in list(states(built))[-1:] if kind == "stream" else states(built):
        built.poison()
        queue.synchronize() if kind == "stream" else queue.replay()
        compare(state, built.out, built.lse, executor)
    assert all(bool((tensor == 0x7F).all()) for tensor in filled)


#: What a caller may free too early: name, and whether it is strided.
FREED = ["q", "k", "v", "cu_seqlens_q", "block_table", "seqlen_k", "q_descale", "k_descale", "v_descale", "out", "lse"]
FREED_CSR = ["kv_indptr", "kv_page_indices", "kv_last_page_lens"]


@pytest.mark.parametrize("name", [*FREED, *FREED_CSR])
def test_use_after_free_shows(executor: str, name: str) -> None:
    assert_use_shows(executor, name, build(CSR if name in FREED_CSR else BLOCK))


@pytest.mark.parametrize("name", ["q", "cu_seqlens_q", "block_table", "seqlen_k", *FREED_CSR])
def test_use_after_free_shows_in_copies(executor: str, name: str) -> None:
    assert_use_shows(executor, name, spread(build(CSR if name in FREED_CSR else BLOCK)))


def assert_use_shows(executor: str, name: str, built: Built) -> None:
    """One replay is right; after the tensor's owner is gone the next one is a fault that says so."""
    copied = name in (*METADATA, "q") and not cases.named(built)[name].is_contiguous()
    arguments = cases.named(built)
    # A tensor of its own, and nobody else's.
    arguments[name] = strided(arguments[name]) if not arguments[name].is_contiguous() else arguments[name].clone()
    assert arguments[name].data_ptr() != cases.named(built)[name].data_ptr()
    expected = built.reference()
    rows = slice(built.cu[0], built.cu[-1])
    out, lse = arguments["out"], arguments["lse"]
    with emulator.graph() as graph, use_options(executor=executor):
        flydsl_flash_attn_paged_prefill_func(**arguments)
    graph.replay()
    cases.compare_out(out[rows], expected[0][rows], executor)
    cases.compare_lse(lse[:, rows], expected[1][:, rows], executor)
    del out, lse
    arguments.pop(name)
    gc.collect()
    with pytest.raises(MemoryFault, match="freed" if copied else name_in_kernel(name)) as fault:
        graph.replay()
    assert "freed" in str(fault.value)


def name_in_kernel(name: str) -> str:
    """What the kernel's arguments call it."""
    known = {"block_table": "table", "kv_page_indices": "table", "seqlen_k": "lengths", "kv_indptr": "lengths"}
    return known.get(name, name.removeprefix("kv_"))


def test_planning_and_preloading_are_legal_while_recording(executor: str) -> None:
    built = build(BLOCK)
    with emulator.graph() as graph, use_options(executor=executor):
        assert plan(**cases.named(built)).path == "paged"
        assert flydsl_flash_attn_paged_prefill_preload(**cases.named(built)).path == "paged"
    graph.replay()
    assert untouched(built)
    assert graph.works == []


def test_check_of_metadata_is_refused_while_recording(executor: str) -> None:
    """What it would read is not what a replay will find."""
    built = build(BLOCK)
    with emulator.graph(), use_options(check_metadata=True), pytest.raises(RuntimeError, match="capture"):
        submit(built, executor)
    assert untouched(built)


@pytest.mark.parametrize("bad", [{"softmax_scale": -1.0}, {"v_descale": None}], ids=str)
def test_a_refused_call_leaves_the_graph_usable(executor: str, bad: dict[str, Any]) -> None:
    # Strided, so that a refusal after the first copy would show.
    built = spread(build(BLOCK))
    with emulator.graph() as graph:
        with pytest.raises((ValueError, TypeError)):
            submit(built, executor, **bad)
        submit(built, executor)
    assert [work.name for work in graph.works].count("copy") == 4
    graph.replay()
    compare(built, built.out, built.lse, executor)
