"""Logistic regression by gradient descent, a step and a fit: their meaning, costs and rivals."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor

from fusebook.cards import _draws
from fusebook.cards._peers import compiled
from fusebook.kernels._call import accumulated
from fusebook.kernels.logistic_step import logistic_fit, logistic_step, logistic_step_eager
from fusebook.measure.op import Cost, Dims, Op, Variant

__all__ = ["LOGISTIC_FIT", "LOGISTIC_STEP", "PAGE"]

#: The page that tells of them.
PAGE = 301


def _clouds(rng: torch.Generator, dtype: torch.dtype, N: int, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two clouds of points, seven tenths in the second, and weights that know nothing of them.

    Their centres differ in every feature, so that sums over rows do not cancel; margins are about one whatever D.
    """
    kind, device = accumulated(dtype), rng.device
    y = (torch.rand(N, generator=rng, device=device) < 0.7).to(kind)
    centre = 2 * torch.randn(D, generator=rng, device=device, dtype=kind).sign() / max(D, 1) ** 0.5
    X = torch.randn(N, D, generator=rng, device=device, dtype=kind)
    X += (2 * y - 1)[:, None] * centre
    w = torch.randn(D, generator=rng, device=device, dtype=kind) / max(D, 1) ** 0.5
    return X, y, w, torch.full((), 0.5, dtype=kind, device=device)


def _make_step(rng: torch.Generator, dtype: torch.dtype, *, N: int, D: int) -> tuple[Any, ...]:
    X, y, w, b = _clouds(rng, dtype, N, D)
    X[::10] *= 40  # margins at which an exponential overflows, and the logarithm of 1 - p is minus infinity
    return X.to(dtype), y.to(dtype), w, b, 0.5, 0.01


def _make_fit(rng: torch.Generator, dtype: torch.dtype, *, N: int, D: int, steps: int) -> tuple[Any, ...]:
    X, y, w, b = _clouds(rng, dtype, N, D)
    # The largest curvature is about 1 + D / N: below its inverse a step goes down, and errors die out.
    return X.to(dtype), y.to(dtype), w, b, 0.5 / (1 + D / N), 0.01, steps


def _reference_step(
    X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return logistic_step_eager(X.to(w.dtype), y.to(w.dtype), w, b, lr, l2)


def _loop(
    step: Any, X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    losses = []
    for _ in range(steps):
        w, b, loss = step(X, y, w, b, lr, l2)
        losses.append(loss)
    return w, b, torch.stack(losses) if losses else w.new_empty(0)


def _reference_fit(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _loop(_reference_step, *inputs)


def _cost_step(itemsize: int, *, N: int, D: int) -> Cost:
    wide = max(itemsize, 4)
    return Cost(read=N * (D + 1) * itemsize + (D + 1) * wide, write=(D + 2) * wide, flop=4 * N * D)


def _cost_step_eager(itemsize: int, *, N: int, D: int) -> Cost:
    least = _cost_step(itemsize, N=N, D=D)
    return Cost(read=least.read + N * D * itemsize, write=least.write, flop=least.flop)


def _cost_fit(itemsize: int, *, N: int, D: int, steps: int) -> Cost:
    wide = max(itemsize, 4)
    return Cost(
        read=N * (D + 1) * itemsize + (D + 1) * wide, write=(D + 1 + steps) * wide, flop=4 * N * D * steps
    )  # fmt: skip


def _cost_fit_steps(itemsize: int, *, N: int, D: int, steps: int) -> Cost:
    one = _cost_step(itemsize, N=N, D=D)
    return Cost(read=one.read * steps, write=one.write * steps, flop=one.flop * steps)


def _cost_fit_eager(itemsize: int, *, N: int, D: int, steps: int) -> Cost:
    one = _cost_step_eager(itemsize, N=N, D=D)
    return Cost(read=one.read * steps, write=one.write * steps, flop=one.flop * steps)


def _one_dtype(X: Tensor, y: Tensor, w: Tensor) -> None:
    if X.dtype != w.dtype:
        raise NotImplementedError(f"the chain takes one dtype, got X of {X.dtype} and w of {w.dtype}")


def _eager(X: Tensor, y: Tensor, w: Tensor, *rest: Any) -> Any:
    _one_dtype(X, y, w)
    return logistic_step_eager(X, y, w, *rest)


def _torch_compile(X: Tensor, y: Tensor, w: Tensor, *rest: Any) -> Any:
    _one_dtype(X, y, w)
    return compiled(logistic_step_eager, None)(X, y, w, *rest)


def _reduce_overhead(X: Tensor, y: Tensor, w: Tensor, *rest: Any) -> Any:
    _one_dtype(X, y, w)
    # Its outputs are the graph's memory, which the next call overwrites.
    torch.compiler.cudagraph_mark_step_begin()
    return tuple(v.clone() for v in compiled(logistic_step_eager, "reduce-overhead")(X, y, w, *rest))


def _numpy_step(X: Any, y: Any, w: Any, b: Any, lr: float, l2: float) -> tuple[Any, Any, Any]:
    """The chain in NumPy."""
    import numpy as np

    z = X @ w + b
    e = np.exp(-np.abs(z))
    loss = (np.maximum(-z, 0) + (1 - y) * z + np.log1p(e)).mean() + l2 * (w * w).sum()
    r = (np.where(z >= 0, 1, e) / (1 + e) - y) / w.dtype.type(len(y))
    return w - lr * (r @ X + 2 * l2 * w), b - lr * r.sum(), loss


def _numpy_fit(X: Any, y: Any, w: Any, b: Any, lr: float, l2: float, steps: int) -> tuple[Any, Any, Any]:
    import numpy as np

    losses = np.empty(steps, w.dtype)
    for t in range(steps):
        w, b, losses[t] = _numpy_step(X, y, w, b, lr, l2)
    return w, b, losses


def _on_host(function: Any, X: Tensor, y: Tensor, w: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The function, and its inputs in the host's memory."""
    _one_dtype(X, y, w)
    return function, *(v.cpu() if isinstance(v, Tensor) else v for v in (X, y, w, *rest))


def _in_arrays(function: Any, *inputs: Any) -> tuple[Any, ...]:
    """The same for a function of NumPy, and the dtype of its results."""
    function, *rest = _on_host(function, *inputs)
    return function, inputs[2].dtype, *(v.numpy() if isinstance(v, Tensor) else v for v in rest)


def _run_numpy(function: Any, dtype: torch.dtype, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.as_tensor(v, dtype=dtype) for v in function(*inputs))


def _run_cpu(function: Any, *inputs: Any) -> tuple[Tensor, ...]:
    return function(*inputs)


def _fit_of(step: Any) -> Any:
    return functools.partial(_loop, step)


def _captured(function: Any, *inputs: Any) -> tuple[Any, Any]:
    """A CUDA graph of the whole function, and the memory of its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*inputs)
    return graph, outputs


def _replay(graph: Any, outputs: Any) -> Any:
    graph.replay()
    return outputs


def _captured_fit(
    step: Any, X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, steps: int
) -> tuple[Any, ...]:  # fmt: skip
    """A CUDA graph of up to a hundred steps, which leaves the weights where it finds them."""
    if steps == 0:
        raise NotImplementedError("a graph of no steps has nothing to replay")
    together = max(n for n in range(1, min(steps, 100) + 1) if steps % n == 0)
    state = w.clone(), b.clone()

    def some() -> Tensor:
        *new, losses = _loop(step, X, y, *state, lr, l2, together)
        for old, value in zip(state, new, strict=True):
            old.copy_(value)
        return losses

    return *_captured(some), state, (w, b), steps // together


def _replay_fit(graph: Any, losses: Tensor, state: Any, start: Any, times: int) -> tuple[Tensor, ...]:
    for old, value in zip(state, start, strict=True):
        old.copy_(value)
    found = losses.new_empty(times, len(losses))
    for part in found:
        graph.replay()
        part.copy_(losses)
    return *state, found.view(-1)


def _fusebook_step(check: bool = False) -> Any:
    return functools.partial(logistic_step, check=check)


def _fusebook_fit(on_chip: bool | None) -> Any:
    def fit(X: Tensor, y: Tensor, w: Tensor, b: Tensor, lr: float, l2: float, steps: int) -> Any:
        return logistic_fit(X, y, w, b, lr, l2, steps=steps, check=False, on_chip=on_chip)

    return fit


#: Features of tables, images, texts and embeddings.
_FEATURES = (4, 13, 28, 30, 54, 64, 128, 256, 300, 512, 768, 784, 1024, 1536, 2048, 3072, 4096, 10_000)


def _draw_step(rng: random.Random) -> Dims:
    """A few rows and up to millions, of one feature and up to tens of thousands."""
    dtype = _draws.dtype(rng, (torch.float32, torch.float64, torch.bfloat16))
    D = _draws.size(rng, 1, 2**15, _FEATURES)
    N = _draws.count(rng, min(2**24, 2**30 // (D * _draws.itemsize(dtype))))
    return {"N": N, "D": D, "dtype": dtype, "layout": _draws.layout(rng, ("sliced", "offset", "across"))}


def _draw_fit(rng: random.Random) -> Dims:
    """As of a step, some of which are taken, but of 2**33 numbers in all."""
    dtype = _draws.dtype(rng, (torch.float32, torch.float64))
    steps = _draws.log_uniform(rng, 1, 500)
    D = _draws.size(rng, 1, 2**15, _FEATURES)
    N = _draws.count(rng, min(2**24, 2**30 // (D * _draws.itemsize(dtype)), 2**33 // (D * steps)))
    layout = _draws.layout(rng, ("sliced", "offset", "across"))
    return {"N": N, "D": D, "steps": steps, "dtype": dtype, "layout": layout}


LOGISTIC_STEP = Op(
    name="logistic_step",
    reference=_reference_step,
    make=_make_step,
    cost=_cost_step,
    variants={
        "eager": Variant(_eager, cost=_cost_step_eager, needs=()),
        "NumPy": Variant(
            _run_numpy, cost=_cost_step_eager, needs=(), prepare=functools.partial(_in_arrays, _numpy_step), on_cpu=True
        ),
        "torch on the CPU": Variant(
            _run_cpu, cost=_cost_step_eager, needs=("cuda",), prepare=functools.partial(_on_host, _eager), on_cpu=True
        ),
        "torch.compile": Variant(_torch_compile, cost=_cost_step_eager, recompiles=True),
        "reduce-overhead": Variant(_reduce_overhead, cost=_cost_step_eager, recompiles=True),
        "eager in a graph": Variant(_replay, cost=_cost_step_eager, prepare=functools.partial(_captured, _eager)),
        "fusebook": Variant(_fusebook_step(), needs=()),
        "fusebook, checked": Variant(_fusebook_step(check=True), needs=()),
    },
    configs={
        "classic": ({"N": 400, "D": 784},),
        "roof": ({"N": 1_000_000, "D": 784},),
        "small": ({"N": 4000, "D": 784}, {"N": 400, "D": 64}),
        "medium": ({"N": 40_000, "D": 784}, {"N": 400_000, "D": 64}, {"N": 4000, "D": 16_384}),
        "large": ({"N": 10_000_000, "D": 64}, {"N": 100_000, "D": 10_000}),
    },
    draw=_draw_step,
    # A single ragged tile; several tiles, the last ragged; rows too wide to be kept; no features at all.
    edges=({"N": 13, "D": 7}, {"N": 70, "D": 196}, {"N": 3, "D": 16_500}, {"N": 5, "D": 0}),
    dtypes=(torch.float32, torch.float64, torch.bfloat16),
)
LOGISTIC_FIT = Op(
    name="logistic_fit",
    reference=_reference_fit,
    make=_make_fit,
    cost=_cost_fit,
    variants={
        "eager": Variant(_fit_of(_eager), cost=_cost_fit_eager, needs=()),
        "NumPy": Variant(
            _run_numpy, cost=_cost_fit_eager, needs=(), prepare=functools.partial(_in_arrays, _numpy_fit), on_cpu=True
        ),
        "torch on the CPU": Variant(
            _run_cpu,
            cost=_cost_fit_eager,
            needs=("cuda",),
            prepare=functools.partial(_on_host, _fit_of(_eager)),
            on_cpu=True,
        ),
        "torch.compile": Variant(_fit_of(_torch_compile), cost=_cost_fit_eager, recompiles=True),
        "reduce-overhead": Variant(_fit_of(_reduce_overhead), cost=_cost_fit_eager, recompiles=True),
        "eager in a graph": Variant(
            _replay_fit, cost=_cost_fit_eager, prepare=functools.partial(_captured_fit, _eager)
        ),
        "torch.compile in a graph": Variant(
            _replay_fit, cost=_cost_fit_eager, prepare=functools.partial(_captured_fit, _torch_compile), recompiles=True
        ),
        "fusebook steps": Variant(_fusebook_fit(False), cost=_cost_fit_steps, needs=()),
        "fusebook": Variant(_fusebook_fit(None), needs=()),
    },
    configs={
        "classic": ({"N": 400, "D": 784, "steps": 200},),
        "rows": tuple({"N": n, "D": 784, "steps": 50} for n in (100, 400, 1600, 4000, 16_000)),
        "features": tuple({"N": 400, "D": d, "steps": 50} for d in (16, 256, 784, 4096)),
    },
    draw=_draw_fit,
    edges=({"N": 13, "D": 7, "steps": 3}, {"N": 5, "D": 0, "steps": 2}, {"N": 3, "D": 4, "steps": 0}),
    dtypes=(torch.float32, torch.float64),
)
