"""What people build around the operators: a tiny model, exported, checkpointed, sharded, hooked, copied, in processes.

`Model` is the same network twice: by Fusebook, and in plain PyTorch. Transforms of single operators, tangents, traces
and threads are in test_outsiders and test_cards.
"""

import copy
import functools
import io
import json
import multiprocessing
import os
import pickle
import socket
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusebook
import warm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, CLASSES = 16, 24
close = functools.partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)


def plain_rms(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


class Model(nn.Module):
    """A norm, SwiGLU, a sum that is normalised, and the loss of a linear head."""

    def __init__(self, fused=True, dtype=torch.float32):
        super().__init__()
        rng = torch.Generator().manual_seed(3)
        shapes = {"first": SIZE, "second": SIZE, "gate": (SIZE, SIZE), "up": (SIZE, SIZE), "head": (CLASSES, SIZE)}
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=rng) / 4 + (isinstance(shape, int))
            setattr(self, name, nn.Parameter(drawn.to(DEVICE, dtype)))
        self.fused = fused

    def hidden(self, x):
        if self.fused:
            y = fusebook.swiglu(fusebook.rms_norm(x, self.first), self.gate, self.up)
            return fusebook.add_rms_norm(y, x, self.second)[0]
        y = plain_rms(x, self.first)
        return plain_rms(F.silu(y @ self.gate) * (y @ self.up) + x, self.second)

    def forward(self, x, target):
        h = self.hidden(x)
        if self.fused:
            return fusebook.linear_cross_entropy(h, self.head, target, check=False)
        return F.cross_entropy(h @ self.head.T, target)


def batch(rows=6, seed=1):
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, SIZE, generator=rng).to(DEVICE),
        torch.randint(CLASSES, (rows,), generator=rng).to(DEVICE),
    )


def gradients(model, *given, call=None):
    """The loss, and the gradients of all parameters and of the input."""
    x, target = given or batch()
    x = x.clone().requires_grad_()
    model.zero_grad()
    loss = (model if call is None else call)(x, target)
    loss.backward()
    return loss.detach(), [x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture
def right():
    return gradients(Model(fused=False))


# Training ------------------------------------------------------------------------------------------------------------


def test_steps_of_training_are_those_of_torch():
    fused, plain = Model(), Model(fused=False)
    torchs = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    states = [[torch.zeros_like(p) for p in fused.parameters()] for _ in range(2)]
    for step in range(1, 4):
        given = batch(seed=step)
        losses = [model(*given) for model in (fused, plain)]
        close(*losses)
        for loss in losses:
            loss.backward()
        fusebook.adamw_step(
            [p.detach() for p in fused.parameters()], [p.grad for p in fused.parameters()], *states,
            step=step, lr=0.01, weight_decay=0.1,
        )  # fmt: skip
        torchs.step()
        for model in (fused, plain):
            model.zero_grad()
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        close(a, b, atol=1e-4, rtol=1e-3)


def test_frozen_weights_and_accumulated_gradients():
    found = []
    for model in (Model(), Model(fused=False)):
        model.gate.requires_grad_(False)
        model.first.requires_grad_(False)
        for seed in (1, 2):
            model(*batch(seed=seed)).backward()
        assert model.gate.grad is model.first.grad is None
        found.append([p.grad for p in (model.up, model.second, model.head)])
    close(*found)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective"])
def test_checkpoints(how, right):
    model = Model()
    options = {"use_reentrant": how == "reentrant"}
    if how == "selective":

        def policy(context, op, *args, **kwargs):
            kept = op == torch.ops.fusebook.swiglu.default
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    close(gradients(model, call=lambda *given: checkpoint(model, *given, **options)), right)


def test_what_is_saved_passes_hooks(right):
    model, packed = Model(), []

    def pack(t):
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        close(gradients(model), right)
    for p in model.parameters():
        assert any(p is t or p.data_ptr() == t.data_ptr() for t in packed)
    with torch.autograd.graph.save_on_cpu():
        close(gradients(model), right)


def test_hooks_of_modules_and_tensors(right):
    model, seen = Model(), []
    handles = [
        model.register_forward_hook(lambda module, given, loss: seen.append("forward")),
        model.register_full_backward_hook(lambda module, dx, dy: seen.append("backward")),
        model.gate.register_hook(lambda g: seen.append("gradient")),
    ]
    close(gradients(model), right)
    assert set(seen) == {"forward", "backward", "gradient"}
    for handle in handles:
        handle.remove()


#: Calls and the argument of each that is saved for the gradient.
SAVED = {
    "softmax": (lambda x: fusebook.softmax(x), None),
    "silu": (lambda x: fusebook.silu(x), 0),
    "rms_norm": (lambda x, w: fusebook.rms_norm(x, w), 0),
    "layer_norm's weight": (lambda x, w: fusebook.layer_norm(x, w, w), 1),
    "swiglu": (lambda x, w: fusebook.swiglu(x, w.view(-1, 1), w.view(-1, 1)), 1),
    "concat_gemm": (lambda x, w: fusebook.concat_gemm(x, [w.view(-1, 1)]), 0),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_tensor_that_changed_is_noticed(name):
    call, saved = SAVED[name]
    leaves = [torch.randn(n, device=DEVICE, requires_grad=True) for n in ((4, SIZE), SIZE)]
    given = [leaf * 1 for leaf in leaves][: call.__code__.co_argcount]
    y = call(*given)
    (y if saved is None else given[saved]).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_of_gradients_where_there_are_any():
    """As at the first release: softmax, products and elementwise functions; norms and losses have first gradients."""
    x = torch.randn(3, SIZE, dtype=torch.float64, device=DEVICE, requires_grad=True)
    a, b = (torch.randn(SIZE, 4, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2))
    torch.autograd.gradgradcheck(lambda x: fusebook.softmax(x), (x,), fast_mode=True)
    torch.autograd.gradgradcheck(fusebook.silu, (x,), fast_mode=True)
    torch.autograd.gradgradcheck(fusebook.swiglu, (x, a, b), fast_mode=True)
    torch.autograd.gradgradcheck(lambda x, a, b: fusebook.concat_gemm(x, [a, b]), (x, a, b), fast_mode=True)
    y = fusebook.rms_norm(x)
    with pytest.raises(NotImplementedError, match="rms_norm|norm_backward"):
        torch.autograd.grad(torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum(), x)


# Compilers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_export_saves_and_loads(strict):
    model = Model()
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, batch(), dynamic_shapes=({0: rows}, {0: rows}), strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (6, 9):
        close(loaded(*batch(count)), Model(fused=False)(*batch(count)))


@pytest.mark.slow
def test_ahead_of_time_inductor(tmp_path):
    model = Model().requires_grad_(False)
    exported = torch.export.export(model, batch())
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    close(torch._inductor.aoti_load_package(package)(*batch()), Model(fused=False)(*batch()).detach())


def test_it_is_one_graph_with_its_gradient(right):
    model = Model()
    close(gradients(model, call=torch.compile(model, backend="aot_eager", fullgraph=True)), right)


def test_fake_tensors_have_shapes_and_nothing_else():
    x, target = batch()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = Model()
        x, target = mode.from_tensor(x), mode.from_tensor(target)
        loss = model(x.requires_grad_(), target)
        loss.backward()
        assert loss.shape == () and x.grad.shape == x.shape and model.gate.grad.shape == model.gate.shape


# torch.func ----------------------------------------------------------------------------------------------------------


def test_functional_calls_and_their_transforms():
    x, target = batch()
    found = []
    for model in (Model(), Model(fused=False)):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, x, target, model=model):
            return torch.func.functional_call(model, parameters, (x, target))

        def hidden(x, model=model):
            return model.hidden(x[None]).sum(0)

        each = torch.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x[:, None], target[:, None])
        found.append((torch.func.grad(loss)(parameters, x, target), each, torch.func.jacrev(hidden)(x[0])))
    close(*found)


# Copies and processes ------------------------------------------------------------------------------------------------


def test_copies_pickles_and_states(right):
    model = Model()
    other = Model()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(model.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        close(gradients(copied), right)


def test_inference_mode(right):
    model = Model()
    model(*batch())
    with torch.inference_mode():
        for _ in range(3):
            loss = model(*batch())
            assert loss.is_inference()
        close(loss, right[0])
    close(gradients(model), right)


def in_a_process(queue):
    queue.put([t.tolist() for t in gradients(Model())[1]])


#: What another process needs to import this file. OpenMP survives no fork.
ELSEWHERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def in_another(method):
    """The gradients that another process finds, after this one has computed some: called in a process of its own."""
    Model()(*batch())
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=in_a_process, args=(queue,))
    process.start()
    print(json.dumps(queue.get(timeout=120)))
    process.join()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_another_process(method, right):
    if method == "fork" and DEVICE == "cuda":
        pytest.skip("CUDA starts in no fork")
    code = f"import test_integrators\nif __name__ == '__main__': test_integrators.in_another({method!r})"
    done = warm.run("-c", code, env=ELSEWHERE)
    assert not done.returncode, done.stderr
    close([torch.tensor(g, device=DEVICE) for g in json.loads(done.stdout)], right[1])


# Several processes ---------------------------------------------------------------------------------------------------


#: What shares a model between processes: gradients in buckets, in views of the buckets, and weights in pieces.
SHARED = ("DDP", "DDP by views", "FSDP2")


def one_of_two(rank, port, folder):
    """The gradients that a process of two finds, each with half of the batch, by each of `SHARED`."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    part = slice(4 * rank, 4 * rank + 4)
    x, target = batch(8)
    found = {}
    for how in SHARED:
        model = Model()
        if how == "FSDP2":
            mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (2,))
            fully_shard(model, mesh=mesh)
            model(x[part], target[part]).backward()
            found[how] = [p.grad.full_tensor() for p in model.parameters()]
            message = ""
            try:  # outside of the module its weights are in pieces
                fusebook.rms_norm(x, model.first)
            except TypeError as error:
                message = str(error)
            assert "pass to_local()" in message, message
        else:
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view="views" in how)
            wrapped(x[part], target[part]).backward()
            found[how] = [p.grad.clone() for p in model.parameters()]
            del wrapped  # its destructor hung at times once the group was gone
    if not rank:
        torch.save(found, os.path.join(folder, "found"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how = "spawn" if DEVICE == "cuda" else "fork"  # of a process that has imported what both need
    start = f"start_processes(test_integrators.one_of_two, ({port}, {str(tmp_path)!r}), nprocs=2, start_method={how!r})"
    code = f"import test_integrators, torch\nif __name__ == '__main__': torch.multiprocessing.{start}"
    done = warm.run("-c", code, env=ELSEWHERE)
    assert not done.returncode, done.stderr
    found, want = torch.load(tmp_path / "found", map_location=DEVICE), gradients(Model(fused=False), *batch(8))[1][1:]
    assert tuple(found) == SHARED
    for how in SHARED:
        close(found[how], want, msg=lambda text, how=how: f"{how}: {text}")
