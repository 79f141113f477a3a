"""The pages: their shape, their exercises, and that they replay.

Not edited when a page or a kernel is added: it reads the pages and the cards.
"""

import ast
import functools
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import compiling
import synthetic
import warm
from fusebook.cards import OPS
from fusebook.lesson import _place, evidence
from fusebook.lesson._claims import Claim, Claims
from fusebook.lesson._results import NoResults
from fusebook.measure import bench, record
from fusebook.measure import machine as machines
from toy import machine

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
REAL = machines.RECORDS
NOTEBOOKS = EXAMPLES.parent / "build" / "html" / "_downloads"
PAGES = sorted(EXAMPLES.glob("plot_*.py"))
KERNEL = re.compile(r"^@triton\.jit", re.MULTILINE)
OLD_PAGES = [page for page in PAGES if "import fusebook.lesson" not in page.read_text()]
KERNEL_PAGES = [page for page in PAGES if page.stem[5] not in "09" and KERNEL.search(page.read_text())]


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "plot_102_softmax"], ids=lambda p: p.stem)
def test_a_page_imports_nothing_from_the_kernels(page):
    modules = [n.module or "" for n in ast.walk(ast.parse(page.read_text())) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in modules if m.startswith("fusebook.kernels")]


@functools.cache
def asked(keyword):
    """The words in all comma lists that pages give for `keyword`."""
    calls = [n for page in PAGES for n in ast.walk(ast.parse(page.read_text())) if isinstance(n, ast.Call)]
    given = [k.value.value for c in calls for k in c.keywords if k.arg == keyword and isinstance(k.value, ast.Constant)]
    frames = [spec for name in evidence.lessons() for spec in evidence.load(name).FRAMES.values()]
    given += [getattr(spec, keyword, None) for spec in frames]
    return dict.fromkeys(word for text in given if isinstance(text, str) for word in text.split(","))


def takes(read, *given):
    """Whether `read` knows what is given."""
    try:
        return bool(read(*given))
    except ValueError:
        return False


def everything(op):
    """The configs of a card, and the sizes and dtypes that pages ask of any."""
    configs = [*op.configs, *(word for word in asked("config") if takes(bench.points, op, word))]
    return ",".join(configs), ",".join(word for word in asked("dtype") if takes(bench.dtypes, word))


def blocks(page):
    """The code blocks of a page, in order, with the number of their first lines, as sphinx-gallery splits them."""
    splitter = pytest.importorskip("sphinx_gallery.py_source_parser")
    return [(b.lineno, b.content) for b in splitter.split_code_and_text_blocks(str(page))[1] if b.type == "code"]


def run_block(page, line, text, names):
    """Run a block but for the expression it ends in, which is returned compiled, or None."""
    tree = ast.parse("\n" * (line - 1) + text, str(page))
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(page), "exec"), names)
    return compile(last, str(page), "eval") if last is not None else None


@pytest.fixture
def alone(monkeypatch, tmp_path):
    for name in [n for n in os.environ if n.startswith("FUSEBOOK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(_place, "live", lambda: False)
    monkeypatch.setattr(machines, "RECORDS", tmp_path / "records")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    """A record of everything that the pages ask for, on a made-up GPU; pages only read it."""
    folder = tmp_path_factory.mktemp("records")
    on = machine(slug=machines.SHIPPED, name="Made-up GPU")
    for op in OPS.values():
        record.write(synthetic.frame(op, *everything(op), on), folder)
    # What a page measured by itself has a shape of its own, so it is taken as it was recorded.
    if REAL.exists():
        shutil.copytree(REAL / machines.SHIPPED / "pages", folder / machines.SHIPPED / "pages")
    return folder


@pytest.fixture
def recorded(alone, made_up, monkeypatch):
    monkeypatch.setattr(machines, "RECORDS", made_up)
    yield
    plt.close("all")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_asks_for_results_and_never_for_a_gpu(page):
    text = page.read_text()
    assert "is_available" not in text
    assert not re.search(r"^print\(", text, re.MULTILINE)


@pytest.mark.parametrize("page", OLD_PAGES, ids=lambda p: p.stem)
def test_a_page_runs_without_being_set_up(page):
    header, _, rest = page.read_text().partition("# ///\n")
    assert header.startswith("# /// script\n")
    assert '"fusebook[book' in header
    assert rest.startswith('"""\n')


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_code_fits_the_width_of_a_page(page):
    assert max(len(line) for line in page.read_text().splitlines()) <= 79


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_is_said_to_sphinx_gallery_is_no_prose(page):
    """A comment right after ``# %%`` is text, which a reader would see; among code it is taken out."""
    splitter = pytest.importorskip("sphinx_gallery.py_source_parser")
    prose = [b.content for b in splitter.split_code_and_text_blocks(str(page))[1] if b.type == "text"]
    assert not any("sphinx_gallery_" in text for text in prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_fusebook_is_imported_before_triton(page):
    names = re.findall(r"^import (\w+)", page.read_text(), re.MULTILINE)
    assert "triton" not in names or names.index("fusebook") < names.index("triton")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_no_time_of_ours_is_typed_into_prose(page):
    tree = ast.parse(page.read_text())
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    comments = re.findall(r"^# (.*)$", page.read_text(), re.MULTILINE)
    for text in strings + comments:
        assert not re.search(r"\d(\.\d+)? ?(us|microseconds|ms|milliseconds|GB/s)\b", text), text


def run_page(page, solved=None):
    """Run a page and return what its blocks end in.

    With functions of `solved`, by their names, each exercise is checked twice: as the page has it, and with these in
    the place of the page's own; the result is then both lists.
    """
    names, shown, passed = {"__name__": "__main__"}, [], []
    for line, text in blocks(page):
        last = run_block(page, line, text, names)
        shown.append(eval(last, names) if last is not None else None)
        if solved and re.search(r"^(page\.)?exercise\(", text, re.MULTILINE):
            own = names.copy()
            names.update(solved)
            passed.append(eval(last, names))
            names.update(own)
    return (shown, passed) if solved else shown


def exercises(shown):
    """The verdicts on exercises among what a page shows."""
    items = [item for part in shown if isinstance(part, Claims) for item in part.items]
    return [item for item in items if isinstance(item, Claim) and item.kind == "exercise"]


def solutions(page):
    spec = importlib.util.spec_from_file_location("solutions", EXAMPLES / "solutions" / page.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}


#: The one that stands for all where slow tests are left out: the others replay in `make docs`.
FIRST = next(page for page in KERNEL_PAGES if "softmax" in page.stem)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[] if page == FIRST else pytest.mark.slow) for page in KERNEL_PAGES],
)
def test_a_kernel_page_replays_and_its_exercises_fail_until_they_are_solved(page, recorded, request):
    if request.config.getoption("--slow") and any(NOTEBOOKS.glob(f"*/{page.stem}.ipynb")):
        pytest.skip("its notebook runs in this session, with the same exercises")
    try:
        shown, passed = run_page(page, solutions(page))
    except NoResults as missing:  # a new page, or a part of it, that no GPU has measured yet
        pytest.skip(f"not recorded: {missing}")
    found = exercises(shown)
    assert found
    assert [item.true for item in found] == [False] * len(found)
    assert all("Error" not in item.detail for item in found), "wrong, and not broken, is what a reader starts from"
    assert len(exercises(passed)) == len(found)
    assert [repr(item) for item in exercises(passed) if item.true is not True] == []


#: Runs each script that it is given as a command, for help and with nonsense; one JSON object a command.
COMMANDS = """
import contextlib, io, json, runpy, sys

for script in sys.argv[1:]:
    for given in (["--help"], ["--config", "enormous"]):
        sys.argv = [script, *given]
        said = {"script": script, "given": given, "code": None}
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as ending:
                said["code"] = ending.code or 0
        print(json.dumps(said | {"out": out.getvalue(), "err": err.getvalue()}))
"""


def ended(*command, environment=None):
    """A process of the tests' Python that has ended, with the library in its path."""
    path = os.pathsep.join([str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = environment or os.environ | {"PYTHONPATH": path}
    return warm.run(*command, env=environment)


def test_pages_are_commands_with_help_and_without_nonsense():
    """All of them in one process, which imports the library once."""
    commands = [
        page for page in KERNEL_PAGES if re.search(r"study\(|lesson\.open\(\S+\)", page.read_text())
    ]  # others take no sizes, or a number of GPUs
    end = ended("-c", COMMANDS, *map(str, commands))
    assert end.returncode == 0, end.stderr[-2000:]
    said = [json.loads(line) for line in end.stdout.splitlines()]
    assert len(said) == 2 * len(commands) >= 14
    for helped, refused in zip(said[::2], said[1::2], strict=True):
        assert helped["code"] == 0, helped
        for option in ("--config", "--dtype", "--itype", "--warmup", "--repeat"):
            assert option in helped["out"], helped
        assert refused["code"] == 2, refused
        choices = [f"'enormous' is none of {', '.join(op.configs)}, a size" for op in OPS.values()]
        assert any(choice in refused["err"] for choice in choices), refused


def test_a_page_is_a_script():
    end = ended(str(KERNEL_PAGES[-1]), "--config", "enormous")
    assert end.returncode == 2
    assert "'enormous' is none of" in end.stderr
    assert "Traceback" not in end.stderr


#: Compiles every kernel of the scripts it is given to a cubin for sm_90, with constants that reach their loops. One
#: JSON object a script: its kernels, and the error that ended them. Copies of the kernels go into the first argument.
COMPILE = """
import ast, importlib.util, json, pathlib, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

constants = {"BLOCK": 256, "ROWS": 4, "CHUNKS": 13, "SALT": 12345, "PLAIN": False, "ME": 1}  # and 16 for others
numbers = dict.fromkeys(("T", "keep", "size", "root", "eps"), "fp32")  # and i32 for others


def compiled(script, copy):
    functions = [n for n in ast.parse(script.read_text()).body if isinstance(n, ast.FunctionDef)]
    kernels = [n for n in functions if "triton.jit" in map(ast.unparse, n.decorator_list)]
    called = {getattr(n.func, "id", "") for k in kernels for n in ast.walk(k) if isinstance(n, ast.Call)}
    copy.write_text("import triton\\nimport triton.language as tl\\n\\n" + "\\n\\n".join(map(ast.unparse, kernels)))
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for node in kernels:
        if node.name in called or any(isinstance(n, ast.Return) for n in ast.walk(node)):
            continue  # a part of others, and compiled with them
        kernel = getattr(module, node.name)
        # Codes in words are multiplied with float16. Where there is q_out, q and k are queries and keys.
        codes = "q_ptr" in kernel.arg_names and "q_out" not in kernel.arg_names
        for pointer in ("*fp16",) if codes else ("*fp32", "*bf16"):
            text = " ".join(ast.unparse(k) for k in kernels if k is node or k.name in called)
            if pointer == "*bf16" and ("tl.exp" in text or "tl.sqrt" in text) and "float32" not in text:
                continue  # it converts nothing: it is for float32
            kinds = {a: pointer if a.endswith(("_ptr", "_out")) else numbers.get(a, "i32") for a in kernel.arg_names}
            whole = ("target_ptr", "table_ptr", "chunks_ptr", "k_ptr", "keys_ptr", "order_ptr")
            kinds |= {a: "*i64" for a in whole if a in kinds and "q_out" not in kinds}
            kinds |= {"q_ptr": "*i32"} if codes else {}
            # What several GPUs share: pointers to the memory of each.
            kinds |= {"turns_ptr": "*i32"} if "turns_ptr" in kinds else {}
            shared = {"memory": "*i64", "flags": "*i32", "parts": pointer}
            kinds |= {a: (kind, kind) for a, kind in shared.items() if a in kinds and f"{a}_ptr" not in kinds}
            kinds |= {a: f"tensordesc<{pointer[1:]}[16,16]>" for a in kinds if a.endswith("_tiles")}
            kinds |= {"pair_tiles": f"tensordesc<{pointer[1:]}[2,16,16]>"} if "pair_tiles" in kinds else {}
            passed = {"PRODUCTS": getattr(module, "in_pairs", None)}
            given = {(p.num,): (constants | passed).get(p.name, 16) for p in kernel.params if p.is_constexpr}
            kinds |= {p.name: "constexpr" for p in kernel.params if p.is_constexpr}
            source = ASTSource(kernel, signature=kinds, constexprs=given)
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
            yield f"{node.name} {pointer}"


folder, *scripts = map(pathlib.Path, sys.argv[1:])
for script in scripts:
    said = {"script": str(script), "kernels": [], "error": ""}
    try:
        for kernel in compiled(script, folder / f"{script.parent.stem}_{script.name}"):
            said["kernels"].append(kernel)
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))
"""


@pytest.mark.slow
def test_the_kernels_of_pages_and_solutions_compile_without_a_gpu(tmp_path):
    scripts = [*PAGES, *sorted(EXAMPLES.glob("solutions/*.py"))]
    end = ended("-c", COMPILE, str(tmp_path), *map(str, scripts), environment=compiling.environment())
    assert end.returncode == 0, end.stderr[-2000:]
    said = [json.loads(line) for line in end.stdout.splitlines()]
    assert [Path(one["script"]) for one in said] == scripts
    assert [f"{one['script']}: {one['error'][-2000:]}" for one in said if one["error"]] == []
    for one in said:
        assert bool(one["kernels"]) == bool(KERNEL.search(Path(one["script"]).read_text())), one
