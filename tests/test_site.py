"""The site's own parts: the banner, what runs again, what is cleaned, links, commands. The site itself is not built."""

import importlib.util
import io
import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

import crawl
import front
import fusebook
import fusebook_site
import gallery_hooks
import gallery_progress
import inventories
import lessons
import new_kernel
import promised
import readme
import warm
from fusebook.cards import OPS
from fusebook.lesson import _place
from fusebook.lesson._results import NoResults

ROOT = Path(__file__).resolve().parents[1]

WITHOUT = """\"\"\"
Nothing here
============
\"\"\"

# %%
# The results
# -----------
from fusebook.lesson._results import NoResults

def results():
    raise NoResults("No GPU and no record: run `python -m fusebook.measure.record toy`.")

df = results()
df

# %%
# Afterwards
# ----------
print("this block must not run")
"""

WITH = """\"\"\"
Something here
==============
\"\"\"

# %%
# The results
# -----------
1 + 1
"""


# A page without results


def _script():
    return {"execute_script": True, "fake_main": types.ModuleType("__main__")}


def _stop(excused=False):
    raise NoResults("run it", excused=excused)


def test_a_page_without_results_stops_and_shows_a_banner_once(monkeypatch):
    monkeypatch.delenv("FUSEBOOK_STRICT", raising=False)
    runner, script, ran = gallery_hooks.Runner(), _script(), []
    runner.script = script
    runner(_stop)
    runner(lambda: ran.append(1))  # the last expression of the same block
    assert not ran
    assert script["execute_script"] is False
    assert script["fake_main"].___ is None
    assert "<p>run it</p>" in gallery_hooks.banner(None, script, {})
    assert gallery_hooks.banner(None, script, {}) == ""


def test_under_strict_the_sentence_ends_the_build(monkeypatch):
    monkeypatch.setenv("FUSEBOOK_STRICT", "1")
    runner = gallery_hooks.Runner()
    runner.script = _script()
    with pytest.raises(SystemExit, match="run it"):
        runner(_stop)


def test_under_strict_a_page_without_results_that_is_excused_is_built(monkeypatch):
    monkeypatch.setenv("FUSEBOOK_STRICT", "1")
    runner = gallery_hooks.Runner()
    runner.script = _script()

    runner(lambda: _stop(excused=True))
    assert "<p>run it</p>" in gallery_hooks.banner(None, runner.script, {})


def test_a_page_that_just_exits_is_not_taken_for_one_without_results(monkeypatch):
    monkeypatch.delenv("FUSEBOOK_STRICT", raising=False)
    runner = gallery_hooks.Runner()
    runner.script = _script()
    with pytest.raises(SystemExit):
        runner(sys.exit)


def test_the_next_page_starts_afresh():
    runner = gallery_hooks.runner
    runner.script = {"banner": NoResults("run it")}
    fresh = _script()
    assert gallery_hooks.reset_argv({}, fresh) == []
    assert runner(lambda: 1) == (0.0, 1)
    assert gallery_hooks.banner(None, fresh, {}) == ""


@pytest.fixture
def book(tmp_path):
    """A site of two pages with this repository's settings."""
    for name in ("conf.py", "CITATION.cff", "docs", "src"):
        source = ROOT / name
        # Not what this checkout has built: whether a page runs again hangs on what is there. Nor records, which each
        # build would read.
        ignore = shutil.ignore_patterns("auto_examples", "auto_downloads", "__pycache__", "*.csv")
        shutil.copytree(source, tmp_path / name, ignore=ignore) if source.is_dir() else shutil.copy(source, tmp_path)
    for page in (tmp_path / "docs").glob("*.*"):
        if page.suffix == ".rst":
            page.unlink()
    shutil.rmtree(tmp_path / "docs" / "api")
    (tmp_path / "docs" / "index.rst").write_text("Toy\n===\n\n.. toctree::\n\n   auto_examples/index\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "GALLERY_HEADER.rst").write_text("Pages\n=====\n\n")
    (tmp_path / "examples" / "plot_190_with.py").write_text(WITH)
    (tmp_path / "examples" / "plot_191_without.py").write_text(WITHOUT)
    return tmp_path


def _paths(*first):
    """PYTHONPATH with `first` before what is there: a prepared runner finds its packages by it."""
    return os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])


#: Pages after each other, by a fork.
ALONE = {"core": min(os.sched_getaffinity(0))}


def _build(book, core=None, cwd=None, limit=None, **env):
    """Sphinx on a book: on one core, from another folder, with files of at most so many bytes."""

    places = [".", "docs", "build/html"] if cwd is None else [str(book / name) for name in ("", "docs", "build/html")]
    around = {**os.environ, "FUSEBOOK_STRICT": "", "PYTHONPATH": _paths(book / "src"), **env}
    words = ["-m", "sphinx", "-W", "-n", "-c", *places]
    if core is None:  # pages beside each other, as a reader builds them
        return subprocess.run([sys.executable, *words], env=around, cwd=book, capture_output=True, text=True)
    return warm.run(*words, env=around, cwd=cwd or book, core=core, limit=limit)


@pytest.mark.slow
def test_a_site_builds_without_results_rebuilds_what_changed_and_forgets_what_is_gone(book):
    pytest.importorskip("sphinx_gallery")
    built = _build(book)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (book / "build/html/auto_examples/plot_191_without.html").read_text()
    assert "python -m fusebook.measure.record toy" in page
    assert "this block must not run" in page  # as source
    assert "sphx-glr-script-out" not in page  # not as output
    assert "memory usage" not in page
    site = crawl.Site(book / "build/html")
    assert not crawl.foreign(site) + crawl.dead_links(site)

    # A page that replays is left alone while nothing changes; one without results is tried each time.
    done = book / "docs/auto_examples/plot_190_with.py.md5"
    first = done.stat().st_mtime_ns
    again = _build(book, **ALONE)
    assert again.returncode == 0
    assert done.stat().st_mtime_ns == first, again.stdout  # which says what had changed
    module = book / "src/fusebook/tables.py"
    module.write_text(module.read_text() + "\n# changed\n")
    strict = _build(book, **ALONE, FUSEBOOK_STRICT="1")
    assert strict.returncode == 1
    assert "No GPU and no record: run `python -m fusebook.measure.record toy`." in strict.stderr
    assert "Traceback" not in strict.stderr

    (book / "examples/plot_191_without.py").unlink()
    built = _build(book, **ALONE, FUSEBOOK_STRICT="1")
    assert built.returncode == 0, built.stdout + built.stderr
    assert done.stat().st_mtime_ns != first, "a module that the page is made from has changed"
    assert not list((book / "build/html").rglob("*plot_191_without*"))


CUT = """\"\"\"
{name}
======
\"\"\"

# %%
# The results
# -----------
import os
import sys
from pathlib import Path

ran = Path({folder!r}) / "ran.txt"
ran.write_text(ran.read_text() + "{name} " if ran.exists() else "{name} ")
os.write(2, b"2026-11-22 03:00:00.1 [W:onnxruntime:, session.cc:1 operator()] a warning from C++\\n")
if "{name}" == "second" and os.environ.get("CUT"):
    os._exit(9)
"""


@pytest.mark.slow
def test_a_build_that_was_cut_off_goes_on_where_it_was_and_warnings_lie_in_a_log(book):
    pytest.importorskip("sphinx_gallery")
    for page in (book / "examples").glob("plot_*.py"):
        page.unlink()
    for i, name in enumerate(("first", "second", "third")):
        (book / "examples" / f"plot_{i}.py").write_text(CUT.format(name=name, folder=str(book)))
    assert _build(book, **ALONE, CUT="1").returncode == 9
    built = _build(book, **ALONE)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (book / "ran.txt").read_text().split() == ["first", "second", "second", "third"]
    assert "a warning from C++" not in built.stderr + built.stdout
    assert (book / "build/docs.log").read_text().count("a warning from C++") == 2
    assert "docs.log holds what the pages wrote to standard error: 1 of ONNX Runtime, 2 lines" in built.stdout
    assert len(list((book / "build/html/auto_examples").glob("plot_*.html"))) == 3

    # A page that was being written when a build ended, by a full disk for instance.
    page, mark = book / "build/html/auto_examples/plot_0.html", book / "build/html" / fusebook_site.UNFINISHED
    assert not mark.exists()
    mark.touch()
    whole = page.read_text()
    page.write_text(whole[:100])
    assert _build(book, **ALONE).returncode == 0
    assert page.read_text() == whole and not mark.exists()


STOPS = """
# %%
# Then
# ----
import os
import signal

{stop}
"""


@pytest.mark.slow
def test_a_build_fails_in_a_sentence_and_the_next_one_is_right_in_a_folder_of_any_name(book, tmp_path_factory):
    """In plain C, from another folder, below a name with a space and umlauts: a page raises, Ctrl-C, a full disk."""
    pytest.importorskip("sphinx_gallery")
    place = tmp_path_factory.mktemp("ein Büchlein, näher") / "books"
    book.rename(place)
    page = place / "examples" / "plot_190_with.py"
    how = ALONE | {"cwd": tmp_path_factory.mktemp("elsewhere"), "LC_ALL": "C", "LANG": "C"}
    for stop, limit, words in (
        ("raise ValueError('the sea is höher')", None, ("plot_190_with.py", "ValueError: the sea is")),
        ("os.kill(os.getpid(), signal.SIGINT)", None, ("Interrupted",)),
        ("", 50_000, ("File too large",)),
    ):
        page.write_text(WITH + STOPS.format(stop=stop), encoding="utf-8")
        built = _build(place, limit=limit, **how)
        assert built.returncode != 0 and all(word in built.stderr for word in words), built.stdout + built.stderr
    built = _build(place, **how)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Something here" in (place / "build/html/auto_examples/plot_190_with.html").read_text(encoding="utf-8")
    assert not list(how["cwd"].iterdir())


def test_a_checkout_that_cannot_be_written_to_is_named_before_anything_is_imported(monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != ROOT and real(path, mode))
    with pytest.raises(PermissionError, match=f"{re.escape(str(ROOT))} cannot be written to, and a build writes"):
        runpy.run_path(str(ROOT / "conf.py"))


def test_everything_is_written_again_after_a_build_that_did_not_end(tmp_path):
    app = types.SimpleNamespace(outdir=tmp_path)
    env = types.SimpleNamespace(found_docs={"index", "times"}, all_docs={"index": 0, "times": 0})
    assert fusebook_site.outdated(app, env, set(), set(), set()) == set()
    fusebook_site.finished(app, None)
    assert fusebook_site.outdated(app, env, set(), {"index"}, set()) == {"times"}
    fusebook_site.finished(app, OSError("no space left"))
    assert fusebook_site.outdated(app, env, set(), set(), set()) == {"index", "times"}


# What is seen while pages run


def test_the_bar_says_page_part_and_time_left(tmp_path):
    out = io.StringIO()
    bar = gallery_progress.Progress({"plot_1": 30.0, "plot_2": 10.0}, out, always=True)
    page = "\n".join(['"""', "Title", "=====", '"""', "# %%", "# How fast?", "# ---------", "x = 1", "y = 2"])
    bar.begin(_written(tmp_path, page, "plot_1.py"))
    block = types.SimpleNamespace(code=compile("\n" * 7 + "x = 1", "page", "exec"))
    bar.step(block)
    bar.end_page()
    assert bar.bar.n == 30.0
    bar.begin(_written(tmp_path, page, "plot_2.py"))
    bar.step(lambda: None)
    bar.close()
    shown = out.getvalue()
    assert "1 of 2, plot_1: How fast?" in shown and "2 of 2, plot_2," in shown
    assert " 67 % |" in shown and " 75 % |" in shown and " left" in shown


def _written(folder, text, name):
    path = folder / name
    path.write_text(text)
    return path


def test_a_page_takes_what_it_took_here_or_when_it_was_recorded(tmp_path):
    (tmp_path / "plot_1.cost.json").write_text('{"time": 20.0, "memory": 0}')
    (tmp_path / "plot_2.cost.json").write_text("{")
    recorded = tmp_path / "seconds.json"
    recorded.write_text('{"plot_1": 5.0, "plot_2": 7.0}')
    pages = ["plot_1", "plot_2", "plot_3"]
    assert gallery_progress.seconds_of(pages, tmp_path, recorded) == {"plot_1": 20.0, "plot_2": 7.0, "plot_3": 20.0}
    assert gallery_progress.seconds_of(pages, tmp_path / "no", None) == dict.fromkeys(pages, 1.0)
    recorded.write_text('{"plot_1": "5", "plot_2": 7.0}')
    assert gallery_progress.seconds_of(pages, tmp_path / "no", recorded) == dict.fromkeys(pages, 1.0)


def test_the_log_takes_what_anybody_writes_and_counts_messages_not_lines(tmp_path):
    log = gallery_progress.Log(tmp_path / "build" / "docs.log")
    assert log.summary() == ""
    log.head("plot_1")
    error = "E1122 03:00:00.123000 77 torch/_inductor/select_algorithm.py:3021] [0/0] "
    with log.taking():
        os.write(2, b"\x1b[0;93m2026-11-22 03:00:00.1 [W:onnxruntime:, a.cc:1 F()] first\x1b[m\n")
        subprocess.run([sys.executable, "-c", f"import sys; sys.stderr.write({error!r} + 'one\\n')"], check=True)
        sys.stderr.flush()
        os.write(2, f"{error}two, of the same message\n".encode())
        os.write(2, b"/page.py:3: UserWarning: beware\n  code\n")
    os.write(2, b"not taken\n")
    assert "not taken" not in log.path.read_text()
    assert log.summary().endswith("1 of ONNX Runtime, 1 of PyTorch, 1 of Python, 5 lines")


# What runs again


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library, and one page that is complete; it has noted a record, a kernel and the folder of records."""
    monkeypatch.setattr(fusebook_site, "families", lambda page, names: [tmp_path / "src/fusebook/cards/softmax.py"])
    monkeypatch.delenv(fusebook_site.NOTES, raising=False)
    names = (
        *("measure/bench.py", "kernels/_rows.py"),
        *("cards/softmax.py", "cards/swiglu.py", "kernels/softmax.py", "kernels/products.py"),
        *("records/gpu/machine.json", "records/gpu/softmax.csv", "records/gpu/swiglu.csv", "records/gpu/seconds.json"),
    )
    for name in names:
        path = tmp_path / "src" / "fusebook" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for name in ("examples", "generated"):
        (tmp_path / name).mkdir()
    (tmp_path / "examples" / "plot_1.py").write_text("1 + 1")
    return tmp_path


def _stale(library, **around):
    return fusebook_site.forget_stale(library / "examples", library / "generated", around, library)


def _run(library, *noted, **around):
    """As `gallery_hooks` does when the page runs."""
    fusebook_site.begin_page(library / "generated", "plot_1")
    _place.note(*(library / "src" / "fusebook" / name for name in noted))
    fusebook_site.end_page(library / "generated", around, library, "plot_1", {})
    (library / "generated" / "plot_1.py.md5").write_text("sum")


@pytest.mark.parametrize(
    ("file", "again"),
    [
        ("measure/bench.py", True),
        ("kernels/_rows.py", True),
        ("cards/softmax.py", True),
        ("cards/swiglu.py", False),
        ("kernels/softmax.py", True),
        ("kernels/products.py", False),
        ("records/gpu/machine.json", False),
        ("records/gpu/softmax.csv", True),
        ("records/gpu/swiglu.csv", False),
    ],
)
def test_a_page_runs_again_when_what_it_is_made_from_changes(library, file, again):
    assert _stale(library) == ["plot_1"]  # it has never run
    _run(library, "kernels/softmax.py", "records/gpu/softmax.csv")
    assert _stale(library) == []
    with (library / "src" / "fusebook" / file).open("a") as opened:
        opened.write("# changed")
    assert _stale(library) == (["plot_1"] if again else [])
    assert (library / "generated" / "plot_1.py.md5").exists() is not again


def test_a_page_of_all_records_runs_again_when_one_is_added_or_gone(library):
    _run(library, "records/gpu")
    (library / "src/fusebook/records/gpu/seconds.json").write_text("{}")
    assert _stale(library) == []
    (library / "src/fusebook/records/gpu/double.csv").write_text("1")
    assert _stale(library) == ["plot_1"]


def test_a_page_runs_again_under_other_circumstances(library):
    _run(library, strict="")
    assert _stale(library, strict="") == []
    assert _stale(library, strict="1") == ["plot_1"]


def test_a_page_that_was_not_completed_runs_again(library):
    """sphinx-gallery has kept its checksum, but the build was cut off before the page was written."""
    fusebook_site.begin_page(library / "generated", "plot_1")
    done = library / "generated" / "plot_1.py.md5"
    done.write_text("sum")
    assert _stale(library) == ["plot_1"] and not done.exists()


def test_a_page_is_made_from_the_families_that_its_variables_come_from():
    def found(page, **names):
        return {f"{path.parent.name}/{path.stem}" for path in fusebook_site.families(page, names)}

    assert found("", SOFTMAX=OPS["softmax"], x=1) == {"cards/softmax", "kernels/softmax"}
    assert found("y = fusebook.swiglu(x)", fusebook=fusebook) == {"kernels/products"}
    ways = {f"kernels/{name}" for name in ("kmeans",)}
    assert found("", cluster=fusebook.kmeans) == ways
    assert {"cards/softmax", "cards/swiglu", "kernels/kmeans"} <= found("", OPS=OPS)
    assert found("import pandas as pd", pd=re) == set()


# Links and inventories


def test_inventories_hold_what_their_lists_say(tmp_path):
    from sphinx.util.inventory import InventoryFile

    for project, (address, file) in inventories.write(tmp_path).items():
        text = (inventories.FOLDER / f"{project}.txt").read_text(encoding="utf-8")
        names = {line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("#")}
        with open(file, "rb") as opened:
            read = InventoryFile.load(opened, address, lambda base, place: base + place)
        assert {name for kind in read.values() for name in kind} == names, project


@pytest.mark.parametrize(
    ("page", "path"),
    [
        ("auto_examples/plot_102_softmax", "examples/plot_102_softmax.py"),
        ("auto_examples/index", "examples/GALLERY_HEADER.rst"),
        ("contributing", "docs/contributing.rst"),
    ],
)
def test_edit_links_point_at_sources(page, path):
    app = types.SimpleNamespace(config=types.SimpleNamespace(fusebook_repository="https://github.com/someone/fusebook"))
    context = {}
    fusebook_site.edit_links(app, page, "page.html", context, None)
    assert context["get_edit_provider_and_url"]()[1] == f"https://github.com/someone/fusebook/edit/main/{path}"
    fusebook_site.colab_link(app, page, "page.html", context, None)
    assert ("colab" in context) == ("plot_" in page)


# Commands


def test_each_promise_names_tests_that_exist():
    promises = list(promised.named())
    assert len(promises) >= 9 and all(promises)
    for file, test in itertools.chain(*promises):
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}: {test}"


def test_a_promised_test_that_passed_nowhere_is_named(monkeypatch):
    names = {name: ("test_a.py", f"test_{name}") for name in ("good", "gpu", "slow", "mixed", "absent")}
    monkeypatch.setattr(promised, "named", lambda: [list(names.values())])
    outcomes = promised.Outcomes()
    for name, when, outcome, reason in (
        ("good", "setup", "skipped", "slow"), ("good", "call", "passed", ""),
        ("slow", "setup", "passed", ""), ("slow", "call", "skipped", "slow"),
        ("gpu", "setup", "skipped", "needs a GPU"), ("mixed", "setup", "skipped", "needs a GPU"),
        ("mixed", "setup", "skipped", "slow"),
    ):  # fmt: skip
        outcomes.add(pytest.TestReport(f"tests/test_a.py::test_{name}[1]", (), {}, outcome, ("a.py", 1, reason), when))
    found = [line.partition(": ")[0] for line in outcomes.untried()]
    assert found == [f"test_a.py::test_{name}" for name in ("slow", "mixed", "absent")]


def test_what_trials_came_to_is_counted_by_tables_alone():
    """A count in a sentence is of the run before, and nobody writes it anew."""
    text = (ROOT / "docs" / "method.rst").read_text(encoding="utf-8")
    lines = text[text.index("How the library is tried") :].splitlines()
    prose = " ".join(line for line in lines if not line.lstrip().startswith(":"))  # and no option of a table
    many = "once|twice|one|two|three|four|five|six|seven|eight|nine|ten|sixteen|twenty|hundred|thousand|[0-9][0-9,]*"
    what = "cases?|calls|tests?|runs?|failures?|findings?|faults?|problems?|strategies|strategy|mistakes?|times"
    counts = re.compile(rf"\b({many})( of)?( [a-z]+)? ({what})\b", re.IGNORECASE)
    assert counts.search("ended in nine failures") and counts.search("failed in 16 of 26 cases")
    assert not [found.group() for found in counts.finditer(prose)]


def test_the_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"make docs", "make test"} <= set(re.findall(r"make \w+", "\n".join(readme.splitlines()[:25])))
    for target in re.findall(r"make (docs|test|live|clean)\b", readme):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for session in re.findall(r"nox (?:--[\w-]+ )*-s (\w+)", readme + makefile):
        assert f"def {session}(session)" in noxfile
    for page in re.findall(r"python (examples/\w+\.py)", readme):
        assert (ROOT / page).exists()


def test_the_readme_tells_of_every_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == readme.between(text, "pages", readme.pages()), "run python docs/_ext/readme.py"
    assert all(page.name in text for page in (ROOT / "examples").glob("plot_*.py"))


def test_the_readme_shows_what_the_records_say(monkeypatch):
    monkeypatch.delenv("FUSEBOOK_GPU", raising=False)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for part in (readme.figure, readme.verdicts):
        assert text == readme.between(text, part.__name__, part()), "run python docs/_ext/readme.py"
    for file in re.findall(r"docs/_static/[\w.-]+", text):
        assert (ROOT / file).exists()


@pytest.fixture(scope="module")
def noxfile():
    pytest.importorskip("nox")
    import noxfile

    return noxfile


@pytest.mark.parametrize(
    ("wish", "found", "device", "requirement"),
    [
        ("", [], "cpu", "torch==2.13.0"),
        ("", ["GPU 0: NVIDIA H200"], "cuda", "torch"),
        ("cpu", ["GPU 0: NVIDIA H200"], "cpu", "torch==2.13.0"),
        ("cuda", [], "cuda", "torch"),
        ("2.11.0", [], "cpu", "torch==2.11.0"),
        ("2.11.0", ["GPU 0: NVIDIA H200"], "cuda", "torch==2.11.0"),
    ],
)
def test_torch_is_chosen_by_wish_then_by_gpu(noxfile, wish, found, device, requirement):
    assert noxfile.torch_choice(wish, found)[:2] == (device, requirement)


def test_a_wish_for_an_unknown_torch_is_refused(noxfile):
    with pytest.raises(ValueError, match=r"expected cpu, cuda or a version such as .*, got 'rocm'"):
        noxfile.torch_choice("rocm", [])


# The promise of docs/contributing.rst


def test_contributing_shows_the_files_that_a_new_kernel_is_made_of():
    text = (ROOT / "docs" / "contributing.rst").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. literalinclude:: template/(\w+)\.py$", text, re.MULTILINE)
    assert shown == ["kernel", "card", "page", "evidence", "solutions"] and ".. code-block:: python" not in text
    assert sorted(shown) == sorted(part.stem for part in new_kernel.TEMPLATE.glob("*.py"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "softmax",
            "taken by src/fusebook/kernels/softmax.py, src/fusebook/cards/softmax.py, examples/plot_102_softmax",
        ),
        ("exp", "taken by fusebook.exp, the card exp"),
        ("kernels", "taken by fusebook.kernels"),
        ("rough", "taken by a name of Python's or of the template's"),
        ("max", "taken by a name of Python's"),
        ("My-Kernel", "got 'My-Kernel'"),
        ("_mine", "got '_mine'"),
        ("class", "got 'class'"),
        ("", "got ''"),
        ("../up", "got '../up'"),
        ("a" * 31, "at most 30 characters"),
    ],
)
def test_a_kernel_of_a_bad_or_a_taken_name_is_refused_with_a_sentence(name, words, capsys):
    assert new_kernel.main([name]) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.count("\n") == 1 and not told.out
    assert not (ROOT / "src" / "fusebook" / "kernels" / "up.py").exists()


def test_a_kernel_needs_one_name(capsys):
    assert new_kernel.main([]) == new_kernel.main(["one", "two"]) == 2
    assert "expected one name, such as my_kernel, got ['one', 'two']" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_kernel_needs_five_files_and_no_list(tmp_path):
    for name in ("src", "tests", "docs", "examples", "pyproject.toml", "README.md"):
        ignore = shutil.ignore_patterns("__pycache__", "auto_*", "plot_*")
        source, copy = ROOT / name, tmp_path / name
        shutil.copytree(source, copy, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
    kept = [file for folder in ("examples", "examples/solutions") for file in (ROOT / folder).glob("plot_10*.py")]
    for page in [ROOT / "examples" / "plot_002_measuring.py", *kept]:
        shutil.copy(page, tmp_path / page.relative_to(ROOT))
    name = "my_own_kernel"
    if (ROOT / ".mypy_cache").exists():  # what lint has found out of torch takes a minute to find out anew
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / ".mypy_cache")
    free = max(int(page.stem[5:8]) for page in (ROOT / "examples").glob("plot_1*.py")) + 1

    def run(*args, **env):
        # No worker's child: it keeps what it compiles to itself.
        around = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        around |= {"PYTHONPATH": _paths(tmp_path / "src"), "FUSEBOOK_STRICT": "", **env}
        return warm.run(*args, cwd=tmp_path, env=around)

    made = run("docs/_ext/new_kernel.py", name)
    assert made.returncode == 0, made.stdout + made.stderr
    page = f"examples/plot_{free}_{name}.py"
    files = [f"src/fusebook/kernels/{name}.py", f"src/fusebook/cards/{name}.py", page]
    files.append(f"src/fusebook/lesson/evidence/plot_{free}_{name}.py")
    files.append(f"examples/solutions/plot_{free}_{name}.py")
    assert made.stdout.splitlines()[:5] == files
    assert not any(re.search("squared.?relu", (tmp_path / file).read_text(), re.IGNORECASE) for file in files)
    assert f"({page}) | 002, 101 | `{name}` |" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert run("-c", f"import fusebook; fusebook.{name}; from fusebook import *; {name}_eager").returncode == 0
    again = run("docs/_ext/new_kernel.py", name)
    assert again.returncode == 2 and f"{name} is taken by {files[0]}" in again.stderr

    # What a contributor is told to run, of the files with tests of each kernel, and the floor plan.
    files_of_all = [
        f"tests/test_{part}.py" for part in ("cards", "compile", "pages", "lesson", "lesson_pages", "floor_plan")
    ]
    chosen = f"{name} or down_a_floor"
    tried = run("-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", chosen, *files_of_all, CI="")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    for passed in (f"{part}.*{name}" for part in ("cards", "compile", "pages")):
        assert re.search(rf"test_{passed}.* PASSED", tried.stdout), tried.stdout
    assert re.search(r"test_floor.* PASSED", tried.stdout), tried.stdout
    for module, *words in (
        ("ruff", "check", "--no-cache", *files, new_kernel.PACKAGE),
        ("ruff", "format", "--check", "--no-cache", *files, new_kernel.PACKAGE),
        ("codespell_lib", *files),
        ("mypy", *files[:2], files[3]),
        ("numpydoc", "lint", *files[:2], files[3]),
    ):
        if importlib.util.find_spec(module.split(".")[0]):
            held = run("-m", module, *words)
            assert held.returncode == 0, held.stdout + held.stderr
    shown = run(page, FUSEBOOK_GPU="nvidia-h100-80gb-hbm3", MPLBACKEND="agg")
    assert "one_pass is correct on 64 x 781" in shown.stdout, shown.stdout + shown.stderr
    assert f"There is no CUDA GPU here and no record of {name}" in shown.stdout and shown.returncode == 0
    assert "Traceback" not in shown.stderr
    strict = run(page, FUSEBOOK_GPU="nvidia-h100-80gb-hbm3", MPLBACKEND="agg", FUSEBOOK_STRICT="1")
    assert strict.returncode == 1 and strict.stderr.strip().startswith("There is no CUDA GPU here and no record")


@pytest.mark.parametrize(("found", "hidden"), [("7.5\n", True), ("8.0\n", False), ("", False)])
def test_a_notebook_on_a_t4_hides_its_gpu(found, hidden, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: types.SimpleNamespace(stdout=found))
    exec(lessons.first_cell().replace("    %pip", "    pass  # %pip"), {})
    assert (os.environ["CUDA_VISIBLE_DEVICES"] == "") == hidden


@pytest.mark.parametrize("known", [True, False])
def test_the_address_of_the_source_is_that_of_the_citation_unless_a_variable_names_another(known, monkeypatch):
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    read = Path.read_text
    line = 'repository-code: "https://example.org/fusebook/"\n' if known else ""
    monkeypatch.setattr(
        Path, "read_text", lambda self, **how: citation + line if self.name == "CITATION.cff" else read(self, **how)
    )
    monkeypatch.setenv("FUSEBOOK_REPOSITORY", "")
    assert runpy.run_path(str(ROOT / "conf.py"))["REPOSITORY"] == ("https://example.org/fusebook" if known else "")
    monkeypatch.setenv("FUSEBOOK_REPOSITORY", "https://example.org/fork")
    assert runpy.run_path(str(ROOT / "conf.py"))["REPOSITORY"] == "https://example.org/fork"


def test_a_figure_is_drawn_once_for_both_of_its_sizes(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    from PIL import Image

    plt.close("all")  # what other tests have left open
    drawn, draw = [], plt.Figure.draw
    monkeypatch.setattr(plt.Figure, "draw", lambda self, renderer: drawn.append(self) or draw(self, renderer))
    plt.figure(figsize=(6.33, 4.1)).add_subplot().plot([1, 2])
    names = iter([str(tmp_path / "figure.png")])
    variables = {"image_path_iterator": names, "example_globals": {}, "src_file": ""}
    conf = {"image_srcset": [2.0], "matplotlib_animations": (False, None), "compress_images": [], "src_dir": tmp_path}
    assert "figure_2_00x.png 2.00x" in gallery_hooks.pictures(("code", "", 1), variables, conf)
    sizes = {}
    for file in tmp_path.iterdir():
        with Image.open(file) as picture:
            sizes[file.name] = picture.size
    assert sizes == {"figure.png": (633, 410), "figure_2_00x.png": (1266, 820)}
    assert len(drawn) == 1


@pytest.mark.skipif(not front.under_git(), reason="the source is no checkout of git")
def test_a_site_without_an_address_brings_its_source(tmp_path):
    fusebook_site.publish_source(tmp_path / front.ARCHIVE)
    with zipfile.ZipFile(tmp_path / front.ARCHIVE) as archive:
        names = set(archive.namelist())
    assert {"fusebook/README.md", "fusebook/examples/plot_102_softmax.py", "fusebook/noxfile.py"} <= names
    assert not any(name.startswith(("fusebook/.nox", "fusebook/build", "fusebook/.git/")) for name in names)
