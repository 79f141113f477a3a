"""AdamW for a list of tensors: against torch's own, in every kind, for every list that somebody may give."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fusebook
from fusebook.cards.adamw import ADAMW_STEP
from fusebook.kernels import adamw as module
from fusebook.kernels.adamw import adamw_step
from fusebook.measure.check import yardstick
from fusebook.measure.inputs import generator

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

#: A ragged chunk, two chunks, none, several axes, one number without an axis.
SHAPES = ((5,), (1500,), (0,), (17, 33), ())


def model(device, shapes=SHAPES, dtype=torch.float32, seed=0):
    """Parameters, gradients, and averages that are still zero."""
    rng = generator(seed, device)
    ps, gs = ([torch.randn(s, generator=rng, device=device).to(dtype) for s in shapes] for _ in range(2))
    return ps, gs, [torch.zeros_like(p) for p in ps], [torch.zeros_like(p) for p in ps]


def by_torch(ps, gradients, **options):
    """Parameters after a step of torch.optim.AdamW, in a loop over tensors, for each list of gradients."""
    own = [torch.nn.Parameter(p.clone()) for p in ps]
    optimizer = torch.optim.AdamW(own, foreach=False, **options)
    for gs in gradients:
        for p, g in zip(own, gs, strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in own]


def close(got, want, rtol=1e-6):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True)


# Against torch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.0}, {"betas": (0.0, 0.5), "eps": 1e-3}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_three_steps_are_those_of_torch(options, dtype, on_device, device):
    ps, gs, ms, vs = model(device, dtype=dtype)
    gradients = [[k * g for g in gs] for k in (1.0, -3.0, 0.01)]  # the largest v is not the last
    want = by_torch(ps, gradients, lr=0.01, **options)
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    rest = {k: v for k, v in options.items() if k in ("maximize", "weight_decay", "eps")}
    tops = [torch.zeros_like(p) for p in ps] if "amsgrad" in options else ()
    count, lr = torch.zeros((), device=device), torch.tensor(0.01, device=device, dtype=torch.float64)
    for t, now in enumerate(gradients, 1):
        step = {"step": count, "lr": lr} if on_device else {"step": t, "lr": 0.01}
        adamw_step(ps, now, ms, vs, tops, beta1=beta1, beta2=beta2, **step, **rest)
    close(ps, want, 1e-6 if dtype == torch.float32 else 1e-14)
    assert count.item() == (3 if on_device else 0)


def test_the_first_bias_correction_has_all_its_digits(device):
    """In float32, 1 - 0.999 has an error of a hundred thousandth."""
    for step in (1, torch.zeros((), device=device)):
        ps, gs, ms, vs = model(device, [(1000,)])
        want = by_torch([p.double() for p in ps], [[g.double() for g in gs]], lr=1.0)
        adamw_step(ps, gs, ms, vs, step=step, lr=1.0)
        close([p.double() for p in ps], want, 1e-6)
        close([v.double() for v in vs], [0.001 * g.double().square() for g in gs], 2e-7)


@pytest.mark.parametrize("norm", [0.5, 4.0, math.inf, math.nan])
def test_gradients_are_clipped_by_a_norm_on_the_device(norm, device):
    ps, gs, ms, vs = model(device)
    norm = torch.tensor(norm, device=device)
    factor = (2.0 / (norm + 1e-6)).clamp(max=1)
    want = by_torch(ps, [[g * factor for g in gs]], lr=0.01)
    adamw_step(ps, gs, ms, vs, step=1, lr=0.01, norm=norm, max_norm=2.0)
    close(ps, want)
    close(ms, [0.1 * g * factor for g in gs])  # a first step is the same for gradients of any length


@pytest.mark.parametrize("options", [{}, {"norm": 4.0, "max_norm": 2.0}, {"maximize": True}], ids=str)
def test_a_scale_of_gradients_is_undone(options, device):
    options = {**options, "norm": torch.tensor(options["norm"], device=device)} if "norm" in options else options
    lists = [model(device) for _ in range(2)]
    adamw_step(*lists[0], step=1, lr=0.01, **options)
    if "norm" in options:
        options["norm"] = options["norm"] * 1024
    ps, gs, ms, vs = lists[1]
    scaled = [g * 1024 for g in gs]
    adamw_step(ps, scaled, ms, vs, step=1, lr=0.01, grad_scale=torch.tensor(1024.0, device=device), **options)
    for got, want in zip((ps, ms, vs), (lists[0][0], *lists[0][2:]), strict=True):
        close(got, want)
    close(scaled, [g * 1024 for g in gs], 0)


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("shapes", [SHAPES, ()], ids=len)
def test_a_step_with_a_gradient_that_is_not_finite_is_none(found, shapes, device):
    ps, gs, ms, vs = model(device, shapes or [(0,)])
    before, count = [p.clone() for p in ps], torch.full((), 3.0, device=device)
    adamw_step(ps, gs, ms, vs, step=count, found_inf=torch.tensor(found, device=device))
    assert count.item() == (3 if found else 4)
    assert all(torch.equal(a, b) == (bool(found) or not a.numel()) for a, b in zip(ps, before, strict=True))
    assert all(not found or not t.any() for t in (*ms, *vs))


def test_a_largest_v_that_is_nan_stays_nan(device):
    ps, gs, ms, vs = model(device, [(4,)])
    tops = [torch.tensor([0.0, math.nan, 1.0, math.inf], device=device)]
    adamw_step(ps, gs, ms, vs, tops, step=1)
    assert [t.isnan().tolist() for t in (*ps, *tops)] == [[False, True, False, False]] * 2


# Sixteen bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_master_is_stepped_and_its_parameter_follows(dtype, device):
    exact, gs, ms, vs = model(device)
    ps, gs = [p.to(dtype) for p in exact], [g.to(dtype) for g in gs]
    want = by_torch(exact, [[g.float() for g in gs]] * 2, lr=1e-4)
    for t in (1, 2):
        adamw_step(ps, gs, ms, vs, (), exact, step=t, lr=1e-4)
    close(exact, want)
    eps = torch.finfo(dtype).eps  # the interpreter cuts digits off, a GPU rounds
    assert all(((p.float() - x).abs() <= eps * x.abs() + 1e-7).all() for p, x in zip(ps, exact, strict=True))


def test_rounding_by_chance_is_right_on_average_and_the_same_for_a_seed(device):
    """Twenty steps, each of a tenth of what lies between two numbers of bfloat16."""

    def walked(seed):
        ps = [torch.ones(4000, dtype=torch.bfloat16, device=device)]
        state = [[torch.zeros(4000, device=device)] for _ in range(2)]
        for t in range(1, 21):
            adamw_step(ps, [torch.ones_like(ps[0])], *state, step=t, lr=2**-8 / 10, weight_decay=0.0, seed=seed)
        return ps[0].float()

    first = walked(1)
    # 1 - 2 steps; a single parameter strays by less than two steps, so the mean of 4000 by less than a thirtieth.
    assert abs((1 - first.mean().item()) / 2**-8 - 2) < 0.1
    assert first.unique().numel() > 3
    assert torch.equal(first, walked(1)) and not torch.equal(first, walked(2))


def test_chunks_and_tensors_are_rounded_by_bits_of_their_own(device):
    ps = [torch.ones(8192, dtype=torch.bfloat16, device=device) for _ in range(2)]  # two chunks each, of whatever plan
    state = [[torch.zeros(8192, device=device) for _ in ps] for _ in range(2)]
    adamw_step(ps, [torch.ones_like(p) for p in ps], *state, step=1, lr=2**-9, weight_decay=0.0, seed=1)
    chunks = [chunk for p in ps for chunk in p.view(2, 4096)]
    assert all(chunk.unique().numel() == 2 for chunk in chunks)
    assert not any(torch.equal(a, b) for i, a in enumerate(chunks) for b in chunks[:i])


def test_bits_are_those_of_a_place_in_a_tensor_however_chunks_are_cut(device, monkeypatch):
    def rounded(*sizes, kind=torch.bfloat16):  # of the first gradient
        ps = [torch.ones(n, dtype=torch.bfloat16, device=device) for n in sizes]
        gs, ms, vs = ([t.clone() for t in ps] for _ in range(3))
        gs[0] = gs[0].to(kind)
        adamw_step(ps, gs, ms, vs, step=1, lr=1e-3, weight_decay=0.0, seed=1)
        return ps

    before, want = rounded(700, 5000)
    assert want.unique().numel() == 2
    assert torch.equal(rounded(9, 5000, 700)[1], want), "tensors of other sizes before it, and one behind"
    assert torch.equal(rounded(9000)[0][:700], before)
    for n in (0, 700):
        assert torch.equal(rounded(n, 700, 5000, kind=torch.float32)[2], want), "a tensor of other dtypes"
    for plan in (module.Plan(256, 1, 4), module.Plan(1024, 4, 4)):
        monkeypatch.setattr(module, "_adamw_plan", lambda *_, plan=plan: plan)
        module._known.clear()
        assert torch.equal(rounded(9, 5000)[1], want)


def test_groups_of_one_list_and_seeds_of_64_bits_have_random_bits_of_their_own(device):
    def rounded(seed):
        ps = [torch.ones(1024, dtype=torch.bfloat16, device=device) for _ in range(2)]
        gs = [torch.ones(1024, dtype=kind, device=device) for kind in (torch.bfloat16, torch.float32)]
        ms, vs = ([torch.zeros_like(g) for g in gs] for _ in range(2))
        adamw_step(ps, gs, ms, vs, step=1, lr=2**-9, weight_decay=0.0, seed=seed)
        return ps

    both = [p for seed in (1, 2**32 + 1, -1) for p in rounded(seed)]
    assert all(p.unique().numel() == 2 for p in both)
    assert not any(torch.equal(a, b) for i, a in enumerate(both) for b in both[:i])


def test_rounding_by_chance_keeps_what_is_exact_and_what_is_not_finite(device):
    ps = [torch.tensor([1.5, -2.0, 0.0, math.inf, -math.inf, math.nan], device=device).bfloat16()]
    before = ps[0].clone()
    zeros = [[torch.zeros_like(ps[0])] for _ in range(3)]
    adamw_step(ps, *zeros, step=1, weight_decay=0.0, seed=3)
    torch.testing.assert_close(ps[0], before, rtol=0, atol=0, equal_nan=True)


def test_a_seed_gives_the_same_bits_where_triton_looks_for_overflow(device, monkeypatch):
    def rounded():
        ps = [torch.tensor([1.5, -2.0, math.nan, -math.nan] * 64, device=device).bfloat16()]
        adamw_step(ps, *[[torch.ones_like(ps[0])] for _ in range(3)], step=1, lr=1e-3, seed=3)
        return ps[0]

    want = rounded()
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)  # as by TRITON_DEBUG=1
    if module.INTERPRETED:
        builder = triton.runtime.interpreter.interpreter_builder
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    torch.testing.assert_close(rounded(), want, rtol=0, atol=0, equal_nan=True)


# Lists ----------------------------------------------------------------------------------------------------------------


def test_a_list_of_several_dtypes_is_stepped_whole_and_counted_once(device):
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    ps, gs, ms, vs = ([t.to(k) for t, k in zip(ts, kinds, strict=True)] for ts in model(device, [(7,)] * 4))
    want = [by_torch([p], [[g]], lr=0.1)[0] for p, g in zip(ps, gs, strict=True)]
    count = torch.zeros((), device=device)
    adamw_step(ps, gs, ms, vs, step=count, lr=0.1)
    assert count.item() == 1
    for p, w in zip(ps, want, strict=True):
        close([p], [w], 2e-2 if p.dtype == torch.bfloat16 else 1e-6)


def test_tensors_may_lie_in_any_order_of_their_axes_and_begin_anywhere(device):
    def laid(t, i):
        """Not aligned, or with its axes in another order."""
        memory = torch.empty(t.numel() + i, device=device)[i:]
        return memory.view(t.mT.shape).copy_(t.mT).mT if i else t.mT.contiguous().mT

    lists = [[laid(t, i % 3) for t in ts] for i, ts in enumerate(model(device, [(40, 60), (3, 5)]))]
    ps, gs, *_ = lists
    assert ps[0].data_ptr() % 16 == 0 and gs[0].data_ptr() % 16
    want = by_torch(ps, [gs], lr=0.1)
    adamw_step(*lists, step=1, lr=0.1)
    close(ps, want)
    # Nobody steps along an axis of one.
    ps, gs, ms, vs = ([t.as_strided((4, 1), (1, 7))] for (t,) in model(device, [(4,)]))
    want = by_torch(ps, [gs], lr=0.1)
    adamw_step(ps, gs, ms, vs, step=1, lr=0.1)
    close(ps, want)
    # Only a gradient begins in the middle of a vector.
    ps, gs, ms, vs = model(device, [(40, 60)])
    gs = [torch.empty(2401, device=device)[1:].view(40, 60).copy_(gs[0])]
    want = by_torch(ps, [gs], lr=0.1)
    adamw_step(ps, gs, ms, vs, step=1, lr=0.1)
    close(ps, want)


def test_tensors_that_touch_share_nothing(device):
    p, g, m, v = torch.rand(4, 8, device=device) * torch.tensor([[1.0], [1], [0], [0]], device=device)
    want = by_torch([p.clone()], [[g.clone()]], lr=0.1)
    adamw_step([p], [g], [m], [v], step=1, lr=0.1)
    close([p], want)


def test_others_in_the_same_memory_are_known(device):
    module._known.clear()  # a list that another test left at the same address keeps its place there
    ps, gs, ms, vs = model(device, [(8,), (8,)])
    adamw_step(ps, gs, ms, vs, step=1)
    of = list(module._known.values())[-1]
    others = [[t.detach() for t in tensors] for tensors in (ps, ms, vs)]
    adamw_step(others[0], gs, *others[1:], step=2)
    assert list(module._known.values())[-1] is of
    adamw_step(
        [p.view(2, 4) for p in ps], [g.view(2, 4) for g in gs], *([t.view(2, 4) for t in ts] for ts in (ms, vs)), step=3
    )
    assert list(module._known.values())[-1] is not of


def test_a_step_that_is_refused_leaves_no_gradients(device):
    ps, gs, ms, vs = model(device, [(8,), (8,)])
    want = by_torch(ps, [gs, gs], lr=0.01)
    adamw_step(ps, gs, ms, vs, step=1, lr=0.01)
    others = [torch.ones_like(g) for g in gs]
    with pytest.raises(ValueError, match="apart from gradients"):
        adamw_step(ps, others, ms, vs, step=others[1][3])
    adamw_step(ps, gs, ms, vs, step=2, lr=0.01)
    close(ps, want)


@pytest.mark.parametrize("shapes", [[(8,)], [(8,), (0,), (12,)]], ids=len)
def test_gradients_that_move_are_found_and_those_in_what_is_written_refused(shapes, device):
    """One is an argument of the launch, several are in a table."""
    ps, gs, ms, vs = model(device, shapes)
    want = by_torch(ps, [gs, [2 * g for g in gs], gs], lr=0.01)
    for t, now in enumerate((gs, [2 * g for g in gs], gs), 1):
        adamw_step(ps, [g.clone() for g in now], ms, vs, step=t, lr=0.01)
    close(ps, want)
    memory = torch.zeros(44, device=device)
    p, m, v = memory[10:18], memory[18:26], memory[26:34]
    for first in (0, 2, 34):
        adamw_step([p], [memory[first : first + 8]], [m], [v], step=1)
    for first in (3, 14, 33):
        with pytest.raises(ValueError, match="expected gradients apart from what is written"):
            adamw_step([p], [memory[first : first + 8]], [m], [v], step=1)


def test_parameters_without_a_gradient_stay(device):
    ps, gs, ms, vs = model(device)
    before = [p.clone() for p in ps]
    want = by_torch(ps, [[None, gs[1], None, None, gs[4]]], lr=0.1)
    adamw_step(ps, [None, gs[1], None, None, gs[4]], ms, vs, step=1, lr=0.1)
    close(ps, want)
    assert torch.equal(ps[0], before[0]) and not torch.equal(ps[1], before[1])
    count = torch.tensor(3, device=device)
    for step in (2, count):
        adamw_step(ps, [None] * 5, ms, vs, step=step)
    assert count == 3
    adamw_step([], [], [], [], step=1)


def test_a_saved_parameter_may_be_stepped_before_its_gradient(device):
    ps, gs, ms, vs = model(device)
    want = by_torch(ps, [gs, gs], lr=0.1)
    x = torch.ones(5, device=device, requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = (x.sum() * ps[1]).sum()
        before = ps[1].sum()
        for step in (1, 2):
            adamw_step(ps, gs, ms, vs, step=step, lr=0.1)
        loss.backward()
    close(ps, want)
    close([x.grad], [before.expand(5)])


def test_parameters_may_share_a_gradient(device):
    ps, gs, ms, vs = model(device, [(40,), (40,), (40,)])
    gs = [gs[0], gs[0], torch.cat([gs[0], gs[1]])[20:60]]
    want = by_torch(ps, [gs] * 2, lr=0.1)
    for step in (1, 2):
        adamw_step(ps, gs, ms, vs, step=step, lr=0.1)
    close(ps, want)


def test_parameters_that_require_gradients_are_stepped_as_they_are(device):
    ps, gs, ms, vs = model(device)
    want = by_torch(ps, [gs], lr=0.1)
    own = [torch.nn.Parameter(p) for p in ps]
    adamw_step(own, gs, ms, vs, step=1, lr=0.1)
    close([p.detach() for p in own], want)


def test_a_step_in_inference_mode(device):
    with torch.inference_mode():
        ps, gs, ms, vs = model(device, [(4,)])
        before = ps[0].clone()
        adamw_step(ps, gs, ms, vs, step=1)
        assert not torch.equal(ps[0], before)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kept", range(11))
def test_a_graph_that_kept_what_was_stepped_notices(kept, inference, device):
    """Both tensors of every list that is written, and the count; in inference mode the step is a number."""
    ps, gs, ms, vs = model(device, [(4,), (1500,)], torch.bfloat16)
    tops = [torch.zeros_like(v) for v in vs]
    exact, count = [p.float() for p in ps], torch.zeros((), device=device)
    written = [*ps, *ms, *vs, *tops, *exact, count][kept]
    factor = torch.ones_like(written, requires_grad=True)
    loss = (factor * written).sum()
    with torch.inference_mode(inference):
        adamw_step(ps, gs, ms, vs, tops, exact, step=1 if inference and written is not count else count)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_more_lists_are_known_than_the_limit(device, monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_LISTS", 3)
    alive = [model(device, [(4,)]) for _ in range(8)]
    for lists in alive:
        adamw_step(*lists, step=1)
        assert 1 <= len(module._known) <= 3


def test_what_is_known_of_a_list_holds_for_no_other(device):
    """Everything that may change between two steps of a list whose first parameter stays."""
    ps, gs, ms, vs = model(device, [(40,), (9,)])
    adamw_step(ps, gs, ms, vs, step=1, lr=0.1)

    def right(step):
        want = [p.double() for p in ps]
        state = [[t.double() for t in ts] for ts in (gs, ms, vs)]
        fusebook.adamw_step_eager(want, *state, step, 0.1, 0.9, 0.999, 1e-8, 0.01)
        adamw_step(ps, gs, ms, vs, step=step, lr=0.1)
        return all(torch.allclose(p.double(), w, rtol=1e-5) for p, w in zip(ps, want, strict=True))

    kept = [t.clone() for t in (*gs, *ms)]  # so that no memory is had again
    gs = [3 * g for g in gs]
    assert right(2), "gradients moved"
    ps[1].data, kept[0] = ps[1].data.clone(), ps[1].data
    assert right(3), "a parameter's memory was exchanged"
    ms[1] = ms[1].clone()
    assert right(4), "another average"
    ps[1].data, gs[1], ms[1], vs[1] = ps[1].data[:5], gs[1][:5], ms[1][:5], vs[1][:5]
    assert right(5), "shorter, at the same address"
    gs[1] = gs[1].double().float()
    with pytest.raises(ValueError, match=r"exp_avgs\[1\] of shape"):  # shorter, at the same address
        adamw_step(ps, gs, [ms[0], ms[1][:3]], vs, step=6)
    kept.append(gs[1])
    assert right(6)
    ps, gs, ms, vs = ([t.double() for t in ts] for ts in (ps, gs, ms, vs))
    assert right(7), "another dtype"


def test_a_tensor_that_lies_where_one_was_is_another(device):
    """An object of Python may lie where one lay that is gone, with its numbers at the same address."""
    ps, gs, ms, vs = model(device, [(8,), (8,)])
    adamw_step(ps, gs, ms, vs, step=1)
    was, address, memory = id(ms[1]), ms[1].data_ptr(), ms[1].untyped_storage()
    ms[1] = None
    others = [torch.empty(0, device=device).set_(memory, 0, (4,)) for _ in range(100)]
    ms[1] = next((t for t in others if id(t) == was), others[0])
    assert ms[1].data_ptr() == address
    with pytest.raises(ValueError, match=r"exp_avgs\[1\] of shape"):
        adamw_step(ps, gs, ms, vs, step=2)


@pytest.mark.parametrize("which", range(4), ids=["params", "grads", "exp_avgs", "exp_avg_sqs"])
@pytest.mark.parametrize("change", ["shorter", "transposed", "resized", "another dtype"])
def test_what_changes_in_an_object_that_is_known_is_noticed(change, which, device):
    """The object is the same and begins at the same address."""
    lists = model(device, [(8, 8), (8, 8)])
    adamw_step(*lists, step=1)
    t = lists[which][1]
    if change == "resized":
        t.resize_(2, 3)
    else:
        t.data = {"shorter": t[:4], "transposed": t.t(), "another dtype": t.view(torch.bfloat16)[:, :8]}[change]
    before = [t.clone() for ts in lists for t in ts]
    with pytest.raises((TypeError, ValueError), match=r"adamw_step: expected (grads|exp_avgs|exp_avg_sqs|params)\[1\]"):
        adamw_step(*lists, step=2)
    close([t for ts in lists for t in ts], before, 0)


def test_a_gradient_that_is_recorded_is_refused_after_a_step_that_was_not(device):
    ps, gs, ms, vs = model(device, [(4,)])
    gs[0].requires_grad_()
    with torch.no_grad():
        adamw_step(ps, gs, ms, vs, step=1)
    with pytest.raises(NotImplementedError, match="expected no gradient to be asked for"):
        adamw_step(ps, gs, ms, vs, step=2)


def test_a_step_does_not_wait_for_one_of_another_thread(device, monkeypatch):
    """Which the handler of a signal may wait for, in the middle of a step. Both have tables of their own."""
    lists, want = ([[t.clone() for t in ts] for ts in model(device, [(4, 8), (3,)])] for _ in range(2))
    others = [g + 1 for g in lists[1]]
    for _ in range(2):  # the second time, the list is known
        launch = module._Group.launch
        thread = threading.Thread(target=lambda: adamw_step(lists[0], others, *lists[2:], step=1), daemon=True)

        def launched(*args, launch=launch, thread=thread):
            monkeypatch.setattr(module._Group, "launch", launch)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            launch(*args)

        monkeypatch.setattr(module._Group, "launch", launched)
        adamw_step(*lists, step=2)
        adamw_step(want[0], others, *want[2:], step=1)
        adamw_step(*want, step=2)
    close([t for ts in lists for t in ts], [t for ts in want for t in ts], 0)


@needs_cuda
def test_memory_of_a_list_that_is_dropped_is_free_when_other_streams_have_read_it(monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    lists, want = model("cuda", [(64,)] * 300), model("cuda", [(64,)] * 300)
    adamw_step(*lists, step=1)
    adamw_step(*want, step=1)
    adamw_step(*want, step=2)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
        adamw_step(*lists, step=2)
    module._known.clear()
    taken = [torch.zeros(2**k, device="cuda") for k in range(4, 16) for _ in range(20)]
    torch.cuda.synchronize()
    assert taken
    close([t for ts in lists for t in ts], [t for ts in want for t in ts], 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("known", [False, True])
def test_a_step_is_captured_while_another_device_is_current(known):
    lists, want = (model("cuda:1", [(8,), (3,)]) for _ in range(2))
    grads = [g.clone() for g in lists[1]]
    if known:
        adamw_step(*lists, step=1)
        adamw_step(*want, step=1)
    torch.cuda.synchronize(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)), torch.cuda.device(0):
        adamw_step(lists[0], grads, *lists[2:], step=2)
    adamw_step(lists[0], [g + 1 for g in grads], *lists[2:], step=2)  # has other tables
    adamw_step(want[0], [g + 1 for g in grads], *want[2:], step=2)
    for _ in range(3):
        graph.replay()
        adamw_step(want[0], grads, *want[2:], step=2)
    torch.cuda.synchronize(1)
    close([t for ts in lists for t in ts], [t for ts in want for t in ts], 0)


@pytest.mark.parametrize("watched", [False, True])
def test_a_step_that_fails_behind_its_first_launch_is_noticed(watched, device, monkeypatch):
    """By a graph that kept what that one wrote. A later step finds no table of the step that failed."""
    ps, gs, ms, vs = ([t, t.double()] for [t] in model(device, [(8,)]))
    x, launch, launched = torch.ones(8, device=device, requires_grad=True), module._Group.launch, []

    def failing(self, *args):
        if launched:
            raise KeyboardInterrupt
        launched.append(launch(self, *args))

    monkeypatch.setattr(module._Group, "launch", failing)
    loss = (x * ps[0]).sum()
    with pytest.raises(KeyboardInterrupt), FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        adamw_step(ps, gs, ms, vs, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    monkeypatch.undo()
    want = by_torch(ps[1:], [gs[1:]])
    adamw_step(ps, gs, ms, vs, step=1)
    close(ps[1:], want)


def test_a_compiled_function_may_begin_eagerly(device):
    """Then torch.compile looks at every function that is called."""
    lists, want = ([model(device, [(5,), (6,)]), model(device, [(8,), (9,)])] for _ in range(2))

    def stepped(lists, step):
        for some in (*lists, *lists):
            adamw_step(*some, step=step)
        return lists[0][0][0] * 1

    with torch.compiler.set_stance("eager_then_compile"):
        run = torch.compile(stepped, backend="aot_eager")
        for step in (1, 2, 3):
            run(lists, step)
            stepped(want, step)
    close([t for some in lists for ts in some for t in ts], [t for some in want for ts in some for t in ts], 0)


@pytest.mark.parametrize("watched", [False, True])
def test_a_graph_that_another_thread_makes_during_a_step_notices(watched, device, monkeypatch):
    ps, gs, ms, vs = model(device, [(8,)])
    x, launch, losses = torch.ones(8, device=device, requires_grad=True), module._Group.launch, []

    def launched(self, *args):
        thread = threading.Thread(target=lambda: losses.append((x * ps[0]).sum()))
        thread.start()
        thread.join()
        launch(self, *args)

    monkeypatch.setattr(module._Group, "launch", launched)
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        adamw_step(ps, gs, ms, vs, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()


@pytest.mark.parametrize("counted", [False, True])
def test_a_step_within_a_step_of_the_same_list_changes_no_gradients(counted, device, monkeypatch):
    """As by the handler of a signal, which may come at any time."""
    ps, gs, ms, vs = model(device, [(8,), (8,)])
    others = [g + 1 for g in gs]
    want = by_torch(ps, [gs, others, gs, gs], lr=0.01)
    count, launch = torch.zeros((), device=device), module._Group.launch

    def step(number, grads):
        adamw_step(ps, grads, ms, vs, step=count if counted else number, lr=0.01)

    def interrupted(self, *args):
        monkeypatch.undo()
        step(2, others)
        launch(self, *args)

    step(1, gs)
    gs = [g.clone() for g in gs]
    monkeypatch.setattr(module._Group, "launch", interrupted)
    step(3, gs)
    step(4, gs)
    close(ps, want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["params", "exp_avgs", "exp_avg_sqs"])
def test_a_nested_state_is_refused_after_a_step_at_the_same_address(name, device):
    lists = dict(zip(("params", "grads", "exp_avgs", "exp_avg_sqs"), model(device, [(2, 3), (2, 3)]), strict=True))
    adamw_step(*lists.values(), step=1)
    sizes, strides, starts = torch.tensor([[3], [3]]), torch.tensor([[1], [1]]), torch.tensor([0, 3])
    lists[name][1] = torch._nested_view_from_buffer(lists[name][1].view(-1), sizes, strides, starts)
    with pytest.raises(TypeError, match=rf"expected {name}\[1\] to be dense, got a nested tensor"):
        adamw_step(*lists.values(), step=2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_gradient_is_refused_after_a_step(device):
    ps, gs, ms, vs = model(device, [(2, 3), (2, 3)])
    adamw_step(ps, gs, ms, vs, step=1)
    gs[1] = torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], device=device)
    with pytest.raises(TypeError, match=r"expected grads\[1\] to be dense, got a nested tensor"):
        adamw_step(ps, gs, ms, vs, step=2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:There is a performance drop")
def test_a_member_of_a_nested_tensor_is_refused_after_a_step(device):
    ps, gs, ms, vs = model(device, [(2, 3), (2, 3)])
    adamw_step(ps, gs, ms, vs, step=1)
    nested = torch.nested.nested_tensor([torch.ones(2, 3)] * 2, device=device)
    kept: list[Any] = []
    torch.vmap(lambda g: (kept.append(g), g.sin())[1])(nested)
    with pytest.raises(TypeError, match=r"expected grads\[1\] with memory for its elements"):
        adamw_step(ps, [gs[0], kept[0]], ms, vs, step=2)


class OwnSizes(torch.Tensor):
    """A subclass with memory that answers for its sizes itself, as often as `answers` says."""

    answers = itertools.repeat(None)

    @staticmethod
    def __new__(cls, data):
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device,
            dispatch_sizes_strides_policy="sizes",
        )  # fmt: skip
        made.data = made.of = data
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if next(cls.answers, cls) is cls:
            raise RuntimeError("no more answers")
        return function(*[getattr(a, "of", a) for a in args], **(kwargs or {}))


@pytest.mark.parametrize("answers", range(8))
def test_a_failing_subclass_fails_in_a_known_list_too(answers, device, monkeypatch):
    ps, gs, ms, vs = model(device, [(2, 3), (2, 3)])
    ps[1] = OwnSizes(ps[1])
    adamw_step(ps, gs, ms, vs, step=1)
    monkeypatch.setattr(OwnSizes, "answers", itertools.repeat(None, answers))
    with pytest.raises((RuntimeError, TypeError), match=r"no more answers|expected params\[1\] with memory"):
        adamw_step(ps, gs, ms, vs, step=2)


def test_a_list_that_an_operator_stepped_in_inference_mode_is_stepped_outside(device):
    ps, gs, ms, vs = model(device, [(2, 3), (2, 3)])
    others = [g + 1 for g in gs]
    want = by_torch(ps, [gs, others], lr=0.01)
    with torch.inference_mode(), torch._C._AutoDispatchBelowAutograd():
        adamw_step(ps, gs, ms, vs, step=1, lr=0.01)
    with torch._C._AutoDispatchBelowAutograd():
        adamw_step(ps, others, ms, vs, step=2, lr=0.01)
    close(ps, want)


@pytest.mark.parametrize("known", [False, True])
def test_a_subclass_that_says_other_sizes_is_stepped_in_its_memory(known, device):
    class Shard(torch.Tensor):
        """A part that says the size of the whole."""

        def numel(self):
            return 2 * super().numel()

        def data_ptr(self):
            return super().data_ptr() + 4

    memory, (gs, ms, vs) = torch.ones(4, 64, device=device), model(device, [(64,), (64,)])[1:]
    ps = [memory[0], memory[2]]
    want = by_torch(ps, [gs] * (1 + known), lr=0.01)
    if known:
        adamw_step(ps, gs, ms, vs, step=1, lr=0.01)
    adamw_step([ps[0], ps[1].as_subclass(Shard)], gs, ms, vs, step=1 + known, lr=0.01)
    close([memory[0], memory[2]], want)
    assert torch.equal(memory[1::2], torch.ones(2, 64, device=device))
    ps, gs, ms, vs = model(device, [(64,)])
    want = by_torch(ps, [gs], lr=0.01)
    adamw_step(ps, [torch.cat([gs[0], gs[0]])[:64].as_subclass(Shard)], ms, vs, step=1, lr=0.01)
    close(ps, want)


def test_a_count_of_a_subclass_is_read_and_written_in_its_memory(device):
    class Other(torch.Tensor):
        def data_ptr(self):
            return super().data_ptr() + 4

    ps, gs, ms, vs = model(device, [(64,), (64,)])
    want, memory = by_torch(ps, [gs, gs], lr=0.01), torch.zeros(2, device=device)
    for _ in range(2):
        adamw_step(ps, gs, ms, vs, step=memory[0].as_subclass(Other), lr=0.01)
    close(ps, want)
    assert memory.tolist() == [2, 0]


@pytest.mark.parametrize(("name", "value"), [("dtype", torch.bfloat16), ("is_meta", True)])
def test_a_subclass_that_says_another_kind_is_stepped_as_its_memory(name, value, device):
    """As a parameter may tell in which dtype it is multiplied."""
    subclass = type("Other", (torch.Tensor,), {name: property(lambda self: value)})
    for shapes in ([(64,), (64,)], [(64,)]):
        ps, gs, ms, vs = model(device, shapes)
        want = by_torch(ps, [gs], lr=0.01)
        given = *([t.as_subclass(subclass) for t in of] for of in (ps, gs)), ms, vs
        adamw_step(*given, step=1, lr=0.01)
        close(ps, want)
        if name == "dtype":
            with pytest.raises(TypeError, match=r"expected bfloat16 where a seed .*, got torch.float32"):
                adamw_step(*given, step=2, seed=1)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs"])
def test_a_wrapper_that_shows_the_storage_of_what_it_wraps_is_refused(name, known, device):
    """As quantised weights do, whose own address is 0."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, of):
            made = torch.Tensor._make_wrapper_subclass(
                cls, of.shape, strides=of.stride(), dtype=of.dtype, device=of.device
            )
            made.of = of
            return made

        def untyped_storage(self):
            return self.of.untyped_storage()

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return function(*[getattr(a, "of", a) for a in args], **(kwargs or {}))

    lists = dict(zip(("params", "grads", "exp_avgs", "exp_avg_sqs"), model(device, [(8,), (8,)]), strict=True))
    if known:
        adamw_step(*lists.values(), step=1)
    lists[name][1] = Wrapper(torch.ones(64, device=device)[8:16])
    with pytest.raises(TypeError, match=rf"expected {name}\[1\] with memory for its elements, got Wrapper without"):
        adamw_step(*lists.values(), step=2)


def test_a_known_list_keeps_its_kernel(device, monkeypatch):
    """Triton unloads one that nobody holds, which its own cache drops where two threads compile it at once."""

    class Kernel:
        packed_metadata, function, metadata = (1,), 1, None
        run = staticmethod(lambda *args: None)

    kept = []

    def launched(*args, **constants):
        kernel = Kernel()
        kept.append(weakref.ref(kernel))
        return kernel

    monkeypatch.setattr(module, "launch", launched)
    adamw_step(*model(device, [(4,)]), step=1)
    assert kept[0]() is not None


def test_a_step_is_traced_ahead_of_autograd(device):
    lists = model(device, [(4,)])
    adamw_step(*lists, step=1)
    traced = make_fx(lambda *lists: adamw_step(*lists, step=2), pre_dispatch=True)(*lists)
    assert torch.ops.fusebook.adamw_step.default in [node.target for node in traced.graph.nodes]


@needs_cuda
@pytest.mark.parametrize("known", [False, True])
def test_a_compiled_function_that_steps_may_be_held_by_cuda_graphs(known):
    ps, gs, ms, vs = model("cuda", [(8, 3), (5,)])
    count, want = torch.zeros((), device="cuda"), by_torch(ps, [gs] * (known + 6), lr=0.01)
    step = functools.partial(adamw_step, step=count, lr=0.01)
    if known:
        step(ps, gs, ms, vs)
    for tensor in (*ps, *ms, *vs, count):
        torch._dynamo.mark_static_address(tensor)

    @torch.compile(mode="reduce-overhead")
    def train(grads):
        grads = [g * 1 for g in grads]
        step(ps, grads, ms, vs)
        return sum(g.sum() for g in grads)

    for _ in range(6):
        train([g.clone() for g in gs])
    close(ps, want)


@needs_cuda
def test_the_host_has_its_part_of_the_tables_whatever_the_default_device_is():
    code = """if True:
        import torch
        from fusebook import adamw_step
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        adamw_step(*([torch.ones(4)] for _ in range(4)), step=1)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@needs_cuda
def test_tensors_on_a_gpu_are_refused_where_triton_interprets():
    code = """if True:
        import torch
        from fusebook import adamw_step
        ps, gs, ms, vs = ([torch.ones(4, device="cuda")] for _ in range(4))
        try:
            adamw_step(ps, gs, ms, vs, step=1)
        except ValueError as error:
            print(error)
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "expected tensors on the CPU where Triton interprets" in done.stdout


def test_a_tangent_is_refused(device):
    ps, gs, ms, vs = model(device, [(4,)])

    def stepped(g):
        adamw_step(ps, [g], ms, vs, step=1)
        return g

    with pytest.raises(NotImplementedError, match="expected grads without tangents"):
        torch.func.jvp(stepped, (gs[0],), (gs[0],))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_count_may_be_as_large_as_its_dtype(dtype, device):
    ps, gs, ms, vs = model(device, [(9,)])
    done = torch.iinfo(torch.int32).max - 1 if dtype == torch.int32 else 3 * 10**9
    want = [p.double() for p in ps]
    state = [[t.double() for t in ts] for ts in (gs, ms, vs)]
    fusebook.adamw_step_eager(want, *state, done + 1, 0.1, 0.9, 0.999, 1e-8, 0.01)
    adamw_step(ps, gs, ms, vs, step=torch.tensor(done, dtype=dtype, device=device), lr=0.1)
    close([p.double() for p in ps], want)


def test_strides_of_axes_of_length_1_decide_nothing(device):
    last = torch.randn(2, 3, 1, 1, device=device).to(memory_format=torch.channels_last)
    assert last.stride() == (3, 1, 3, 3)
    row = torch.randn(5, 1, device=device).t()
    odd = torch.randn(40, device=device).as_strided((1, 5, 1), (77, 1, 0))
    ps, gs = [last, row, odd], [torch.randn(p.shape, device=device) for p in (last, row, odd)]
    ms, vs = ([torch.zeros(p.shape, device=device) for p in ps] for _ in range(2))
    want = by_torch(ps, [gs] * 2, lr=0.1)
    for step in (1, 2):
        adamw_step(ps, gs, ms, vs, step=step, lr=0.1)
    close(ps, want)


def test_a_small_gradient_after_a_large_one_is_kept_where_beta1_is_small(device):
    ps, gs, ms, vs = model(device, [(9,)])
    given = [[30 * g for g in gs], [1e-6 * g for g in gs]]
    want = by_torch(ps, given, lr=0.1, betas=(0.0, 0.0))
    for step, grads in enumerate(given, 1):
        adamw_step(ps, grads, ms, vs, step=step, lr=0.1, beta1=0.0, beta2=0.0)
    close(ps, want)
    assert torch.equal(ms[0], given[1][0])


# Memory ---------------------------------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor whose elements are in another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("nothing is computed")


def faked(t):
    with FakeTensorMode():
        return torch.empty(t.shape, device=t.device)


def leaked(t):
    found = []
    torch.vmap(lambda x: found.append(x) or x)(t[None])
    return found[0]


def freed(t):
    """Its address is not 0, but how far behind the beginning of freed storage it is."""
    found = torch.zeros(2, *t.shape, device=t.device)[1]
    found.untyped_storage().resize_(0)
    return found


def shrunk(t):
    found = t.clone()
    found.untyped_storage().resize_(max(1, t.numel() - 1) * t.element_size() // 2)
    return found


WITHOUT = {
    "a wrapper": Wrapper,
    "a functional tensor": torch._to_functional_tensor,
    "zeros": lambda t: torch._efficientzerotensor(t.shape, device=t.device),
    "a fake tensor": faked,
    "a batch of vmap": leaked,
    "freed storage": freed,
    "storage that shrank": shrunk,
}
PLACES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "step", "lr", "norm")


def with_one(place, change, device):
    lists = dict(zip(PLACES, model(device, [(4, 8), (3,)]), strict=False))
    if place in lists:
        lists[place][0] = change(lists[place][0])
        return lists | {"step": 1}
    return lists | {"step": 1} | {place: change(torch.ones((), device=device))}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", WITHOUT.values(), ids=WITHOUT)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_memory_is_refused_wherever_it_is(change, place, device):
    with pytest.raises(TypeError, match=rf"adamw_step: expected {place}\S* with memory for its elements, got .*; pass"):
        adamw_step(**with_one(place, change, device))


@pytest.mark.parametrize("place", PLACES[:4])
def test_storage_that_is_freed_between_steps_is_noticed(place, device):
    lists = dict(zip(PLACES, model(device, [(4, 8), (3,)]), strict=False))
    adamw_step(**lists, step=1)
    t = lists[place][1]
    t.data = freed(t)
    with pytest.raises(TypeError, match="with memory for its elements"):
        adamw_step(**lists, step=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are on the CPU, which is refused first")
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_dtensor_is_refused_and_says_what_to_pass(place, watched):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        given = with_one(place, lambda t: distribute_tensor(t, mesh, [Replicate()]), "cpu")
        with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
            with pytest.raises(TypeError, match=r"adamw_step: expected .* got a DTensor; pass to_local\(\)"):
                adamw_step(**given)
    finally:
        dist.destroy_process_group()


def test_no_kernel_writes_beside_what_it_is_given_in_any_mixture_of_dtypes(device):
    """Each of five lists in each dtype: a list that is taken for a wider one would be written beyond its end."""
    dtypes, n, taken = (torch.float16, torch.bfloat16, torch.float32, torch.float64), 37, 0
    for kinds in itertools.product(dtypes, dtypes, dtypes, dtypes, (None, *dtypes), (None, torch.float32)):
        if len(set(kinds) - {None}) > 2:
            continue
        around = [torch.full((n + 32,), 7.0, dtype=kind, device=device) for kind in kinds if kind]
        inside = iter(t[16 : 16 + n].fill_(0.5) for t in around)
        try:
            adamw_step(*([next(inside)] if kind else () for kind in kinds), step=1)
        except TypeError:
            continue
        taken += 1
        assert all((torch.cat([t[:16], t[16 + n :]]) == 7).all() for t in around), kinds
    assert taken == 36


def test_on_meta_a_step_is_checked_and_nothing_else(device):
    lists = [[t.to("meta") for t in ts] for ts in model(device)]
    count, rate, norm = torch.zeros(3, device="meta")
    assert adamw_step(*lists, step=1) is None
    assert adamw_step(*lists, step=count, lr=rate, norm=norm) is None
    with pytest.raises(ValueError, match=r"exp_avg_sqs\[1\] of shape"):
        adamw_step(*lists[:3], [lists[3][0], lists[3][1][:3], *lists[3][2:]], step=1)
    with pytest.raises(ValueError, match="expected step on meta"):
        adamw_step(*lists, step=torch.zeros(()))


def test_chunks_cover_every_number_once():
    sizes = [0, 1, 1023, 1024, 1025, 0, 5000]
    lists = [[torch.zeros(n) for n in sizes] for _ in range(3)]
    group = module._Group([*lists, [], []], (torch.float32,) * 3)
    chunk = group.plan.block * group.plan.steps
    covered = [(c >> 32, c & 0xFFFFFFFF) for c in group.chunks.tolist()]
    assert covered == [(i, c) for i, n in enumerate(sizes) for c in range(-(-n // chunk))]


def test_programs_that_all_run_at_once_have_short_chunks():
    on = (9, 0), 132
    at_once = 2**14 * 132
    assert module._adamw_plan(2, at_once, *on) == module.Plan(512, 1, 4)
    assert module._adamw_plan(2, at_once + 1, *on) == module.Plan(1024, 4, 4)
    assert module._adamw_plan(4, 1, *on) == module._adamw_plan(8, 2**30, *on) == module.Plan(1024, 1, 4)


# Bad input ------------------------------------------------------------------------------------------------------------

REFUSED = {
    "too few averages": (ValueError, "expected 2 exp_avgs", lambda p, g, m, v: dict(exp_avgs=m[:1])),
    "too few masters": (ValueError, "expected 2 masters", lambda p, g, m, v: dict(masters=m[:1])),
    "a tensor twice": (
        ValueError,
        "share no memory",
        lambda p, g, m, v: dict(params=[p[0]] * 2, grads=[g[0]] * 2, exp_avgs=[m[0]] * 2, exp_avg_sqs=[v[0]] * 2),
    ),
    "averages that overlap": (ValueError, "share no memory", lambda p, g, m, v: dict(exp_avg_sqs=[m[0], v[1]])),
    "parameters that overlap": (
        ValueError,
        "share no memory",
        lambda p, g, m, v: dict(params=[(whole := torch.zeros(12, device=p[0].device))[:8], whole[4:]]),
    ),
    "a gradient that ends in what is written": (
        ValueError,
        "apart from what is written",
        lambda p, g, m, v: dict(
            params=[(whole := torch.zeros(20, device=p[0].device))[4:12], p[1]], grads=[whole[:8], g[1]]
        ),
    ),
    "a gradient that is written": (
        ValueError,
        "apart from what is written",
        lambda p, g, m, v: dict(grads=[p[1], g[1]]),
    ),
    "a gradient elsewhere": (ValueError, "move one", lambda p, g, m, v: dict(grads=[g[0], g[1].to("meta")])),
    "a parameter elsewhere": (
        ValueError,
        "move one",
        lambda p, g, m, v: {
            k: [t[0], t[1].to("meta")]
            for k, t in zip(("params", "grads", "exp_avgs", "exp_avg_sqs"), (p, g, m, v), strict=True)
        },
    ),
    "a gradient of another shape": (
        ValueError,
        r"grads\[1\] of shape \(8,\)",
        lambda p, g, m, v: dict(grads=[g[0], g[1][:7]]),
    ),
    "gaps": (
        ValueError,
        "without gaps",
        lambda p, g, m, v: dict(params=[torch.zeros(16, device=p[0].device)[::2], p[1]]),
    ),
    "integers": (TypeError, "int64", lambda p, g, m, v: dict(params=[t.long() for t in p])),
    "averages of half precision": (TypeError, "float16", lambda p, g, m, v: dict(exp_avgs=[t.half() for t in m])),
    "averages of two dtypes": (
        TypeError,
        "of one dtype, got torch.bfloat16 and torch.float32",
        lambda p, g, m, v: dict(
            params=[t.bfloat16() for t in p], grads=[t.bfloat16() for t in g], exp_avgs=[t.bfloat16() for t in m]
        ),
    ),
    "largest v of another dtype": (
        TypeError,
        "max_exp_avg_sqs.0. and exp_avg_sqs.0. of one dtype, got torch.bfloat16 and torch.float32",
        lambda p, g, m, v: dict(
            params=[t.bfloat16() for t in p],
            grads=[t.bfloat16() for t in g],
            max_exp_avg_sqs=[t.bfloat16() for t in v],
        ),
    ),
    "masters of float32": (
        TypeError,
        "masters of float16 or bfloat16",
        lambda p, g, m, v: dict(masters=[t.clone() for t in m]),
    ),
    "a list as a tensor": (TypeError, "torch.Tensor, got list", lambda p, g, m, v: dict(params=[[1.0], p[1]])),
    "chance in float32": (TypeError, "bfloat16 where a seed", lambda p, g, m, v: dict(seed=1)),
    "step 0": (ValueError, "step of 1 or more", lambda p, g, m, v: dict(step=0)),
    "a count for each": (ValueError, "one number", lambda p, g, m, v: dict(step=torch.ones(2, device=p[0].device))),
    "lr below zero": (ValueError, "lr of 0 or more, got -1", lambda p, g, m, v: dict(lr=-1.0)),
    "lr is NaN": (ValueError, "lr of 0 or more, got nan", lambda p, g, m, v: dict(lr=math.nan)),
    "beta1 is 1": (ValueError, "beta1 from 0 to below 1", lambda p, g, m, v: dict(beta1=1.0)),
    "a norm that is written": (ValueError, "norm apart from what is written", lambda p, g, m, v: dict(norm=m[0][:1])),
    "a rate that is written": (ValueError, "lr apart from what is written", lambda p, g, m, v: dict(lr=v[1][7:])),
    "a count that is stepped": (ValueError, "step apart from what", lambda p, g, m, v: dict(step=p[0][3:4])),
    "a count that begins before what is written": (
        ValueError,
        "step apart from what is written",
        lambda p, g, m, v: dict(
            params=[(whole := torch.zeros(10, device=p[0].device))[1:9], p[1]], step=whole.view(torch.int64)[0]
        ),
    ),
    "a count that is the rate": (
        ValueError,
        "apart from lr",
        lambda p, g, m, v: dict(step=(c := m[0].new_ones(())), lr=c),
    ),
    "a count that is the norm": (
        ValueError,
        "apart from norm",
        lambda p, g, m, v: dict(step=(c := m[0].new_ones(())), norm=c),
    ),
    "a count in a gradient": (ValueError, "apart from gradients", lambda p, g, m, v: dict(step=g[1][7])),
    "no tensor, and a count": (
        TypeError,
        r"params\[0\] to be a torch.Tensor",
        lambda p, g, m, v: dict(params=[[1.0], p[1]], step=m[0].new_ones(())),
    ),
    "no tensor, and chance": (
        TypeError,
        r"params\[1\] to be a torch.Tensor",
        lambda p, g, m, v: dict(params=[p[0].bfloat16(), 3], seed=1),
    ),
    "lr that no float holds": (ValueError, "lr that float64 can hold", lambda p, g, m, v: dict(lr=10**400)),
    "a gradient of gradients": (
        NotImplementedError,
        "gradient",
        lambda p, g, m, v: dict(grads=[t.requires_grad_() for t in g]),
    ),
}


@pytest.mark.parametrize(("error", "message", "change"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_written(error, message, change, device):
    ps, gs, ms, vs = model(device, [(8,), (8,)])
    before = [t.clone() for t in (*ps, *ms, *vs)]
    given = {"params": ps, "grads": gs, "exp_avgs": ms, "exp_avg_sqs": vs, "step": 1} | change(ps, gs, ms, vs)
    with pytest.raises(error, match=message) as raised:
        adamw_step(**given)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(a, b) for a, b in zip((*ps, *ms, *vs), before, strict=True))


def by_operator(ps, gs, ms, vs, **options):
    """As code does that was compiled or exported before."""
    given = {"count": None, "step": 1, "rate": None, "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 0.0}
    given |= {"weight_decay": 0.0, "maximize": False, "seed": None, "norm": None, "max_norm": 1.0}
    torch.ops.fusebook.adamw_step(ps, gs, ms, vs, [], [], **given | options)


@pytest.mark.parametrize("single", ["count", "rate", "norm", "grad_scale", "found_inf"])
def test_the_operator_itself_refuses_what_is_not_one_number(single, device):
    lists = model(device, [(8,)])
    for size in (0, 2):
        with pytest.raises(ValueError, match=f"to be one number, got shape .{size},."):
            by_operator(*lists, **{single: torch.ones(size, device=device)})


@pytest.mark.parametrize(
    "options",
    [
        {"step": 0},
        {"lr": float("nan")},
        {"beta1": 1.0},
        {"beta2": -0.5},
        {"eps": -1.0},
        {"max_norm": -1.0},
        {"seed": 1},
    ],
    ids=str,
)
def test_the_operator_itself_refuses_numbers_out_of_range(options, device):
    lists = model(device, [(8,)])
    before = lists[0][0].clone()
    with pytest.raises((ValueError, TypeError), match=f"adamw_step: expected .*{next(iter(options))}"):
        by_operator(*lists, **options)
    assert torch.equal(lists[0][0], before)


@pytest.mark.parametrize("place", range(1, 4))
@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_operator_itself_refuses_lists_of_other_lengths(place, length, device):
    lists = list(model(device, [(8,), (8,)]))
    lists[place] = [torch.zeros(8, device=device) for _ in range(length)]
    with pytest.raises(ValueError, match=f"expected 2 {PLACES[place]} as there are params, got {length}"):
        by_operator(*lists)


@pytest.mark.parametrize("place", PLACES)
def test_one_tensor_on_meta_is_refused_under_a_dispatch_mode(place, device):
    """There the dispatcher takes all for tensors on meta, of which nothing is computed."""
    with (
        FlopCounterMode(display=False),
        pytest.raises(ValueError, match="expected .* as .* is, got .*; move one of them"),
    ):
        adamw_step(**with_one(place, lambda t: t.to("meta"), device))


def test_empty_lists_step_nothing_under_a_dispatch_mode():
    with FlopCounterMode(display=False):
        adamw_step([], [], [], [], step=1)
        with pytest.raises(ValueError, match="expected step of 1 or more, got 0"):
            adamw_step([], [], [], [], step=0)


def test_torch_compile_does_not_follow_into_the_operator(device):
    def both(lists, step):
        adamw_step(*lists, step=step)
        return [p + 1 for p in lists[0]], step

    def lists(dtype):
        return [[torch.full((3,), value, dtype=dtype, device=device)] for value in (1, 1, 0, 0)]

    torch._dynamo.reset()
    torch.compile(both, backend="eager")([[], [], [], []], torch.tensor(7.0))  # nothing to compile: it gives up
    torch.compile(both, backend="eager")(lists(torch.float32), 1)
    some, others = lists(torch.bfloat16), lists(torch.bfloat16)
    torch.compile(both, backend="aot_eager", dynamic=True)(some, 1)
    adamw_step(*others, step=1)
    assert torch.equal(some[0][0], others[0][0])


# The card -------------------------------------------------------------------------------------------------------------


def test_usual_mistakes_are_caught(device):
    sizes = {"numbers": 300, "tensors": 3, "sizes": "uneven", "kind": "plain"}
    inputs = ADAMW_STEP.make(generator(0, device), torch.float32, **sizes)
    yard = yardstick(ADAMW_STEP, inputs)

    def judged(change=lambda *lists: None, **options):
        ps, gs, ms, vs, _, _, t, lr = ADAMW_STEP.variants["fusebook"].prepare(*inputs)
        change(ps, gs, ms, vs)
        adamw_step(ps, gs, ms, vs, **({"step": t, "lr": lr, "weight_decay": 0.1} | options))
        return yard.judge((*ps, *ms, *vs)).ok

    assert judged()
    assert not judged(step=8) and not judged(weight_decay=0.0) and not judged(maximize=True) and not judged(eps=1e-3)
    assert not judged(lambda ps, gs, ms, vs: gs[1].zero_()), "a tensor left out"
    assert not judged(lambda ps, gs, ms, vs: [g.add_(p, alpha=0.1) for g, p in zip(gs, ps, strict=True)])


# A GPU ----------------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("moved", [False, True])
def test_a_captured_step_counts_and_copies_only_where_gradients_are_of_its_own(moved):
    ps, gs, ms, vs = model("cuda")
    factor = 2 if moved else 1
    want = by_torch(ps, [gs, *[[factor * g for g in gs]] * 3])
    count, graph = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    adamw_step(ps, gs, ms, vs, step=count)
    state = [t.clone() for t in (*ps, *ms, *vs)]
    with torch.cuda.graph(graph):
        adamw_step(ps, [2 * g for g in gs] if moved else gs, ms, vs, step=count)
    of, placed = module._captured[-1]
    assert (placed.told is of.placed.told) == (not moved)
    others = [3 * g for g in gs]
    adamw_step(ps, others, ms, vs, step=5)  # what is known of the list is another table
    assert of.placed.addresses == [g.data_ptr() for g in others]
    for t, was in zip((*ps, *ms, *vs), state, strict=True):
        t.copy_(was)
    for _ in range(3):
        graph.replay()
    close(ps, want, 1e-5)
    assert count.item() == 4


@needs_cuda
def test_a_captured_step_copies_nothing_where_gradients_have_stayed():
    """Lists may lie where freed ones lay, whose gradients were elsewhere."""
    ps, gs, ms, vs = model("cuda")
    adamw_step(ps, [g.clone() for g in gs], ms, vs, step=1)
    adamw_step(ps, gs, ms, vs, step=2)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        adamw_step(ps, gs, ms, vs, step=3)
    of, placed = module._captured[-1]
    assert placed.told is of.placed.told and placed.addresses == [g.data_ptr() for g in gs]


@needs_cuda
@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES], ids=len)
def test_steps_on_several_streams_follow_each_other(shapes):
    ps, gs, ms, vs = model("cuda", shapes)
    gradients = [[k * g for g in gs] for k in (1.0, -3.0, 0.5, 2.0)]
    want = by_torch(ps, gradients)
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    for t, now in enumerate(gradients, 1):
        streams[t % 2].wait_stream(streams[1 - t % 2])
        with torch.cuda.stream(streams[t % 2]):
            torch.cuda._sleep(10_000_000)
            adamw_step(ps, now, ms, vs, step=t)
    torch.cuda.synchronize()
    close(ps, want, 1e-5)
