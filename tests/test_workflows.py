"""The jobs that run elsewhere: what they may do, what they keep, and where the site will be."""

import re
import subprocess
from pathlib import Path

import pytest

from fusebook.measure import machine

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / ".github" / "workflows").glob("*.yml")}
BATCH = (ROOT / "docs" / "slurm" / "record.sbatch").read_text(encoding="utf-8")

if not WORKFLOWS:
    pytest.skip("no workflows here", allow_module_level=True)


def jobs(text):
    """The text of each job of a workflow, by its name."""
    _, *parts = re.split(r"(?m)^  (\w+):\n", text.partition("\njobs:\n")[2])
    return dict(zip(parts[::2], parts[1::2], strict=True))


EVERY = [(name, job, text) for name, workflow in WORKFLOWS.items() for job, text in jobs(workflow).items()]
ON_A_GPU = [(name, job, text) for name, job, text in EVERY if "self-hosted" in text]


def test_actions_are_pinned_by_commit_with_their_tag():
    used = re.findall(r"(?m)^[ -]+uses: (.*)", "\n".join(WORKFLOWS.values()))
    assert len(used) >= 10
    for action in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)
    assert len({*used}) == len({action.partition("@")[0] for action in used}), "one version of each"


def test_only_the_job_that_runs_no_code_of_the_checkout_may_write():
    for name, workflow in WORKFLOWS.items():
        assert "permissions:\n  contents: read\n" in workflow, name
    assert [(name, job) for name, job, text in EVERY if ": write" in text] == [("pages", "publish")]
    publish = jobs(WORKFLOWS["pages"])["publish"]
    assert "needs: build" in publish and not re.search(r"checkout@|make |pip|nox|python", publish)
    for name, job, text in EVERY:
        assert text.count("actions/checkout@") == text.count("persist-credentials: false"), (name, job)


def test_every_job_with_an_environment_makes_it_by_make_and_has_a_limit():
    """The Makefile refuses a Python that is too old in a sentence."""
    for name, job, text in EVERY:
        assert "-m venv" not in text, (name, job)
        if "nox" in text:
            assert text.index("make .venv/bin/nox") < text.index("run: .venv/bin/nox"), (name, job)
        limits = re.findall(r"(?m)^    timeout-minutes: (\d+)", text)
        measured = max(sum(machine.seconds(file).values()) / 60 for file in machine.RECORDS.glob("*/seconds.json"))
        if "self-hosted" in text:
            assert int(limits[0]) >= 2 * measured + 30, "twice what all pages took, and time for the environment"
    assert BATCH.index("make .venv/bin/nox") < BATCH.index(".venv/bin/nox -s environment")


def test_jobs_that_need_the_gpu_alone_are_one_group_and_keep_their_environments(tmp_path):
    assert ON_A_GPU
    for name, _, text in ON_A_GPU:
        assert re.search(r"(?m)^concurrency:\n  group: gpu\b", WORKFLOWS[name]), name
        assert "clean: false" in text
        (clean,) = re.findall(r"run: (git clean .*)", text)
        made = tmp_path / name
        for folder in (".venv", ".nox", "build/record", "src/.venv"):
            (made / folder).mkdir(parents=True)
            (made / folder / "file").write_text("")
        (made / ".gitignore").write_text("/.venv/\n/.nox/\n/build/\n")
        subprocess.run(["git", "init", "--quiet", str(made)], check=True)
        subprocess.run(["git", "-C", str(made), "add", ".gitignore"], check=True)
        subprocess.run(["bash", "-c", clean], cwd=made, check=True, capture_output=True)
        assert sorted(path.name for path in made.iterdir()) == [".git", ".gitignore", ".nox", ".venv"]


@pytest.mark.parametrize(
    ("owner", "name", "url"),
    [
        ("someone", "fusebook", "https://someone.github.io/fusebook"),
        ("someone", "someone.github.io", "https://someone.github.io"),
        ("someone", "other.github.io", "https://someone.github.io/other.github.io"),
    ],
)
def test_the_address_of_the_site(owner, name, url):
    (value,) = re.findall(r"FUSEBOOK_URL: (?:>-\n)?((?:.|\n)*?)\n    steps", WORKFLOWS["pages"])
    given = {
        "github.repository_owner": repr(owner),
        "github.event.repository.name": repr(name),
        "&&": "and",
        "||": "or",
    }

    def evaluated(expression):
        for old, new in given.items():
            expression = expression.replace(old, new)
        return str(eval(expression, {"format": str.format}))

    words = re.sub(r"\s+", " ", value).strip()
    assert re.sub(r"\$\{\{ (.*?) \}\}", lambda found: evaluated(found[1]), words) == url


def test_slurm_writes_its_log_where_a_folder_is():
    """Slurm makes none, and a task without its log fails in silence."""
    (log,) = re.findall(r"#SBATCH --output=(\S+)", BATCH)
    assert "/" not in log
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert "/" + re.sub(r"%\w", "*", log) in ignored


def test_the_array_of_slurm_has_a_task_for_each_page(tmp_path):
    """No directive names a number, which the next page would make wrong."""
    assert "#SBATCH --array" not in BATCH
    head = re.findall(r"(?m)^#     (.*)$", BATCH)
    command = "\n".join(line for line in head if line.startswith(("pages=", "sbatch")))
    for count in (3, 12):
        (tmp_path / "examples").mkdir(exist_ok=True)
        for i in range(count):
            (tmp_path / "examples" / f"plot_{i:03}.py").touch()
        shown = ["bash", "-c", f"sbatch() {{ echo $1; }}\n{command}"]
        done = subprocess.run(shown, cwd=tmp_path, check=True, capture_output=True, text=True)
        assert done.stdout == f"--array=0-{count - 1}\n"
    alone = {"SLURM_ARRAY_TASK_ID": ""}
    failed = subprocess.run(["bash", "-c", BATCH], cwd=ROOT, env=alone, capture_output=True, text=True)
    assert failed.returncode and "the sbatch command needs --array" in failed.stderr
