"""An operator small enough to cheat on: y = 2 x, with honest variants and planted ones."""

import torch

from fusebook.measure.inputs import rough
from fusebook.measure.op import Cost, Op, Variant


def reference(x):
    return 2 * x


def make(rng, dtype, *, M, N):
    return (rough(rng, (M, N), dtype),)


def cost(itemsize, *, M, N):
    return Cost(read=M * N * itemsize, write=M * N * itemsize, flop=M * N)


def draw(rng):
    return {"M": rng.randint(1, 9), "N": rng.randint(1, 9), "dtype": "float32", "layout": "contiguous"}


def toy(**variants):
    """The card, with more variants after the honest one."""
    return Op(
        name="toy",
        reference=reference,
        make=make,
        cost=cost,
        variants={"honest": Variant(lambda x: x + x, needs=()), **variants},
        configs={
            "small": [{"M": n, "N": n} for n in (16, 64)],
            "large": [{"M": 16384, "N": 16384}],
            "long": [{"M": 4, "N": n} for n in range(1, 26)],
        },
        draw=draw,
        rows=(0,),
        edges=[{"M": 3, "N": 5}],
    )


def variant(run, **fields):
    return Variant(run, **{"needs": (), **fields})


def verify(op, name, dtype, dims):
    """Check an implementation at one point, as `bench.run` does before it times it."""
    from fusebook.measure import bench

    gpu = torch.cuda.is_available()  # interpreted, programs run one by one: a second equal call would not differ
    data = bench._Data.make(op, dtype, dims, "cuda" if gpu else "cpu")
    return bench._verify(op.variants[name], data, (0, 1, 1) if gpu else (0, 1))[0]


def machine(**changes):
    """A made-up machine for tests; no number in it was measured."""
    from fusebook.measure.machine import Machine

    fields = dict(
        name="Test GPU",
        slug="test-gpu",
        sms=10,
        l2=50_000_000,
        memory=2**34,
        capability=(9, 0),
        driver="1.0",
        cuda="13.0",
        python="3.12",
        torch=torch.__version__,
        triton="3.6",
        onnxruntime="",
        cpu="Test CPU",
        cores=2,
        clocks={"sm": 1000, "memory": 1000},
        copy=4e12,
        fill=4.5e12,
        read=4.2e12,
        rates={"float64": 6e13, "float32": 5e13, "tf32": 3e14, "float16": 7e14, "bfloat16": 7e14},
        floor_cold={"1": 3e-6, "1024": 4e-6, "65536": 4e-5},
        floor_warm={"1": 1e-6, "1024": 2e-6, "65536": 3e-5},
        bandwidth=[{"bytes": 2**20, "cold": 1e12}],
        commit="0123456789ab",
        date="2026-01-01",
    )
    return Machine(**{**fields, **changes})
