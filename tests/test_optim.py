"""The optimizer: step by step against torch's own, and with all that people put around an optimizer."""

import copy
import io
import json
import math
import os
import pickle
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from triton.runtime.interpreter import InterpreterBuilder

import fusebook
from fusebook.optim import AdamW, _memory

BOTH = torch.optim.AdamW, AdamW
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def parameters(device, dtype=torch.float32):
    """Three axes in another order, a ragged chunk, none, one number without an axis."""
    torch.manual_seed(0)
    shapes = (33, 17), (1500,), (0,), ()
    ps = [torch.randn(3, 5, 4, device=device).to(dtype).permute(2, 0, 1)]
    return [torch.nn.Parameter(p) for p in ps + [torch.randn(s, device=device).to(dtype) for s in shapes]]


def gradients(ps, seed):
    """New gradients, with strides of their own."""
    torch.manual_seed(seed)
    for p in ps:
        p.grad = torch.randn(p.shape, device=p.device).to(p.dtype)


def after(optimizer, ps, steps, first=0):
    for i in range(first, first + steps):
        gradients(ps, i)
        optimizer.step()
    return optimizer


def close(got, want, rtol=1e-6):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def close_states(a, b, rtol=1e-6):
    a, b = a.state_dict()["state"], b.state_dict()["state"]
    assert a.keys() == b.keys()
    for i in a:
        assert a[i].keys() == b[i].keys()
        assert all(a[i][key].dtype == b[i][key].dtype for key in a[i])
        close(a[i].values(), [b[i][key].to(a[i][key].device) for key in a[i]], rtol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "weight_decay": 0.0},
        {"maximize": 1, "betas": (0.0, 0.5), "eps": 1e-3},
        {"capturable": True, "lr": torch.tensor(0.01, dtype=torch.float64)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_five_steps_are_those_of_torch(options, dtype, device):
    lists = [parameters(device, dtype) for _ in BOTH]
    theirs = {k: v for k, v in options.items() if k != "capturable"}
    if "lr" in options and device == "cuda":
        options = options | {"lr": options["lr"].cuda()}
    made = torch.optim.AdamW(lists[0], foreach=False, **theirs), AdamW(lists[1], **options)
    for optimizer, ps in zip(made, lists, strict=True):
        after(optimizer, ps, 5)
    close(*lists, 1e-6 if dtype == torch.float32 else 1e-14)
    close_states(*made, 1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_of_half_types_a_step_is_that_of_float32_rounded_once(dtype, device):
    ps = parameters(device, dtype)
    exact = [torch.nn.Parameter(p.detach().float()) for p in ps]
    after(AdamW(ps, lr=0.1), ps, 1)
    optimizer = torch.optim.AdamW(exact, lr=0.1, foreach=False)
    for p, e in zip(ps, exact, strict=True):
        e.grad = p.grad.float()
    optimizer.step()
    close(ps, [e.to(dtype) for e in exact], 1e-2 if dtype == torch.bfloat16 else 1e-3)


def test_bfloat16_is_rounded_by_chance_and_the_rest_to_the_nearest(device):
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=device))
    q = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = AdamW([p, q], lr=2**-10, weight_decay=0.0, seed=7)  # an eighth of a step of bfloat16 below 1
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    assert set(p.tolist()) == {1.0, 1 - 2**-8} and 0.15 < (p < 1).float().mean() < 0.35
    close([q], [torch.full_like(q, 1 - 2**-10)])
    assert optimizer.state_dict()["param_groups"][0]["seed"] == 7


@pytest.mark.parametrize("seed", [np.int32(7), 2**63 - 1])
def test_groups_have_seeds_of_any_integer(seed, device):
    lists = [parameters(device, torch.bfloat16) for _ in BOTH]
    for ps, of in zip(lists, (seed, int(seed)), strict=True):
        after(AdamW([{"params": ps[:1], "seed": of}, {"params": ps[1:], "seed": of}]), ps, 1)
    assert all(map(torch.equal, *lists))


def test_fake_tensors_step(device):
    with FakeTensorMode():
        ps = parameters(device)
        optimizer = after(AdamW(ps), ps, 2)
    assert optimizer.state[ps[0]]["exp_avg"].shape == ps[0].shape


@pytest.mark.parametrize("capturable", [False, True])
def test_each_loads_the_state_of_the_other(capturable, device):
    lists = [parameters(device) for _ in BOTH]
    made = torch.optim.AdamW(lists[0], lr=0.1, amsgrad=True), AdamW(lists[1], amsgrad=True, capturable=capturable)
    after(made[0], lists[0], 2)
    after(made[1], lists[1], 1)
    saved = io.BytesIO()
    torch.save({"ps": lists[0], **made[0].state_dict()}, saved)
    saved.seek(0)
    state = torch.load(saved)
    for p, q in zip(lists[1], state.pop("ps"), strict=True):
        p.data.copy_(q.data)
    made[1].load_state_dict(state)
    for optimizer, ps in zip(made, lists, strict=True):
        after(optimizer, ps, 2, 2)
    close(*lists)
    close_states(*made)
    assert made[1].param_groups[0]["lr"] == 0.1 and made[1].param_groups[0].get("seed") is None
    made[0].load_state_dict(copy.deepcopy(made[1].state_dict()))
    counts = [s["step"] for s in made[0].state.values()]
    assert len({c.data_ptr() for c in counts}) == len(counts), "torch adds 1 to each of them"
    for optimizer, ps in zip(made, lists, strict=True):
        after(optimizer, ps, 1, 4)
    close(*lists)
    close_states(*made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_learning_rate_may_be_of_a_half_type(dtype, device):
    rates = 0.125, torch.tensor(0.125, dtype=dtype), torch.tensor(0.125, dtype=dtype, device=device)
    lists = [parameters(device) for _ in rates]
    for ps, lr in zip(lists, rates, strict=True):
        after(AdamW(ps, lr=lr), ps, 2)
        close(ps, lists[0], 0)


def test_groups_late_groups_schedulers_and_clipping(device):
    lists = [parameters(device) for _ in BOTH]
    made = []
    for kind, ps in zip(BOTH, lists, strict=True):
        optimizer = kind([{"params": [("a", ps[0])], "lr": 0.3, "betas": (0.5, 0.9)}, {"params": [("b", ps[1])]}])
        schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 10),
        ]
        for i in range(5):
            if i == 2:
                optimizer.add_param_group({"params": [("c", p) for p in ps[2:]], "weight_decay": 0.5})
                schedulers = schedulers[:0]
            gradients(ps, i)
            torch.nn.utils.clip_grad_norm_(ps, 0.1)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        made.append(optimizer)
    close(*lists)
    close_states(*made)
    assert made[1].state_dict()["param_groups"][2]["param_names"] == ["c"] * 3


@pytest.mark.parametrize("capturable", [False, True])
def test_parameters_without_gradient_are_left_and_count_their_own_steps(capturable, device):
    lists = [parameters(device) for _ in BOTH]
    made = torch.optim.AdamW(lists[0], foreach=False), AdamW(lists[1], capturable=capturable)
    for optimizer, ps in zip(made, lists, strict=True):
        for i, without in enumerate([(), (0, 3), (0, 1, 2, 3, 4), (0,), (), (1,)]):
            gradients(ps, i)
            for j in without:
                ps[j].grad = None
            optimizer.step()
    close(*lists)
    close_states(*made)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_program_may_write_to_the_count_of_one_parameter(loaded, device):
    lists = [parameters(device)[1:] for _ in BOTH]
    for kind, ps in zip(BOTH, lists, strict=True):
        optimizer = after(kind(ps, lr=0.1), ps, 3)
        if loaded:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.state[ps[0]]["step"].zero_()
        after(optimizer, ps, 2, 3)
        for state in optimizer.state.values():
            state["step"] += 5
        after(optimizer, ps, 2, 5)
        optimizer.state[ps[1]]["step"].data.fill_(3.0)  # which leaves no new version
        after(optimizer, ps, 2, 7)
    close(*lists)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, whose memory processes share")
@pytest.mark.parametrize("pickled", [False, True])
def test_processes_may_share_a_count(pickled):
    lists = []
    for kind in BOTH:
        ps = [p.detach().share_memory_().requires_grad_() for p in parameters("cpu")]
        optimizer = after(kind(ps), ps, 1)
        for state in optimizer.state.values():
            for t in state.values():
                t.share_memory_()
        for i in range(3):
            if pickled:
                others, its = pickle.loads(ForkingPickler.dumps((ps, optimizer)))
                after(its, others, 2, i)
            elif not (process := os.fork()):
                try:
                    after(optimizer, ps, 2, i)
                finally:
                    os._exit(0)
            else:
                os.waitpid(process, 0)
            after(optimizer, ps, 1, i)
        lists.append([*ps, *(state["step"] for state in optimizer.state.values())])
    close(*lists)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("how", [torch.Tensor.detach, lambda t: t.view_as(t), lambda t: t.data])
def test_states_may_become_views_of_themselves(how, capturable, device):
    lists = [parameters(device) for _ in BOTH]
    made = torch.optim.AdamW(lists[0], foreach=False), AdamW(lists[1], capturable=capturable)
    for optimizer, ps in zip(made, lists, strict=True):
        after(optimizer, ps, 2)
        for state in optimizer.state.values():
            state.update({key: how(t) for key, t in state.items()})
        gradients(ps, 2)
        ps[1].grad = None
        optimizer.step()
        after(optimizer, ps, 2, 3)
    close(*lists)
    close_states(*made)


def test_a_program_may_put_it_for_that_of_torch(device, monkeypatch):
    lists = [parameters(device) for _ in BOTH]
    after(torch.optim.AdamW(lists[0]), lists[0], 2)
    monkeypatch.setattr("torch.optim.AdamW", AdamW)
    after(type("Own", (torch.optim.AdamW,), {})(lists[1]), lists[1], 2)
    monkeypatch.undo()
    close(*lists)


def test_a_group_may_get_an_iterator(device):
    lists = [parameters(device) for _ in BOTH]
    for kind, ps in zip(BOTH, lists, strict=True):
        optimizer = kind(ps, lr=0.1)
        for i in range(3):
            optimizer.param_groups[0]["params"] = iter(ps)
            after(optimizer, ps, 1, i)
    close(*lists)


def test_a_state_may_have_other_entries(device):
    lists = [parameters(device) for _ in BOTH]
    for kind, ps in zip(BOTH, lists, strict=True):
        optimizer = kind(ps, lr=0.1)
        optimizer.state["mine"] = {"k": 1}
        after(optimizer, ps, 2)
        optimizer.state["seen"] = 5
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        after(optimizer, ps, 2)
        assert optimizer.state["mine"] == {"k": 1} and optimizer.state["seen"] == 5
    close(*lists)
    optimizer.state[ps[0]] = {"k": 1}
    with pytest.raises(ValueError, match=r"expected a state with step, got \['k'\]"):
        optimizer.step()


@pytest.mark.parametrize("count", [-1.0, 2.5, 3], ids=str)
def test_what_is_no_count_of_steps_is_refused_before_a_step(count, device):
    ps = parameters(device)
    optimizer = after(AdamW(ps), ps, 1)
    before = [p.detach().clone() for p in ps]
    optimizer.state[ps[1]]["step"] = count if isinstance(count, int) else torch.tensor(count)
    with pytest.raises((TypeError, ValueError), match="AdamW: expected step to be a (tensor|number)"):
        after(optimizer, ps, 1)
    assert all(torch.equal(p, q) for p, q in zip(ps, before, strict=True))


def test_one_launch_steps_what_did_as_many_steps(device, monkeypatch):
    lists = []
    monkeypatch.setattr("fusebook.optim.adamw_step", lambda ps, *_, **__: lists.append(len(ps)))
    ps = parameters(device)
    optimizer = AdamW(ps)
    after(optimizer, ps[1:], 2)
    after(optimizer, ps, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    after(optimizer, ps, 1)
    assert lists == [4, 4, 1, 4, 1, 4]


def test_closures_hooks_copies_and_pickles(device):
    ps = parameters(device)
    optimizer, called = AdamW(ps), []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in ps)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad and called == ["pre", "post"]
    for other in (copy.deepcopy(optimizer), torch.load(_saved(optimizer), weights_only=False)):
        close_states(other, optimizer)
        after(other, other.param_groups[0]["params"], 2)
        assert {s["step"].item() for s in other.state.values()} == {3}
    assert {s["step"].item() for s in optimizer.state.values()} == {1}


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("capturable", [False, True])
def test_a_scaler_skips_a_step_with_infinite_gradients(capturable, device):
    results, made = [], []
    for kind in BOTH:
        ps = parameters(device)
        optimizer, scaler = kind(ps, lr=0.1), torch.amp.GradScaler(device, 2.0**10)
        optimizer.param_groups[0]["capturable"] = capturable and kind is AdamW
        after(optimizer, ps[1:], 1)  # not by the scaler, and not all of them
        for i in range(4):
            gradients(ps, i)
            scaler.scale(torch.zeros((), device=device))  # makes the scale
            for p in ps:
                p.grad *= scaler.get_scale()
            if i == 1:
                ps[1].grad[7] = float("inf")
            if i == 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(ps, 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
        assert [s["step"].item() for s in optimizer.state.values()] == [4, 4, 4, 4, 3]
        after(optimizer, ps, 1)
        results.append(ps)
        made.append(optimizer)
    close(*results)
    close_states(*made)
    counts = [s["step"] for s in made[1].state_dict()["state"].values()]
    assert len({c.data_ptr() for c in counts}) == len(counts), "torch adds 1 to each of them"


def test_a_step_by_a_scaler_reads_nothing_back(device, monkeypatch):
    ps = parameters(device)[1:]
    optimizer, scaler = AdamW(ps), torch.amp.GradScaler(device, 2.0**10)
    scaler.scale(torch.zeros((), device=device))
    gradients(ps, 0)
    scaler.step(optimizer)
    with monkeypatch.context() as patched:
        for name in ("item", "__float__", "__int__", "__bool__", "tolist", "cpu"):
            patched.setattr(torch.Tensor, name, lambda *_: pytest.fail("waits for the device"))
        scaler.update()
        before = [p.grad.clone() for p in ps]
        scaler.step(optimizer)
    close([p.grad for p in ps], before)  # they stay scaled
    optimizer.step()
    assert {s["step"].item() for s in optimizer.state.values()} == {3}


def test_steps_by_a_scaler_are_counted_whatever_the_default_dtype(device):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer, scaler = AdamW([p]), torch.amp.GradScaler(device)
    p.grad = scaler.scale(torch.ones(4, device=device))
    torch.set_default_dtype(torch.float64)
    try:
        scaler.step(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[p]["step"].dtype == torch.float32 and optimizer.state[p]["step"].item() == 1


@pytest.mark.parametrize("unscale", [False, True])
def test_a_refused_step_by_a_scaler_leaves_no_scale(unscale, device):
    lists = [[torch.nn.Parameter(torch.ones(4, 4, device=device))] for _ in BOTH]
    for kind, (p,) in zip(BOTH, lists, strict=True):
        optimizer, scaler = kind([p], lr=0.1), torch.amp.GradScaler(device, init_scale=8.0)
        for i, layout in enumerate((torch.strided, torch.sparse_coo, torch.strided)):
            p.grad = torch.eye(4, device=device) * scaler.scale(torch.ones((), device=device)) * (i + 1)
            if layout is torch.strided:
                scaler.step(optimizer)
            else:
                p.grad = p.grad.to_sparse()
                if unscale:
                    scaler.unscale_(optimizer)
                with pytest.raises((TypeError, RuntimeError), match="sparse"):
                    scaler.step(optimizer)
            scaler.update()
    close(*lists)


@pytest.mark.parametrize("hook", ["pre", "post"])
def test_a_hook_that_raises_in_a_step_by_a_scaler_leaves_no_scale(hook, device):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer, scaler = AdamW([p]), torch.amp.GradScaler(device)
    p.grad = scaler.scale(torch.ones(4, device=device))

    def stop(*_):
        raise KeyboardInterrupt

    getattr(optimizer, f"register_step_{hook}_hook")(stop)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where Ctrl-C ends a kernel in the middle")
def test_an_interrupted_kernel_leaves_the_next_step_right(monkeypatch):
    ps = parameters("cpu")
    optimizer = after(AdamW(ps, capturable=True), ps, 1)
    add = InterpreterBuilder.create_atomic_rmw

    def stop(*args):
        add(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_atomic_rmw", stop)
        with pytest.raises(KeyboardInterrupt):
            after(optimizer, ps, 1)
    other, copies = copy.deepcopy((optimizer, ps))
    after(optimizer, ps, 1)
    after(other, copies, 1)
    close(ps, copies)


@pytest.mark.parametrize("which", ["another list ahead", "itself behind"])
def test_a_step_within_a_step_is_one_more(device, monkeypatch, which):
    p = torch.nn.Parameter(torch.ones(3, 4, device=device))
    optimizer, other = AdamW([p], lr=0.1, weight_decay=0), [[torch.ones(4, device=device)] for _ in range(4)]
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = None
    p.data = p.data.t().contiguous().t()  # as Module.to(memory_format=...), so that the step is refused at first
    p.grad = torch.ones_like(p)
    step, inner = fusebook.adamw_step, []

    def twice(*args, **options):  # as by a dispatch mode or the handler of a signal
        if which == "another list ahead" and not inner:
            inner.append(step(*other, step=1))
        step(*args, **options)
        if which == "itself behind" and not inner:
            inner.append(0)
            optimizer.step()

    monkeypatch.setattr("fusebook.optim.adamw_step", twice)
    optimizer.step()
    count = 2 + (which == "itself behind")
    assert optimizer.state[p]["step"] == count
    torch.testing.assert_close(p, torch.full_like(p, 1 - 0.1 * count))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("of", ["program", "another step"])
def test_an_error_of_the_program_within_a_step_is_raised(device, monkeypatch, of, inference):
    step = fusebook.adamw_step

    def interrupted(*args, **options):  # by a signal, behind the launches, whose handler fails
        step(*args, **options)
        if of == "program":
            json.loads("{")
        step([p], [p], [p], [p], step=1)

    with torch.inference_mode(inference):
        p = torch.nn.Parameter(torch.ones(8, device=device))
        p.grad = torch.ones_like(p)
        optimizer = AdamW([p], lr=0.1, weight_decay=0)
        optimizer.step()
        monkeypatch.setattr("fusebook.optim.adamw_step", interrupted)
        with pytest.raises(ValueError, match=r"Expecting|share no memory|gradients apart"):
            optimizer.step()
    torch.testing.assert_close(p, torch.full_like(p, 0.8), msg="one more step, not two")
    assert optimizer.state[p]["step"] == 2


def test_the_memory_of_a_count_is_known_where_a_handler_fails_once():
    count, failed = torch.ones(()), []

    class Interrupted(torch.Tensor):
        def data_ptr(self):
            if not failed:
                failed.append(RuntimeError("of a signal's handler"))
                raise failed[0]
            return super().data_ptr()

    assert _memory(count.as_subclass(Interrupted)) == _memory(count) and failed


def test_a_scale_that_is_no_tensor_is_refused(device):
    ps = parameters(device)
    optimizer = AdamW(ps)
    optimizer.grad_scale = 2.0
    gradients(ps, 0)
    with pytest.raises(TypeError, match="adamw_step: expected grad_scale to be a torch.Tensor, got float"):
        optimizer.step()


def _other_states(optimizer, ps):
    optimizer.state[ps[1]] = copy.deepcopy(optimizer.state[ps[1]])
    optimizer.state[ps[1]]["exp_avg"].zero_()


def _other_average(optimizer, ps):
    optimizer.state[ps[1]]["exp_avg"] = torch.ones_like(ps[1])


def _other_count(optimizer, ps):
    optimizer.state[ps[1]]["step"] = optimizer.state[ps[1]]["step"] + 5


def _other_strides(optimizer, ps):
    ps[0].grad = ps[0].grad.mT.contiguous().mT


def _other_strides_of_a_parameter(optimizer, ps):
    ps[0].data = ps[0].data.mT.contiguous().mT


def _none(optimizer, ps):
    ps[2].grad = ps[1].grad = None


def _a_late_group(optimizer, ps):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones_like(ps[1]))]})
    optimizer.param_groups[1]["params"][0].grad = torch.ones_like(ps[1])


def _in_two_groups(optimizer, ps):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [ps[1]]})


def _one_less(optimizer, ps):
    del optimizer.param_groups[0]["params"][1]


def _another_object(optimizer, ps):
    new = torch.nn.Parameter(ps[1].detach().clone())
    new.grad = ps[1].grad
    optimizer.param_groups[0]["params"][1] = new


def _new_memory(optimizer, ps):
    ps[1].data = ps[1].data.clone()


@pytest.mark.parametrize(
    "change",
    [_other_states, _other_average, _other_count, _other_strides, _other_strides_of_a_parameter, _none, _a_late_group,
     _in_two_groups, _one_less, _another_object, _new_memory],
)  # fmt: skip
@pytest.mark.parametrize("capturable", [False, True])
def test_what_changes_between_two_steps_is_noticed(change, capturable, device):
    lists, made = [parameters(device)[1:] for _ in BOTH], []
    for kind, ps in zip(BOTH, lists, strict=True):
        optimizer = kind(ps, lr=0.1)
        optimizer.param_groups[0]["capturable"] = capturable and kind is AdamW  # torch's is for GPUs only
        after(optimizer, ps, 2)
        gradients(ps, 7)
        change(optimizer, ps)
        optimizer.step()
        after(optimizer, optimizer.param_groups[0]["params"], 2)
        made.append(optimizer)
    close(*lists)
    close(*([p for group in o.param_groups for p in group["params"]] for o in made))
    close(*([value.cpu() for state in o.state.values() for value in state.values()] for o in made))


def test_a_seed_that_a_group_gets_later_is_for_bfloat16_alone(device):
    results = []
    for seed in (None, 7):
        torch.manual_seed(0)
        ps = [
            torch.nn.Parameter(torch.randn(500, device=device).to(dtype)) for dtype in (torch.bfloat16, torch.float32)
        ]
        optimizer = after(AdamW(ps), ps, 1)
        optimizer.param_groups[0]["seed"] = seed
        after(optimizer, ps, 1, 1)
        results.append(ps)
    assert [torch.equal(*both) for both in zip(*results, strict=True)] == [False, True]


@pytest.mark.parametrize(
    "wrapped", [lambda found: [found], lambda found: {**found, "state": [*found["state"].items()]}]
)
def test_a_hook_may_give_a_state_another_form(wrapped, device):
    ps = parameters(device)
    optimizer = after(AdamW(ps), ps, 1)
    want = wrapped(optimizer.state_dict())
    optimizer.register_state_dict_post_hook(lambda _, found: wrapped(found))
    assert str(optimizer.state_dict()) == str(want)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_first_step_that_runs_out_of_memory_leaves_no_part_of_a_state(device, monkeypatch, capturable):
    ps = parameters("meta" if capturable else device)  # so that the number of steps moves to another device
    optimizer = AdamW(ps, capturable=capturable)
    gradients(ps, 0)
    made = []

    def zeros_like(t):
        made.append(t)
        if len(made) == 4:  # the second average of the second parameter
            raise torch.OutOfMemoryError
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", zeros_like)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    counts = [state["step"] for state in optimizer.state.values()]
    assert len(counts) == len(ps)
    assert all(count.is_meta if capturable else count == 1 for count in counts)


@pytest.mark.parametrize("which", [0, 1])
def test_a_parameter_that_becomes_bfloat16_is_rounded_by_chance(which, device):
    """Its float32 gradient is the same object as before."""
    ps = [torch.nn.Parameter(torch.ones(4096, device=device)) for _ in range(2)]
    optimizer = AdamW(ps, lr=2.0**-12, weight_decay=0.0, seed=3)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    ps[which].data = torch.ones(4096, device=device, dtype=torch.bfloat16)
    optimizer.step()
    moved = (ps[which].detach() != 1).float().mean().item()
    assert 0.04 < moved < 0.09  # 1 / 16 of the distance to the next number
    close([ps[1 - which].detach()], [torch.full((4096,), 1 - 2.0**-11, device=device)])


def test_a_second_step_with_new_gradients_looks_up_no_state(device, monkeypatch):
    ps = parameters(device)[1:]
    optimizer = after(AdamW(ps), ps, 1)
    monkeypatch.setattr(torch.Tensor, "__hash__", lambda _: pytest.fail("a state is looked up"))
    after(optimizer, ps, 1)


def test_a_step_keeps_no_gradient(device):
    ps = parameters(device)
    optimizer = after(AdamW(ps), ps, 2)
    kept = [weakref.ref(p.grad) for p in ps]
    optimizer.zero_grad()
    assert not any(ref() is not None for ref in kept)


def test_step_inside_torch_compile_leaves_the_graph(device):
    lists = [parameters(device) for _ in BOTH]
    made = [kind(ps) for kind, ps in zip(BOTH, lists, strict=True)]
    for ps in lists:
        gradients(ps, 0)
    made[0].step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(made[1].step, backend="eager")()
    close(*lists)


# Bad input ------------------------------------------------------------------------------------------------------------


def _without(state, key):
    del state["state"][1][key]


REFUSED = {
    "another shape": ("exp_avg of shape", lambda s: s["state"][1].update(exp_avg=torch.zeros(7))),
    "no tensor": ("exp_avg_sq of shape .* got int", lambda s: s["state"][1].update(exp_avg_sq=3)),
    "steps of several": ("step to be one number", lambda s: s["state"][1].update(step=torch.zeros(2))),
    "steps that are none": ("a number of steps done", lambda s: s["state"][1].update(step=torch.tensor(math.nan))),
    "steps below 0": ("a number of steps done", lambda s: s["state"][1].update(step=-1.0)),
    "half a step": ("a number of steps done", lambda s: s["state"][1].update(step=torch.tensor(2.5))),
    "steps in a word": ("a number of steps done", lambda s: s["state"][1].update(step=None)),
    "sparse": ("exp_avg to be dense", lambda s: s["state"][1].update(exp_avg=s["state"][1]["exp_avg"].to_sparse())),
    "one beta": ("betas to be two numbers", lambda s: s["param_groups"][0].update(betas=(0.9,))),
    "no average": ("a state with exp_avg_sq", lambda s: _without(s, "exp_avg_sq")),
    "no maximum": ("a state with max_exp_avg_sq", lambda s: _without(s, "max_exp_avg_sq")),
    "another optimizer": ("groups with betas", lambda s: s["param_groups"][0].pop("betas")),
    "too few": ("doesn't match the size", lambda s: s["param_groups"][0]["params"].pop()),
}


@pytest.mark.parametrize(("message", "change"), REFUSED.values(), ids=REFUSED)
def test_a_state_of_another_model_is_refused_before_anything_changes(message, change, device):
    ps = parameters(device)
    optimizer = after(AdamW(ps, amsgrad=True), ps, 1)
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    for values in state["state"].values():
        values["exp_avg"] += 1
    state["param_groups"][0]["lr"] = 5.0
    change(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for a, b in zip(optimizer.state_dict()["state"].values(), before["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "Invalid learning rate", {"lr": -1.0}),
        (ValueError, "Invalid beta", {"betas": (1.0, 0.9)}),
        (TypeError, "expected seed to be an integer", {"seed": 0.5}),
        (TypeError, "fused", {"fused": True}),
    ],
)
def test_bad_options_are_refused(error, message, options, device):
    with pytest.raises(error, match=message):
        AdamW(parameters(device), **options)


@pytest.mark.parametrize(
    ("error", "message", "group"),
    [
        (TypeError, "seed to be an integer, got str", {"seed": "7"}),
        (ValueError, "a state with max_exp_avg_sq", {"amsgrad": True}),
        (TypeError, "beta1 to be a number, got str", {"betas": ("a", 0.9)}),
        (TypeError, "beta1 to be a number, got Tensor", {"betas": (torch.ones(2), 0.9)}),
        (ValueError, "betas to be two numbers, got 0.9", {"betas": 0.9}),
        (ValueError, "betas to be two numbers, got None", {"betas": None}),
        (TypeError, "weight_decay to be a number, got Tensor", {"weight_decay": torch.ones(2)}),
        (ValueError, "expected lr on", {"lr": torch.empty((), device="meta")}),
        (ValueError, "expected lr to be one number", {"lr": torch.ones(2)}),
        (ValueError, "use torch.optim.Adam", {"decoupled_weight_decay": False}),
    ],
)
def test_what_a_group_is_set_to_later_is_refused_in_a_sentence(error, message, group, device):
    ps = parameters(device, torch.bfloat16)
    optimizer = after(AdamW(ps, seed=1), ps, 1)
    optimizer.param_groups[0].update(group)
    with pytest.raises(error, match=message):
        after(optimizer, ps, 1)


def test_gradients_that_no_kernel_takes_are_refused(device):
    p = torch.nn.Parameter(torch.zeros(4, 4, device=device))
    p.grad = torch.eye(4, device=device).to_sparse()
    with pytest.raises(TypeError, match="to be dense"):
        AdamW([p]).step()
    p = torch.nn.Parameter(torch.zeros(4, device=device, dtype=torch.complex64))
    p.grad = torch.zeros_like(p)
    with pytest.raises(TypeError, match="complex64"):
        AdamW([p]).step()
    p = torch.nn.Parameter(torch.eye(4, device=device).to_sparse_csr())
    p.grad = p.detach().clone()
    with pytest.raises(TypeError, match="to be dense"):
        AdamW([p]).step()


def test_a_gradient_may_be_a_view_that_negates(device):
    lists = [[torch.nn.Parameter(torch.tensor(0.5, device=device))] for _ in BOTH]
    for kind, (p,) in zip(BOTH, lists, strict=True):
        optimizer = kind([p], lr=0.1)
        for conj in (torch.conj, torch.clone, torch.conj):
            optimizer.zero_grad()
            (conj(torch.complex(torch.ones_like(p), p)) * (1 + 2j)).real.backward()
            assert p.grad.is_neg() == (conj is torch.conj)
            optimizer.step()
    close(*lists)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_distributed_checkpoint_is_loaded_by_the_other(flatten, device):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    models, states = [], []
    for kind in (*BOTH, *reversed(BOTH)):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3, device=device)
        optimizer = after(kind(model.parameters(), lr=0.1), [*model.parameters()], 2)
        if len(states) == len(BOTH):
            set_optimizer_state_dict(model, optimizer, states[len(models) - len(BOTH)], options=options)
        else:
            states.append(copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options)))
        after(optimizer, [*model.parameters()], 1, 2)
        models.append([*model.parameters()])
    for other in models[1:]:
        close(models[0], other)


# Several processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
def test_dtensors_step_their_shards_whatever_the_gradient_is(mesh):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(6, 4))
    p = torch.nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)]))
    optimizer, want = AdamW([p], lr=0.1), torch.optim.AdamW([whole], lr=0.1)
    for placement in (Shard(0), Replicate(), Partial()):
        whole.grad = torch.randn(6, 4)
        p.grad = DTensor.from_local(whole.grad, mesh, [placement])
        average = optimizer.state[p]["exp_avg"] if want.state else p
        loss = (p * p + p * average).full_tensor().sum()
        optimizer.step()
        want.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    close([p.full_tensor()], [whole])
    assert isinstance(optimizer.state[p]["exp_avg"], DTensor)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].full_tensor()
    with pytest.raises(ValueError, match=r"expected exp_avg to be placed .*set_optimizer_state_dict"):
        optimizer.load_state_dict(state)


def test_groups_that_are_replaced_leave_nothing_behind(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer, replaced = AdamW(params), []
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(20):
        optimizer.step()
        replaced.append(optimizer.param_groups[0])
        optimizer.param_groups[0] = {**replaced[-1]}
    assert len(optimizer._kept) <= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
def test_a_gradient_of_another_mesh_and_a_partial_parameter_are_refused(mesh):
    plain = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([plain])
    plain.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with implicit_replication():  # autograd leaves a sum that is apart
        (plain * distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])).sum().backward()
        with pytest.raises(TypeError, match="expected a gradient on the mesh of its parameter, None, got one on"):
            optimizer.step()
    p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    p.grad = distribute_tensor(torch.ones(4, 2), other, [Shard(0)])
    with pytest.raises(TypeError, match="expected a gradient on the mesh of its parameter"):
        AdamW([p]).step()
    p = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="expected no parameter of partial sums"):
        AdamW([p]).step()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
def test_gradients_are_summed_in_the_order_of_the_group(mesh, monkeypatch):
    """A plain parameter that lacks a gradient on one rank makes other launches there."""
    order, redistribute = [], DTensor.redistribute
    monkeypatch.setattr(DTensor, "redistribute", lambda t, *a: order.append(t.numel()) or redistribute(t, *a))
    plain = torch.nn.Parameter(torch.zeros(4))
    first, second = (torch.nn.Parameter(distribute_tensor(torch.zeros(n), mesh, [Replicate()])) for n in (2, 3))
    optimizer = AdamW([plain, first, second])
    for stepped in ([first], [plain, first, second]):
        order.clear()
        for p in stepped:
            g = torch.ones(p.shape)
            p.grad = g if p is plain else DTensor.from_local(g, mesh, [Partial()])
        optimizer.step()
    assert order == [2, 3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
def test_autograd_sees_that_a_step_wrote_a_dtensor_where_an_error_ends_it(mesh, monkeypatch):
    p = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    p.grad = torch.ones_like(p)
    step, before = fusebook.adamw_step, p._version

    def interrupted(*args, **options):
        step(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("fusebook.optim.adamw_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AdamW([p]).step()
    assert p._version > before


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
def test_replicas_are_rounded_by_the_same_bits_whatever_shards_a_rank_has(mesh):
    def stepped(rows):
        shard, whole, plain = (torch.ones(n, 64, dtype=torch.bfloat16) for n in (rows, 16, 16))
        params = [distribute_tensor(t, mesh, [at]) for t, at in ((shard, Shard(0)), (whole, Replicate()))]
        params = [torch.nn.Parameter(p) for p in (*params, plain)]
        experts = [torch.nn.Parameter(plain.clone()) for _ in range(rows % 3)]
        optimizer = AdamW([{"params": experts}, {"params": params}], lr=1e-3, seed=1)
        for p in [*experts, *params[rows == 0 :]]:  # an expert without tokens has no gradient
            p.grad = torch.ones_like(p)
        optimizer.step()
        return params[1].to_local(), params[2]

    (replica, plain), *others = map(stepped, (1024, 1033, 0))
    assert len(replica.unique()) == 2
    assert all(torch.equal(replica, other) and torch.equal(plain, own) for other, own in others)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
def test_shards_of_another_mesh_leave_the_bits_of_a_shard_alone(mesh):
    meshes = [DeviceMesh("cpu", [0, other], _init_backend=False) for other in (1, 2)]
    assert str(meshes[0]) == str(meshes[1]) and meshes[0] != meshes[1]

    def stepped(rows):
        tensors = (torch.ones(n, 64, dtype=torch.bfloat16) for n in (rows, 16))
        params = [DTensor.from_local(t, m, [Shard(0)]) for t, m in zip(tensors, meshes, strict=True)]
        params = [torch.nn.Parameter(p) for p in params]
        for p in params:
            p.grad = torch.ones_like(p)
        AdamW(params, lr=1e-3, seed=1).step()
        return params[1].to_local()

    assert torch.equal(stepped(1024), stepped(1033))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
def test_a_gradient_may_be_that_of_a_collective_that_still_runs(mesh):
    lists = [[torch.nn.Parameter(torch.ones(4))] for _ in BOTH]
    for kind, (p,) in zip(BOTH, lists, strict=True):
        optimizer = kind([p], lr=0.1)
        for i in range(3):
            p.grad = all_reduce(torch.full((4,), 1.0 + i), "sum", mesh)
            assert type(p.grad) is not torch.Tensor
            optimizer.step()
    close(*lists)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels compile for a GPU")
@pytest.mark.slow
def test_fsdp2_with_the_tools_of_checkpoints(mesh):
    models, made = [], []
    for kind in BOTH:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = kind(model.parameters(), lr=0.1)
        for i in range(4):
            if i == 2:
                state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
                optimizer = kind(model.parameters())
                set_optimizer_state_dict(model, optimizer, state)
            optimizer.zero_grad()
            model(torch.ones(2, 5) * i).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        models.append([p.full_tensor() for p in model.parameters()])
        made.append(optimizer)
    close(*models)
    assert {s["step"].item() for s in made[1].state.values()} == {4}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_is_swapped_for_a_nested_one_is_refused(steps, device):
    p = torch.nn.Parameter(torch.ones(2, 4, device=device))
    optimizer = AdamW([p])
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    p.grad = None
    nested = torch.nested.nested_tensor([torch.ones(4), torch.ones(4)], device=device)
    torch.utils.swap_tensors(p, torch.nn.Parameter(nested))
    torch.nested.to_padded_tensor(p * 2, 0.0).sum().backward()
    with pytest.raises(TypeError, match=r"expected params\[0\] to be dense, got a nested tensor"):
        optimizer.step()


# A GPU ----------------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_by_a_scaler_does_not_wait(capturable):
    ps = parameters("cuda")
    optimizer, scaler = AdamW(ps, capturable=capturable), torch.amp.GradScaler("cuda", 2.0**10)
    scaler.scale(torch.zeros((), device="cuda"))
    for i in range(3):
        gradients(ps, i)
        torch.cuda.set_sync_debug_mode("error" if i or not capturable else "default")
        try:
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {s["step"].item() for s in optimizer.state.values()} == {3}


@needs_cuda
def test_a_graph_holds_the_step_and_refuses_the_first_one():
    lists = [parameters("cuda") for _ in BOTH]
    made = torch.optim.AdamW(lists[0]), AdamW(lists[1], capturable=True)
    graph = torch.cuda.CUDAGraph()
    for ps in lists:
        gradients(ps, 0)
    with pytest.raises(RuntimeError, match="step once, then capture"), torch.cuda.graph(graph):
        made[1].step()
    made[1].step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made[1].step()
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        made[0].step()
    close(*lists, 1e-5)
    assert {s["step"].item() for s in made[1].state_dict()["state"].values()} == {4}
