"""How cards draw random problems: what people have, and nobody chose for a benchmark.

Sizes are log-uniform over the range that users meet: between 64 and 128 there are as many as between 8192 and 16384.
Of the widths, 65 % are those of models that people run, 25 % are other multiples of 8, and 10 % are odd. Counts (of
rows, tokens, points) are log-uniform as well, from one to what the bytes allow. Of the problems, 80 % are contiguous,
12 % are cut from a wider matrix or begin at an offset, and 8 % have the elements of a row apart. Of the dtypes, 60 %
are bfloat16, 25 % float32, 13 % float16 and 2 % float64. Shares are of what a card has. No problem moves more than 2
GiB.

The draws know nothing of launch configs. A generator of Python's ``random`` draws: its numbers are the same in all
versions, so that a seed names a problem for good.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch

from fusebook.measure.op import Dims

__all__ = [
    "ANY", "BYTES", "FLOP", "HIDDEN", "LAYERS", "ROWS", "VOCABULARIES", "count", "dtype", "itemsize", "layer", "layout",
    "log_uniform", "matrices", "most_rows", "size",
]  # fmt: skip

#: The most that a problem moves, in bytes; the most that it computes in half types. Others are a tenth as fast.
BYTES = 2**31
FLOP = 2**42

#: Tokens that a model knows: Llama 2, GPT-2, GPT-2 padded, GPT-4, Llama 3, Qwen 2.5, gpt-oss, Gemma.
VOCABULARIES = (32000, 50257, 50304, 100277, 128256, 151936, 201088, 256000)

#: Widths of a token within a model: of the hidden state, and within feed-forward layers.
HIDDEN = (
    *(768, 896, 1024, 1152, 1280, 1536, 1600, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 4608, 5120, 5376, 6144, 6656),
    *(7168, 8192, 8960, 9216, 9728, 11008, 12288, 13824, 14336, 16384, 18432, 18944, 22016, 24576, 27648, 28672),
)

#: Hidden state and feed-forward layer together, of whole models and of single experts: GPT-2, Qwen 2.5 0.5B to 32B,
#: Qwen 3 4B and 8B, TinyLlama, Llama 3.2 1B and 3B, Llama 2 7B and 13B, Llama 3 8B and 70B, Gemma 2 9B, DeepSeek V3;
#: experts of Qwen 3 30B and 235B, gpt-oss, DeepSeek V3 and Mixtral.
LAYERS = (
    *((768, 3072), (896, 4864), (1536, 8960), (3584, 18944), (5120, 27648), (2560, 9728), (4096, 12288)),
    *((2048, 5632), (2048, 8192), (3072, 8192), (4096, 11008), (5120, 13824), (4096, 14336), (8192, 28672)),
    *((3584, 14336), (7168, 18432), (2048, 768), (4096, 1536), (2880, 2880), (7168, 2048), (4096, 14336)),
)

#: Ways to lie in memory, see `fusebook.measure.inputs.laid`: those of rows that are read once, and of any tensor.
ROWS = ("sliced", "offset")
ANY = (*ROWS, "across", "permuted")

# Shares in percent.
_OFTEN = {torch.bfloat16: 60, torch.float32: 25, torch.float16: 13, torch.float64: 2}
_REAL, _EIGHTS, _ODD = 65, 25, 10
_CONTIGUOUS, _CUT, _APART = 80, 12, 8


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    """A whole number from `least` to `most`, each octave as likely as the others."""
    return min(most, max(least, math.floor(math.exp(rng.uniform(math.log(least), math.log(most + 1))))))


def size(rng: random.Random, least: int, most: int, real: Sequence[int] = HIDDEN) -> int:
    """A width: of `real`, another multiple of 8, or odd; without `real`, one of the last two."""
    known = [n for n in real if least <= n <= most]
    kind = rng.choices(("real", "eights", "odd"), (_REAL if known else 0, _EIGHTS, _ODD))[0]
    if kind == "real":
        return rng.choice(known)
    drawn = log_uniform(rng, least, most)
    if kind == "eights":
        return drawn if most < 8 or most // 8 * 8 < least else min(most // 8 * 8, max(8, -(-drawn // 8) * 8))
    return drawn if drawn % 2 else drawn + 1 if drawn < most else max(least, drawn - 1)


def count(rng: random.Random, most: int) -> int:
    """How many rows, tokens or points: from one to what the bytes allow, few as often as many."""
    return log_uniform(rng, 1, max(1, most))


def layer(rng: random.Random, kind: str) -> tuple[int, int]:
    """The two widths of a weight: as often of `LAYERS` as widths are real; else each is drawn for itself.

    Two such weights of the dtype called `kind` leave room for what they are multiplied with.
    """
    real = rng.randrange(100) < _REAL
    while True:
        K, N = rng.choice(LAYERS) if real else (size(rng, 32, 16384, ()), size(rng, 32, 28672, ()))
        if 3 * K * N * itemsize(kind) <= BYTES:
            return K, N


def most_rows(kind: str, *, moved: int, held: int, flop: int) -> int:
    """How many rows a problem can have, of which each moves so many numbers of the dtype called `kind` and computes.

    So many numbers are `held` beside them.
    """
    numbers = BYTES // itemsize(kind) - held
    return min(numbers // max(1, moved), (FLOP if itemsize(kind) == 2 else FLOP // 10) // max(1, flop))


def dtype(rng: random.Random, known: Sequence[torch.dtype] = tuple(_OFTEN)) -> str:
    """The name of a dtype among those that an operator knows."""
    return str(rng.choices(known, [_OFTEN[kind] for kind in known])[0]).removeprefix("torch.")


def itemsize(kind: str) -> int:
    """Bytes of a number of the dtype of that name."""
    return getattr(torch, kind).itemsize


def layout(rng: random.Random, views: Sequence[str] = ANY) -> str:
    """How the data is placed in memory: contiguous, cut from more, or with the elements of a row apart."""
    cut, apart = ([view for view in views if (view in ROWS) is cut] for cut in (True, False))
    shares = _CONTIGUOUS, _CUT if cut else 0, _APART if apart else 0
    return rng.choice(rng.choices((["contiguous"], cut, apart), shares)[0])


def matrices(
    tensors: int,
    least: int,
    most: int = 2**18,
    *real: Sequence[int],
    rows: int = 2**24,
    dtypes: Sequence[torch.dtype] = tuple(_OFTEN),
    views: Sequence[str] = ANY,
) -> Callable[[random.Random], Dims]:
    """The draw of an operator on matrices, of which so many are moved; the width is drawn first.

    Parameters
    ----------
    tensors : int
        How many matrices are moved.
    least, most : int
        The range of the width.
    *real : sequence of int
        Widths of models; one of these sequences is chosen for each problem.
    rows : int
        The largest number of rows.
    dtypes, views : sequence
        The dtypes that the operator takes, and the layouts that are drawn.
    """

    def draw(rng: random.Random) -> Dims:
        kind = dtype(rng, dtypes)
        N = size(rng, least, most, real[0] if len(real) == 1 else rng.choice(real))
        M = count(rng, min(rows, BYTES // (tensors * N * itemsize(kind))))
        return {"M": M, "N": N, "dtype": kind, "layout": layout(rng, views)}

    return draw
