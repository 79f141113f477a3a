"""The harness catches those who cheat it. Each planted cheat would win if it were believed."""

import contextlib
import dataclasses
import gc
import itertools
import math
import re
import time
import types
import weakref

import pandas as pd
import pytest
import torch

from fusebook.cards import OPS
from fusebook.measure import bench, check, timing
from fusebook.measure import machine as machines
from fusebook.measure.op import Variant
from toy import machine, toy, variant, verify

pytestmark = pytest.mark.alone
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: streams and events")


def run(op, **options):
    return bench.run(op, **{"config": "64", "repeat": 3, "warmup": 1, **options})


def row(op, name="cheat", **options):
    frame = run(op, **options)
    return frame[frame["variant"] == name].iloc[0]


def assert_caught(found, status, *words):
    assert found["status"] == status, found["note"]
    assert all(word in found["note"] for word in words), found["note"]
    times = [c for c in found.index if re.fullmatch(rf"({'|'.join(timing.COLUMN.values())})(_20|_80)?", c)]
    assert len(times) == 12 and found[times].isna().all()


def test_an_honest_variant_is_timed():
    found = row(toy(), "honest")
    assert found["status"] == "ok" and found["latency_us"] > 0 and found["deterministic"] == "yes"
    assert found["error"] <= found["tolerance"]


def test_a_binary_of_an_implementation_is_counted_once(monkeypatch):
    launched = iter(["ab", "b", "bc"])

    @contextlib.contextmanager
    def kernels():
        yield [types.SimpleNamespace(hash=name) for name in next(launched)]

    monkeypatch.setattr(bench, "_BINARIES", {})
    monkeypatch.setattr(bench.compiled, "kernels", kernels)
    found = run(toy(), config="1x2,3x4,5x6", variants=["honest"])
    assert found["binaries"].tolist() == [2, 0, 1] and (found["first_call_s"] > 0).all()


def test_sizes_that_were_read_from_a_table_are_python_s_own():
    """What a table reads are numbers of NumPy, for which torch.compile breaks its graph and runs what is eager."""
    kinds = set()
    card = toy()

    def made(rng, dtype, **dims):
        kinds.update(type(size) for size in dims.values())
        return card.make(rng, dtype, **dims)

    read = pd.DataFrame([{"label": "16", "M": 16, "N": 16}]).iloc[0]
    run(dataclasses.replace(card, make=made), config=[("16", {"M": read["M"], "N": read["N"]})])
    assert kinds == {int}


def test_an_error_that_is_kept_keeps_no_tensors():
    kept, tensors = [], []

    def failing(x):
        tensors.append(weakref.ref(x))
        try:
            raise ValueError("first")
        except ValueError as first:
            kept.append(RuntimeError("second"))
            raise kept[-1] from first

    assert row(toy(cheat=variant(failing)))["status"] == "failed"
    gc.collect()
    assert kept and not any(tensor() is not None for tensor in tensors)


def test_a_cached_output_is_caught():
    seen = {}

    def cached(x):  # by address, as a cache of "the same tensor" would
        return seen.setdefault((x.data_ptr(), x.shape), 2 * x)

    assert_caught(row(toy(cheat=variant(cached))), "wrong", "error")


def test_an_output_cached_after_some_calls_is_caught():
    calls = []

    def tired(x):  # honest while it is watched
        calls.append(2 * x if len(calls) < 6 else calls[-1])
        return calls[-1]

    assert_caught(row(toy(cheat=variant(tired)), warmup=5), "wrong", "once it had been timed")


def test_a_mutated_input_is_caught():
    assert_caught(row(toy(cheat=variant(lambda x: x.mul_(2)))), "wrong", "changed its inputs")


def test_one_of_two_inputs_that_is_changed_is_caught():
    def cheat(x, y):
        out = x * y
        y.add_(1)
        return out

    card = OPS["multiply"]
    given = dataclasses.replace(card, variants={"cheat": variant(cheat)})
    with pytest.raises(bench.WrongResult, match="changed its inputs"):
        verify(given, "cheat", torch.float32, card.edges[0])


@pytest.mark.parametrize("seconds", [0.0, 0.005])  # a slow call is attempted again, with what is prepared anew
def test_what_works_in_place_on_copies_is_checked_where_they_are_new(seconds):
    def doubled(x):
        time.sleep(seconds)
        return x.mul_(2)

    fields = {"prepare": lambda x: (x.clone(),)}
    assert row(toy(cheat=variant(doubled, in_place=True, **fields)))["status"] == "ok"
    assert_caught(row(toy(cheat=variant(doubled, **fields))), "wrong", "exceeds the tolerance")


def test_the_worst_of_several_calls_is_the_one_that_comes_nearest_to_its_limit(monkeypatch):
    """Values decide the limit as well, which is wider where float32 rounds more."""
    verdicts = [check.Verdict(0.2, 0.25), check.Verdict(0.9e-5, 1e-5), check.Verdict(0.1, 0.25)]
    for order in itertools.permutations(verdicts):
        told = iter(order)
        monkeypatch.setattr(bench, "_judged", lambda *_, told=told: next(told))
        data = bench._Data.make(toy(), torch.float32, {"M": 3, "N": 5}, "cpu")
        assert bench._verify(toy().variants["honest"], data)[0] == verdicts[1]


def test_memory_is_poisoned_before_every_call(monkeypatch):
    seen = []
    monkeypatch.setattr(bench.inputs, "poison", lambda outs: seen.append([tuple(o.shape) for o in outs]))
    verify(toy(), "honest", torch.float32, {"M": 3, "N": 5})
    assert seen == [[(3, 5)]] * (3 if torch.cuda.is_available() else 2)


def test_an_output_that_is_kept_once_it_was_timed_is_caught():
    calls = []

    def tired(x):  # what it keeps is right for the values that it was timed with
        if x.shape != (16, 16):
            return 2 * x
        calls.append(2 * x if len(calls) < 12 else calls[-1])
        return calls[-1]

    found = bench.run(toy(cheat=variant(tired)), config="16", warmup=5, repeat=9)
    assert_caught(found[found["variant"] == "cheat"].iloc[0], "wrong", "once it had been timed")


def test_times_are_in_microseconds():
    def slow(x):
        time.sleep(0.003)
        return 2 * x

    found = bench.run(toy(cheat=variant(slow)), config="16", warmup=0, repeat=3)
    assert 3000 < found[found["variant"] == "cheat"].iloc[0]["latency_us"] < 300_000


def test_no_work_is_caught():
    assert_caught(row(toy(cheat=variant(lambda x: torch.empty_like(x)))), "wrong")
    assert_caught(row(toy(cheat=variant(lambda x: x))), "wrong", "error")


def test_a_partly_unwritten_output_is_caught():
    kept = {}

    def half(x):  # its buffer still holds the right half of an earlier, honest call
        if x.shape not in kept:
            kept[x.shape] = 2 * x
        y = kept[x.shape]
        y[: len(y) // 2] = 2 * x[: len(x) // 2]
        return y

    assert_caught(row(toy(cheat=variant(half))), "wrong", "error")


def test_zeros_are_caught():
    found = row(toy(cheat=variant(torch.zeros_like)))
    assert_caught(found, "wrong", "error")
    assert found["error"] >= 0.5


def test_a_half_type_inside_float32_is_caught():
    assert_caught(row(toy(cheat=variant(lambda x: (2 * x.bfloat16()).float()))), "wrong", "error")


def test_another_dtype_is_caught():
    assert_caught(row(toy(cheat=variant(lambda x: 2 * x.double()))), "wrong")


def test_faster_than_the_roof_is_refused():
    """With a roof that no machine can reach, honest work stands in for what is too good to be true."""
    slow = machine(copy=1.0, fill=1.0, read=1.0, l2=1)

    def judged(on=slow, rate="bfloat16", **row):
        row = {"zone": "memory", "roof_us": 2.0, "write_bytes": 0, "status": "ok", "note": "", **row}
        bench._refuse_faster_than_roof(row, on, rate)
        return row

    found = judged(gpu_us=1.0)
    assert found["status"] == "too fast" and "roof" in found["note"] and pd.isna(found["gpu_us"])
    assert judged(gpu_us=1.95)["status"] == "ok"
    assert judged(gpu_us=1.0, zone="L2")["status"] == "ok", "served by L2"
    assert judged(gpu_us=1.5, zone="compute")["status"] == "too fast"
    assert judged(gpu_us=1.7, zone="compute")["status"] == "ok"
    # Three products in TF32 are one in float32, and here they take half of its time.
    fast = machine(rates=slow.rates | {"float32": 1e12, "tf32": 6e12})
    for rate, gpu_us, status in (("float32", 0.95, "ok"), ("float32", 0.7, "too fast"), ("tf32", 0.95, "too fast")):
        assert judged(fast, rate, gpu_us=gpu_us, zone="compute")["status"] == status
    if torch.cuda.is_available():
        assert_caught(row(toy(), "honest", machine=slow), "too fast", "roof")


def test_what_the_cache_takes_in_is_not_too_fast():
    on = machine(l2=50_000_000, fill=5e12)  # a cache is written in 10 us
    for written, gpu_us, status in ((10**9, 90.0, "ok"), (10**9, 85.0, "too fast"), (4, 90.0, "too fast")):
        found = {"zone": "memory", "roof_us": 100.0, "gpu_us": gpu_us, "write_bytes": written, "status": "ok"}
        bench._refuse_faster_than_roof(found, on, "float32")
        assert found["status"] == status


@pytest.mark.parametrize("apart", ["call", "host", "cold", "warm"])
def test_a_clock_that_is_charged_for_something_else_is_refused(apart):
    alike = {"gpu_us": 100.0, "gpu_warm_us": 90.0, "launch_us": 40.0, "latency_us": 120.0, "status": "ok", "note": ""}
    bench._refuse_a_clock_apart(alike)
    assert alike["status"] == "ok"
    found = alike | {timing.COLUMN[apart]: 3000.0}
    bench._refuse_a_clock_apart(found)
    assert found["status"] == "too slow" and found["note"].startswith(f"{apart} of 3000 us")
    assert all(pd.isna(found[us]) for us in timing.COLUMN.values())


def test_a_clock_that_is_missing_contradicts_nothing():
    for given in ("call", "cold", "warm"):
        found = dict.fromkeys(timing.COLUMN.values(), math.nan)
        found |= {timing.COLUMN[given]: 1e6, "status": "ok", "note": ""}
        bench._refuse_a_clock_apart(found)
        assert found["status"] == "ok"


def test_a_planted_sleep_is_refused(monkeypatch):
    """It sleeps where nobody else is in the queue, as a call that is synchronised finds it."""
    times = {"cold": 1e-5, "warm": 1e-5, "host": 1e-5}

    def measure(functions, **_):  # what a GPU would show of it
        own = {kind: timing.Quantiles(t, t, t, 3) for kind, t in times.items()}
        return {name: {**own, "call": timing.call({name: f}, repeat=3)[name]} for name, f in functions.items()}

    monkeypatch.setattr(timing, "measure", measure)
    found = row(toy(cheat=variant(lambda x: (time.sleep(0.005), x + x)[1])))
    assert_caught(found, "too slow", "call of", "20 times host and cold")


def test_what_computes_on_the_cpu_is_timed_without_the_way_back(monkeypatch):
    brought = []

    def bring(outputs, device):
        brought.append(device)
        return outputs

    asked = {}

    def measure(functions, kinds=timing.KINDS, **_):
        asked.update(dict.fromkeys(functions, kinds))
        return {name: {kind: None for kind in timing.KINDS} for name in functions}

    monkeypatch.setattr(bench, "_brought", bring)
    monkeypatch.setattr(timing, "measure", measure)
    found = row(toy(cheat=variant(lambda x: x + x, on_cpu=True)))
    assert found["status"] == "ok" and pd.isna(found["peak_bytes"])
    assert asked["cheat"] == ("call",) and asked["honest"] == timing.KINDS
    assert len(brought) == 5, "all that is judged, and nothing else"


def test_what_tensor_cores_help_to_find_in_float32_has_their_roof():
    slow = machine(rates={name: 1e6 for name in ("float64", "float32", "tf32", "float16", "bfloat16")} | {"tf32": 4e6})
    op = toy(screened=variant(lambda x: x + x, rate="tf32"))
    found = run(op, config="64", dtype="float32,float64", machine=slow).set_index(["variant", "dtype"])["roof_us"]
    assert found["screened", "float32"] == pytest.approx(found["honest", "float32"] / 4)
    assert found["screened", "float64"] == found["honest", "float64"]


@gpu
def test_work_on_another_stream_is_caught():
    side = torch.cuda.Stream()

    def elsewhere(x):  # nothing waits for it, so events see none of it
        with torch.cuda.stream(side):
            return 2 * x

    assert_caught(row(toy(cheat=variant(elsewhere)), config="large"), "wrong")

    def half_ordered(x):  # reads in order, but the current stream does not wait for it
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = 2 * x
            for _ in range(20):
                y = y + 0
            return y

    assert_caught(row(toy(cheat=variant(half_ordered)), config="large"), "wrong")


@gpu
def test_work_left_on_another_stream_with_a_right_result_is_caught():
    side = torch.cuda.Stream()
    scrap = torch.empty(2**28, device="cuda")

    def litter(x):
        y = x + x
        with torch.cuda.stream(side):  # launched first it would delay the sum, and events would see that
            side.wait_stream(torch.cuda.current_stream())
            scrap.fill_(1.0)
        return y

    assert_caught(row(toy(cheat=variant(litter))), "wrong", "works on")


@gpu
def test_a_call_that_synchronises_has_no_cold_time():
    def waits(x):
        y = x + x
        y.sum().item()
        return y

    found = row(toy(cheat=variant(waits)))
    assert found["status"] == "ok" and pd.isna(found["gpu_us"]) and pd.isna(found["gpu_warm_us"])
    assert found["latency_us"] > 0


def test_a_refusal_keeps_its_reason():
    def refuses(x):
        raise NotImplementedError("rows of more than 32 columns")

    assert_caught(row(toy(cheat=variant(refuses))), "refused", "more than 32 columns")


def test_an_error_keeps_its_first_line_and_the_sweep_goes_on():
    def fails(x):
        raise RuntimeError("broken\nsecond line")

    frame = run(toy(cheat=variant(fails)))
    assert list(frame["status"]) == ["ok", "failed"]
    assert frame["note"].iloc[1] == "RuntimeError: broken"


def test_what_raises_only_while_it_is_timed_fails_alone(monkeypatch):
    measure, timed = timing.measure, []

    def measured(functions, **how):
        timed.append([*functions])
        try:
            return measure(functions, **how)
        finally:
            timed.append([])

    def tires(x):
        if timed and timed[-1]:
            raise RuntimeError("no more workspace")
        return x + x

    monkeypatch.setattr(timing, "measure", measured)
    assert_caught(row(toy(cheat=variant(tires))), "failed", "RuntimeError: no more workspace")
    frame = run(toy(cheat=variant(tires)))
    assert list(frame["status"]) == ["ok", "failed"] and frame["latency_us"].notna().tolist() == [True, False]


def test_a_library_that_ends_the_process_fails_in_its_row():
    def ends(x):
        raise SystemExit(1)

    assert_caught(row(toy(cheat=variant(ends))), "failed", "SystemExit: 1")


def test_a_library_that_breaks_the_gpu_is_named(monkeypatch):
    def broken():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    head = {"op": "double", "config": "64", "variant": "peer", "dtype": "float32", "M": 64, "note": "no"}
    with pytest.raises(RuntimeError, match=r"double: peer left the GPU unusable at dtype=float32, M=64: no"):
        bench._usable(dataclasses.replace(toy(), name="double"), head)


def test_a_variant_whose_needs_are_missing_is_absent():
    found = row(toy(cheat=Variant(torch.neg, needs=("no_such_package",))))
    assert_caught(found, "absent", "no_such_package")


def test_a_variant_that_differs_from_run_to_run_is_marked():
    state = []

    def unsteady(x):
        state.append(0)
        return 2 * x * (1 + (len(state) % 2) * 2**-22)

    found = row(toy(cheat=variant(unsteady)))
    assert found["status"] == "ok" and found["deterministic"] == "no"


def test_prepare_is_redone_when_the_inputs_change():
    def packed(x):
        return (x * 2,)

    found = row(toy(cheat=variant(lambda y: y.clone(), prepare=packed)))
    assert found["status"] == "ok"


def test_configs_are_named_sized_and_refused_by_name():
    op = toy()
    assert [d for _, d in bench.points(op, "small")] == [{"M": 16, "N": 16}, {"M": 64, "N": 64}]
    assert bench.points(op, "7,8x9,small")[:2] == [("7", {"M": 7, "N": 7}), ("8x9", {"M": 8, "N": 9})]
    for nonsense in ("huge", "1x2x3", "0", "-4", "", "3.5"):
        with pytest.raises(ValueError, match="small, large, long"):
            bench.points(op, nonsense)
    with pytest.raises(ValueError, match="float16, bfloat16, float32, float64"):
        bench.dtypes("float31")
    assert bench.dtypes("float32,torch.float16") == ["float32", "float16"]


def test_columns_are_those_promised():
    frame = run(toy())
    assert tuple(frame.columns) == ("op", "config", "variant", "dtype", "M", "N", *bench.COLUMNS)
    assert frame.attrs["origin"].measured is True


def test_bits_tell_apart_what_is_equal_and_compare_what_is_not():
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert not torch.equal(check._bits(zero), check._bits(-zero)) and torch.equal(check._bits(nan), check._bits(nan))
    nothing = torch.empty_strided((0,), (0,))  # as what is made of an empty array of NumPy
    for x in (nothing, torch.ones(()), torch.ones(3, 4).T, torch.ones(1).expand(5), torch.ones(0, 3)):
        assert torch.equal(check._bits(x), check._bits(x.clone()))


@pytest.mark.parametrize("handed_over", ["add", "softmax+aten::add", "none", "unknown", "softmax", None])
def test_torch_computes_by_aten_and_once_more_as_installed_where_that_differs(monkeypatch, handed_over):
    def run(x):
        where.append(inside)
        return x + x

    @contextlib.contextmanager
    def aten():
        nonlocal inside
        inside = True
        yield
        inside = False

    inside, where = False, []
    monkeypatch.setattr(machines, "overrides", lambda: handed_over)
    monkeypatch.setattr(machines, "aten", aten)
    monkeypatch.setattr(bench, "_refuse_a_clock_apart", lambda row: None)  # of two samples
    found = bench.run(toy(torch=variant(run)), config="16", repeat=2, warmup=0)
    differs = "add" in str(handed_over)
    assert list(found["variant"]) == ["honest", "torch", *["torch (as installed)"] * differs]
    assert set(found["status"]) == {"ok"} and where[0]
    outside = where.count(False)  # one call finds out what it calls, where anything is handed over at all
    assert outside > 1 if differs else outside == (handed_over == "softmax")


def test_a_row_tells_what_ran_beside_its_versions(monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setattr(machines, "overrides", lambda: "topk")
    monkeypatch.setattr(machines, "aten", contextlib.nullcontext)
    monkeypatch.setattr(machines, "versions", lambda *names: {name: "1.2" for name in names})
    monkeypatch.setattr(machines, "_ptxas", lambda: {"ptxas": "12.9"})
    (told,) = set(bench.run(toy(), config="16", repeat=2, warmup=0)["versions"])
    assert told == (
        "torch 1.2; triton 1.2; nvidia-cutlass-dsl 1.2; apache-tvm-ffi 1.2; ptxas 12.9; torch-overrides topk; "
        "TRITON_DEFAULT_FP_FUSION 0"
    )


def test_what_torch_hands_over_is_listed_or_unknown(monkeypatch):
    class Native:
        available_dsls = ("triton", "other")

        def get_dsl_operations(self, dsl):
            return {"triton": ["topk", "norm"], "other": ["norm"]}[dsl]

    def missing(name):
        raise ModuleNotFoundError(name)

    def overrides():
        machines.overrides.cache_clear()
        return machines.overrides()

    with monkeypatch.context() as patch:
        patch.setattr(machines.importlib, "import_module", lambda name: Native())
        assert overrides() == "norm+topk"
        patch.setattr(Native, "available_dsls", ())
        assert overrides() == "none"
        patch.delattr(Native, "available_dsls")
        assert overrides() == "unknown"
        patch.setattr(machines.importlib, "import_module", missing)
        assert overrides() is None
    machines.overrides.cache_clear()
    with machines.aten():  # whatever torch this is
        assert torch.ones(2).sum() == 2


def test_tensors_that_are_alike_lie_in_their_order():
    memory = torch.zeros(4, 8)
    rows = [memory[2], memory[0], memory[3, :4], memory[1]]
    bench._in_order(rows)
    places = [row.data_ptr() for row in rows]
    assert places[0] < places[1] < places[3] and places[2] == memory[3].data_ptr()


def test_variants_run_forward_then_reversed():
    assert timing._rounds({"a": 3, "b": 3}) == ["a", "b", "b", "a", "a", "b"]
    assert timing._rounds({"a": 3, "b": 1}) == ["a", "b", "a", "a"]


def test_a_staircase_checks_each_step_and_times_those_of_a_cpu_by_the_call():
    x = torch.arange(6.0)
    steps = {"right": lambda: x + x, "wrong": lambda: x * x}
    found = bench.staircase(steps, lambda got: torch.equal(got, 2 * x), kind="call", repeat=3)
    assert found["step"].tolist() == ["right", "wrong"] and found["right"].tolist() == [True, False]
    assert (found["us"] > 0).all()


def test_a_staircase_tells_of_the_kernel_with_most_registers(monkeypatch):
    @contextlib.contextmanager
    def kernels():
        small, large = (
            types.SimpleNamespace(n_regs=n, n_spills=n - 30, metadata=types.SimpleNamespace(num_warps=4))
            for n in (30, 40)
        )
        yield [small, large, small]

    monkeypatch.setattr(bench.compiled, "kernels", kernels)
    (row,) = bench.staircase({"one": lambda: 1}, lambda got: got == 1, kind="call", repeat=1).itertuples()
    assert (row.registers, row.spilled, row.warps) == (40, 10, 4)
