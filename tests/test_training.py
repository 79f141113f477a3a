"""Models of transformers with the library's operators: what is replaced and left, and five steps of training."""

import collections
import contextlib
import copy
import functools
import gc
import inspect
import os
import pickle
import socket
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fusebook

transformers = pytest.importorskip("transformers")

from transformers.models.gemma import modeling_gemma  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
IDS = torch.tensor([[5, 1, 99, 4], [7, 127, 0, 31]], device=DEVICE)


def tiny(family="Llama", **options):
    """A model with two layers, and the same weights each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None}
    config = getattr(transformers, f"{family}Config")(
        **sizes, **heads, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, **options
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(p, 0.5, 1.5)
    return model.to(DEVICE)


@pytest.fixture(scope="module")
def llama():
    return tiny()


def patched(model, **options):
    model = copy.deepcopy(model)
    said = fusebook.patch(model, **options)
    assert said.replaced
    return model


def gradients(model, **given):
    loss = model(**{"input_ids": IDS, "labels": IDS, **given}).loss
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return [loss.detach(), *found]


def close(a, b, rtol=1e-5):
    """Each tensor within `rtol` of the other's largest element."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=rtol * y.abs().max().item(), check_dtype=False)


# What is replaced ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_module_gives_what_it_gave(family):
    model = tiny(family).double()
    fused = copy.deepcopy(model)
    replaced, left = fusebook.patch(fused)
    layers = {name.rpartition(".")[2] for name in replaced}
    norms = {"norm", "input_layernorm", "post_attention_layernorm"} | ({"q_norm", "k_norm"} & layers)
    assert layers == {"", "self_attn"} | norms | ({"mlp"} if family != "Gemma" else set())
    assert ("q_norm" in layers) == (family == "Qwen3")
    assert {why.rpartition("; ")[2] for why in left.values()} == (
        {"its activation is GELUTanh"} if family == "Gemma" else set()
    )
    assert list(fused.state_dict()) == list(model.state_dict())
    seen = []

    def compared(name, module, args, kwargs, y):
        own = fused.get_submodule(name)(*args, **kwargs)
        seen.append(name)
        close([own[0] if isinstance(own, tuple) else own], [y[0] if isinstance(y, tuple) else y])

    for name in {*replaced} - {""}:
        model.get_submodule(name).register_forward_hook(functools.partial(compared, name), with_kwargs=True)
    want = gradients(model)
    assert {*seen} == {*replaced} - {""}
    close(gradients(fused), want)
    assert {*fusebook.unpatch(fused)} == {*replaced, "lm_head"} and not fusebook.unpatch(fused)
    assert not any("forward" in vars(m) for m in fused.modules())


class Operators(TorchDispatchMode):
    """Count the library's operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fusebook":
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


EACH = {"norm": 5, "rope_two": 2, "silu_mul": 2}


def test_the_operators_run(llama):
    model = patched(llama)
    with Operators() as mode:
        model(IDS, labels=IDS).loss
    loss_of = {name: n for name, n in mode.counts.items() if "linear" in name}
    assert mode.counts == EACH | loss_of and sum(loss_of.values()) == 1


class Clipped(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).clamp(-1e4, 1e4)


class Halved(modeling_gemma.GemmaRMSNorm):
    """It inherits the forward and changes what that calls."""

    def _norm(self, x):
        return super()._norm(x) / 2


class Scaled(modeling_llama.LlamaForCausalLM):
    def forward(self, **given):
        return super().forward(**given)


def test_what_computes_something_else_is_left_alone(llama, monkeypatch):
    model = copy.deepcopy(llama)
    layers, norms = model.model.layers, model.model
    layers[0].input_layernorm.__class__ = Clipped
    layers[1].input_layernorm.forward = lambda x: x
    layers[0].mlp.act_fn = nn.GELU()
    norms.norm.variance_epsilon = 0.5  # another number is no other computation
    model.lm_head = nn.Sequential(model.lm_head)
    replaced, left = fusebook.patch(model)
    assert left["model.layers.0.input_layernorm"].partition(";")[0].endswith("Clipped is not known")
    assert left["model.layers.1.input_layernorm"] == "its forward was set on the module itself"
    assert left["model.layers.0.mlp"].endswith("fusebook.silu_mul between its matmuls; its activation is GELU")
    assert left[""].startswith("its head is a Sequential")
    assert "model.norm" in replaced and len(left) == 4

    gemma = tiny("Gemma")
    gemma.model.norm.__class__ = Halved
    assert "results or gradients are not those" in fusebook.patch(gemma).left["model.norm"]

    whole = copy.deepcopy(llama)
    whole.__class__ = Scaled
    assert "test_training.Scaled is not known" in fusebook.patch(whole).left[""]
    again = fusebook.patch(whole)
    assert not again.replaced and again.left["model.norm"] == "it is patched already"

    custom = copy.deepcopy(llama)
    custom.loss_function = lambda **given: given["logits"].sum()
    assert fusebook.patch(custom).left[""] == "its loss is not transformers' ForCausalLMLoss"
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
        left = fusebook.patch(copy.deepcopy(llama)).left
    assert "does not call the apply_rotary_pos_emb of its own module" in left["model.layers.0.self_attn"]
    assert left["model.layers.0.mlp"] == f"the forward of LlamaMLP was replaced by one of {__name__}"
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert "does not compute what fusebook.rope does" in str(fusebook.patch(copy.deepcopy(llama)))


def test_a_loss_of_changed_logits_is_left_alone(llama, monkeypatch):
    """As the forward of a later release may be."""

    def capped(self, input_ids=None, labels=None, **given):
        logits = torch.tanh(self.lm_head(self.model(input_ids=input_ids).last_hidden_state))
        return SimpleNamespace(loss=self.loss_function(logits=logits, labels=labels, **given), logits=logits)

    def last(self, input_ids=None, labels=None, **given):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state[:, -1:])
        return SimpleNamespace(loss=self.loss_function(logits=logits, labels=labels, **given), logits=logits)

    for forward, said in ((capped, "is not one that is known: TypeError: tanh()"), (last, "more with the logits than")):
        forward.__module__ = modeling_llama.__name__
        monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", forward)
        assert (
            f"its forward {'does ' if forward is last else ''}{said}" in fusebook.patch(copy.deepcopy(llama)).left[""]
        )


def test_other_families_and_models_are_left_alone(llama):
    model = tiny("Olmo")
    replaced, left = fusebook.patch(model)
    assert not replaced and left[""].startswith("the forward of transformers.models.olmo.modeling_olmo.OlmoForCausalLM")
    assert left[""].endswith("is not known; known are Gemma, Llama, Mistral, Qwen2, Qwen3")
    said = str(fusebook.patch(nn.Linear(2, 3)))
    assert (
        said
        == "left: the model: it has no module of a known kind; known are those of "
        + left[""].rpartition("known are ")[2]
    )
    for call in (fusebook.patch, fusebook.unpatch):
        with pytest.raises(TypeError, match="torch.nn.Module, got str; pass the model"):
            call("llama")
    layer = copy.deepcopy(llama.model.layers[0])
    assert fusebook.patch(layer).left == {"self_attn": "no rotary_emb is in what was given"}


# The loss ------------------------------------------------------------------------------------------------------------


def test_logits_are_there_unless_a_gradient_is_recorded_for_labels(llama):
    model = patched(llama)
    with torch.no_grad():
        want = llama(IDS, labels=IDS)
        close([*model(IDS, labels=IDS).to_tuple()[:2]], [*want.to_tuple()[:2]])
    output = model(IDS, None, None, None, None, IDS)  # labels by position
    assert output.logits is None and "logits" not in output and output.loss.dtype == torch.float32
    close([output.loss], [want.loss])
    assert model(IDS).logits is not None
    loss, logits = model(IDS, labels=IDS, return_dict=False)[:2]
    close([loss, logits], [want.loss, want.logits])
    assert patched(llama, loss=False)(IDS, labels=IDS).logits is not None
    model.loss_function = lambda logits, labels, **rest: logits.sum()  # after patching
    close([model(IDS, labels=IDS).loss], [want.logits.sum()])
    assert inspect.signature(model.forward) == inspect.signature(llama.forward)
    close([patched(llama).generate(IDS, max_new_tokens=2, do_sample=False)], [llama.generate(IDS, max_new_tokens=2)])


@pytest.mark.parametrize(
    "given",
    [
        {"num_items_in_batch": torch.tensor(3)},
        {"num_items_in_batch": 5, "ignore_index": 4},
        {"shift_labels": IDS.flip(1)},
        {"labels": torch.where(IDS > 90, -100, IDS)},
        {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], device=DEVICE), "output_hidden_states": True},
    ],
    ids=str,
)
def test_what_the_loss_is_given(llama, given):
    close(gradients(patched(llama), **given), gradients(llama, **given))


def test_labels_that_are_no_class_are_named(llama):
    with pytest.raises(IndexError, match="128"):
        patched(llama, check=True)(IDS, labels=IDS + 1)
    assert patched(llama, check=False)(IDS, labels=IDS + 1).loss.isnan()


def test_copies_and_pickles():
    model, want = patched(tiny()), tiny()
    again = copy.deepcopy(model)
    again.model.norm.weight.data.mul_(2)
    want.model.norm.weight.data.mul_(2)
    close(gradients(again), gradients(want))
    loaded = pickle.loads(pickle.dumps(model))  # with the forwards of its classes
    close(gradients(loaded), gradients(tiny()))


# Memory --------------------------------------------------------------------------------------------------------------


def noted(model):
    """A patched model, and where it puts the memory of what norms and activations return."""
    kept = {}
    for name, module in model.model.layers.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(lambda _, args, y, name=name: kept.update({name: y}))
        elif name.endswith("down_proj"):
            module.register_forward_pre_hook(lambda _, args, name=name: kept.update({name: args[0]}))
    return model, kept


@pytest.mark.parametrize("how", ["recompute", "default", "offload"])
def test_recompute_keeps_neither_norms_nor_products(how, llama):
    model, kept = noted(patched(llama, recompute=how != "default"))
    with torch.autograd.graph.save_on_cpu() if how == "offload" else contextlib.nullcontext():
        loss = model(IDS, labels=IDS).loss
    refs = [StorageWeakRef(t.untyped_storage()) for t in kept.values()]
    kept.clear()
    gc.collect()  # Triton's interpreter leaves storages in a cycle
    assert len(refs) == 6 and all(ref.expired() == (how == "recompute") for ref in refs)
    for again in (True, False):  # the second time from what the first one has computed
        found = torch.autograd.grad(loss, [*model.parameters()], retain_graph=again)
        close(found, gradients(llama)[1:])


def test_what_was_changed_in_place_is_kept(llama):
    changed, want = patched(llama, recompute=True), copy.deepcopy(llama)
    for model in (changed, want):
        model.model.layers[0].input_layernorm.register_forward_hook(lambda _, args, y: y.mul_(2))
    close(gradients(changed), gradients(want))


# Weights of other kinds ----------------------------------------------------------------------------------------------


def test_weights_of_another_dtype(llama):
    plain = copy.deepcopy(llama).to(torch.bfloat16)
    for module in plain.modules():
        if isinstance(module, modeling_llama.LlamaRMSNorm):
            module.float()
    x = torch.randn(2, 3, 64, device=DEVICE, dtype=torch.bfloat16)
    norm = patched(plain).model.norm
    assert norm(x).dtype == plain.model.norm(x).dtype == torch.float32
    close([norm(x)], [plain.model.norm(x)], 1e-2)
    mlp = patched(plain).model.layers[0].mlp
    close([mlp(x)], [plain.model.layers[0].mlp(x)], 2e-2)
    with pytest.raises(RuntimeError, match="same dtype"):  # from torch's matmul, as before
        mlp(x.float())


def test_weights_without_memory_or_in_other_layouts(llama):
    meta = patched(copy.deepcopy(llama).to("meta"))
    assert meta(IDS.to("meta"), labels=IDS.to("meta")).loss.is_meta
    norm = patched(llama).model.norm
    norm.weight = nn.Parameter(norm.weight.detach().to_sparse())
    with pytest.raises(TypeError, match="expected weight to be dense"):
        norm(torch.ones(2, 64, device=DEVICE))


# Training ------------------------------------------------------------------------------------------------------------


def trained(model, run=None, optimizer=torch.optim.AdamW, scaler=None, count=5, ids=IDS):
    """The losses of some steps, and the gradients of the first one and the last."""
    run, made, losses, found = model if run is None else run, optimizer(model.parameters(), lr=1e-3), [], []
    for i in range(count):
        with torch.autocast(DEVICE, torch.float16, enabled=scaler is not None):
            loss = run(input_ids=ids, labels=ids).loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(made)
        losses.append(loss.detach())
        found += (
            [getattr(p.grad, "full_tensor", p.grad.clone)() for p in model.parameters()] if i in (0, count - 1) else []
        )
        if scaler is None:
            made.step()
        else:
            scaler.step(made)
            scaler.update()
        made.zero_grad()
    return [torch.stack(losses), *found]


@functools.cache
def by_torch(dtype=torch.float64):
    return trained(tiny().to(dtype))


def scaled(model):
    return trained(model, scaler=torch.amp.GradScaler(DEVICE, init_scale=2.0**10))


def checkpointed(model):
    model.train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return trained(model)


def compiled(model):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):  # inductor is given the same graph, and takes ten times as long on the CPU
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager" if DEVICE == "cpu" else "inductor")(graph, inputs)

    found = trained(model, torch.compile(model, backend=backend, fullgraph=True))
    (code,) = graphs
    assert {name: code.count(f"torch.ops.fusebook.{name}.default(") for name in EACH} == EACH
    return found


def offloaded(model):
    with torch.autograd.graph.save_on_cpu():
        return trained(model)


WAYS = {
    "plain": lambda model: trained(model, optimizer=fusebook.optim.AdamW),
    "checkpoints": checkpointed,
    "offload": offloaded,
    "compile": compiled,
    "GradScaler": scaled,
}


@pytest.mark.parametrize("how", WAYS)
def test_five_steps(how, llama):
    found = WAYS[how](patched(llama))
    other = scaled(copy.deepcopy(llama)) if how == "GradScaler" else by_torch(torch.float32)
    slack = 2e-4 if how == "GradScaler" else 2e-5  # of float16's matmuls, or of float32
    for a, b, true in zip(found, other, by_torch(), strict=True):
        assert (a - true).norm() <= 2 * (b - true).norm() + slack * true.norm()


def one_of_two(rank, port, folder):
    """Steps of a process of two, each with half of the batch."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    ids = IDS[rank : rank + 1]
    found = {}
    model = patched(tiny())
    wrapped = DistributedDataParallel(model)
    found["DDP"] = trained(model, wrapped, ids=ids)
    del wrapped  # its destructor hung at times once the group was gone
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (2,))
    model = patched(tiny())
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh)
    found["FSDP2"] = trained(model, optimizer=fusebook.optim.AdamW, ids=ids)
    model = tiny()
    for module in [*model.model.layers, model.lm_head, model]:
        fully_shard(module, mesh=mesh)
    assert len(fusebook.patch(model).replaced) == 10  # parts of weights are no obstacle, nor is a head of another group
    found["FSDP2 before patching"] = trained(model, count=1, ids=ids)
    with pytest.raises(TypeError, match=r"pass to_local\(\)"):  # outside of the model its weights are in pieces
        model.model.norm(torch.ones(2, 64))
    for tensors in found.values():
        dist.all_reduce(tensors[0])  # the mean loss of both
        tensors[0] /= 2
    if not rank:
        torch.save(found, os.path.join(folder, "found"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on the CPU")
def test_five_steps_of_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, (port, str(tmp_path)), nprocs=2)
    found = torch.load(tmp_path / "found")
    assert len(found) == 3
    first = 1 + len(by_torch()) // 2
    for losses, *rest in found.values():
        close([losses, *rest[: first - 1]], [by_torch()[0][: len(losses)], *by_torch()[1:first]], 1e-4)
        close(rest[first - 1 :] if len(losses) > 1 else [], by_torch()[first:] if len(losses) > 1 else [], 1e-3)
