"""Time launch configs on this GPU, and print rows of a table: ``python -m fusebook.measure.tune concat_gemm``.

For a problem of each row of `fusebook.kernels.products.TABLES`, the configs of its table are tried, and the same with
tiles half and twice as wide. Each result is checked; those within tolerance are timed with a cold L2 cache. A printed
row replaces its row in the table where it is faster.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusebook.cards import OPS
from fusebook.kernels import products
from fusebook.kernels.products import ANY, TABLES, Config
from fusebook.measure import _removed, check, timing

__all__ = ["candidates", "main", "problem", "tune"]

#: Options that went, and what to do instead.
REMOVED = {
    "--only": 'name kinds after the operator, such as "half row"',
    "--repeat": "leave it out",
    "--costs": "tables of launch configs replace cost models; leave it out",
    "--out": "copy the printed rows into fusebook.kernels.products.TABLES",
}


def problem(name: str, table: Sequence[Config], row: Config) -> tuple[int, int, int]:
    """M, K and N of a problem that takes a row of a table; N are the columns of one weight."""
    weights = 2 if name == "concat_gemm" else 1
    below = max((r.size for r in table if r.size < row.size and r.rows >= row.rows), default=0)
    if row.rows < ANY and row.size == ANY:
        return int(row.rows), 4096, max(11008, int(2 * below / row.rows / weights) // 128 * 128)
    size = 0.8 * row.size if row.size < ANY else 4 * max(below, 2**20)
    M = int(row.rows) if row.rows < ANY else max(128, math.isqrt(int(size) // 2) // 64 * 64)
    return M, 4096 if row.rows < ANY else max(512, M), max(64, int(size / M / weights) // 64 * 64)


def candidates(table: Sequence[Config]) -> list[Config]:
    """The configs of a table, without their limits, and the same with tiles half and twice as wide."""
    plain = [row._replace(rows=ANY, size=ANY, instead="") for row in table]
    wider = [row._replace(bn=bn) for row in plain for bn in (row.bn // 2, 2 * row.bn) if 16 <= bn <= 256]
    return list(dict.fromkeys(plain + wider))


def _calls(name: str, kind: str, inputs: Sequence[torch.Tensor], configs: Sequence[Config]) -> dict[Any, Any]:
    """A call for each config, and one of torch's matmul under "torch"."""
    arithmetic, layout = kind.split()
    x, *weights = inputs
    N = sum(w.shape[1] for w in weights) if name == "concat_gemm" else weights[0].shape[1]

    def call(c: Config) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            out = x.new_empty(len(x), N)
            if name == "concat_gemm":
                products._launch_concat(out, x, weights, arithmetic, layout, c)
            else:
                gate, up = weights
                products._launch_swiglu(out, x, gate, up, None, arithmetic, c)
            return out

        return run

    def torchs() -> torch.Tensor:
        if name == "concat_gemm":
            return products.concat_gemm(x, weights, tf32=arithmetic == "tf32", strategy="views")
        return products.swiglu(x, *weights, tf32=arithmetic == "tf32", strategy="views")

    return {c: call(c) for c in configs} | {"torch": torchs}


def tune(name: str, kind: str, repeat: int = 20) -> Iterator[tuple[Config, dict[Any, float]]]:
    """For each row of a table, the row and the seconds of its candidates and of torch, the fastest first."""
    table = TABLES[name][kind]
    arithmetic, layout = kind.split()
    dtype = torch.bfloat16 if arithmetic == "half" else torch.float32
    draw = functools.partial(torch.randn, dtype=dtype, device="cuda")
    for row in table:
        M, K, N = problem(name, table, row)
        weights = [draw(N, K).T if layout == "column" else draw(K, N) for _ in range(2)]
        inputs = draw(M, K), *(w / math.sqrt(K) for w in weights)
        yard = check.yardstick(OPS[name], inputs)
        calls: dict[str, tuple[Any, Callable[[], Any]]] = {}
        for c, call in _calls(name, kind, inputs, candidates(table)).items():
            try:
                right = yard.judge(call(), arithmetic).ok
            except Exception as error:  # for one, it needs more shared memory than there is
                print(f"{kind}: {c}: {type(error).__name__}", file=sys.stderr)
                continue
            if right:
                calls[str(c)] = c, call
        times = timing.cold({key: call for key, (_, call) in calls.items()}, warmup=2, repeat=repeat)
        seconds = {calls[key][0]: t.q50 for key, t in times.items() if t is not None}
        yield row, dict(sorted(seconds.items(), key=lambda pair: pair[1]))


def _line(row: Config, seconds: dict[Any, float]) -> str:
    """A row of a table as source, with the limits of the old one."""
    best = next(c for c in seconds if c != "torch")
    torchs = f", torch {seconds['torch'] * 1e6:.1f} us" if "torch" in seconds else ""
    return f"{best._replace(rows=row.rows, size=row.size)},  # {seconds[best] * 1e6:.1f} us{torchs}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fusebook.measure.tune", description="Time launch configs on this GPU."
    )
    parser.add_argument("op", choices=TABLES, help=", ".join(TABLES))
    parser.add_argument("kinds", nargs="*", metavar="kind", help='math and layout, such as "half row"; all by default')
    _removed(parser, REMOVED)
    args = parser.parse_args(argv)
    if unknown := set(args.kinds) - set(TABLES[args.op]):
        parser.error(f"expected kinds of {', '.join(TABLES[args.op])}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print(
            "fusebook.measure.tune: expected a CUDA device, got none; configs are timed on a GPU",
            file=sys.stderr,
        )
        return 1
    for kind in args.kinds or TABLES[args.op]:
        print(f'"{kind}": (')
        for row, seconds in tune(args.op, kind):
            print(f"    {_line(row, seconds)}", flush=True)
        print("),")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
