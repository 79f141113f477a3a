"""Results that nobody measured, for tests: a made-up GPU on which every time is a formula."""

import json
import math
from dataclasses import asdict

import pandas as pd

from fusebook.measure import bench, sources, timing
from fusebook.measure.op import Cost
from toy import machine

#: How much longer than the copy each variant takes here. quack is the one that refuses odd widths.
SLOWER = {"eager": 5.0, "torch": 1.3, "torch.compile": 1.2, "fusebook": 1.01, "Liger": 1.05, "quack": 1.02}

#: What it takes the host to queue a call, in microseconds, far from what any way needs.
HOST = {"eager": 40.0, "torch": 8.0, "torch.compile": 30.0, "fusebook": 20.0, "Liger": 40.0, "quack": 25.0}


def frame(op, config, dtype="float32", on=None):
    """Rows as `fusebook.measure.bench.run` returns them, for every variant of a card."""
    on = on or machine()
    rows = []
    for name in bench.dtypes(dtype):
        itemsize = bench.DTYPES[name].itemsize
        for config_name, dims in bench.points(op, config):
            for variant, how in op.variants.items():
                least = op.cost(itemsize, **dims)
                moved = how.cost(itemsize, **dims) if how.cost else least
                roof, floor = on.roof(least, name) * 1e6, on.floor() * 1e6
                copy = on.memory_seconds(Cost(least.read, least.write, 0)) * 1e6 + floor
                row = dict.fromkeys(bench.COLUMNS, math.nan)
                row |= {"op": op.name, "config": config_name, "variant": variant, "dtype": name, **dims}
                row |= {"status": "ok", "note": "", "error": 1e-7, "tolerance": 1e-5}
                row |= {"deterministic": "yes", "alone": ""}
                for kind, more in (("cold", 0), ("warm", -floor / 2), ("call", 20)):
                    middle = copy * SLOWER.get(variant, 2.0) + more
                    us = timing.COLUMN[kind]
                    row |= {f"{us}_20": 0.99 * middle, us: middle, f"{us}_80": 1.02 * middle}
                host = HOST.get(variant, 10.0)
                row |= {"launch_us_20": 0.99 * host, "launch_us": host, "launch_us_80": 1.02 * host}
                row |= {"repeat": 30, "first_call_s": 0.5, "read_bytes": least.read, "write_bytes": least.write}
                row |= {"flop": least.flop, "moved_bytes": moved.read + moved.write, "roof_us": roof}
                row |= {"copy_us": copy, "copy_warm_us": copy - floor / 2, "floor_us": floor}
                row |= {"floor_warm_us": on.floor(kind="warm") * 1e6, "zone": on.zone(least, name)}
                row |= {"peak_bytes": least.write, "math": how.math or ""}
                row |= dict(zip(("code", "host"), sources.of_variant(op, variant), strict=True))
                row |= {"versions": "torch 0.0; triton 0.0", "date": "2000-01-01"}
                if variant == "quack" and any(isinstance(v, int) and v % 8 for v in dims.values()):
                    row |= {"status": "refused", "note": "made up: width not divisible by 8", "error": math.nan}
                    row |= {c: math.nan for c in row if c.startswith(tuple(timing.COLUMN.values()))}
                rows.append(row)
    df = pd.DataFrame(rows)
    df = df[["op", "config", "variant", "dtype", *dims, *bench.COLUMNS]]
    df.attrs["origin"] = bench.Origin(on, measured=True)
    return df


def machine_json(folder, on):
    """Write the made-up machine where records look for it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = asdict(on)
    del values["recorded"]
    (folder / "machine.json").write_text(json.dumps(values))
