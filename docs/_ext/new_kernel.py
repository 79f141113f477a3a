"""Begin a kernel: ``python docs/_ext/new_kernel.py my_kernel`` makes its module, card, lesson, evidence and solutions.

They are the example of docs/contributing.rst, from docs/template, under another name: correct, documented, and there to
be changed.
"""

import ast
import builtins
import keyword
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["files", "refusal"]

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "docs" / "template"
PACKAGE = "src/fusebook/__init__.py"
SECTION = 1
LONGEST = 30  # a page's lines have 79 characters
sys.path.insert(0, str(ROOT / "src"))


def number():
    """The first number behind the last page of the section."""
    taken = [int(page.stem.split("_")[1]) for page in (ROOT / "examples").glob(f"plot_{SECTION}??_*.py")]
    return max(taken, default=100 * SECTION) + 1


def files(name):
    """What is to be written, by its path from the root."""
    page = f"plot_{number()}_{name}"
    targets = {
        f"src/fusebook/kernels/{name}.py": "kernel",
        f"src/fusebook/cards/{name}.py": "card",
        f"examples/{page}.py": "page",
        f"src/fusebook/lesson/evidence/{page}.py": "evidence",
        f"examples/solutions/{page}.py": "solutions",
    }
    words = name.replace("_", " ")
    title = words[0].upper() + words[1:]
    return {
        target: (TEMPLATE / f"{part}.py")
        .read_text(encoding="utf-8")
        .replace("Squared ReLU\n============", f"{title}\n{'=' * len(title)}")
        .replace("plot_109_squared_relu", page)
        .replace("PAGE = 109", f"PAGE = {number()}")
        .replace("Squared ReLU", title)
        .replace("squared ReLU", words)
        .replace("squared_relu", name)
        .replace("SQUARED_RELU", name.upper())
        for target, part in targets.items()
    }


def names_of_the_template():
    """What the template's modules name themselves, which another function must not be called."""
    nodes = [node for part in TEMPLATE.glob("*.py") for node in ast.walk(ast.parse(part.read_text(encoding="utf-8")))]
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    found |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    found |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return found


def refusal(name):
    """Why a kernel cannot be called that, as a sentence; empty where it can."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or len(name) > LONGEST:
        return (
            f"expected a name as a function has it, such as my_kernel, of a-z, 0-9 and single _ between them, of at "
            f"most {LONGEST} characters, got {name!r}"
        )
    import fusebook
    from fusebook.cards import OPS

    there = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "src/fusebook/kernels" / f"{name}.py", ROOT / "src/fusebook/cards" / f"{name}.py")
        if path.exists()
    ]
    there += [str(page.relative_to(ROOT)) for page in sorted((ROOT / "examples").glob(f"plot_???_{name}.py"))]
    there += [f"fusebook.{word}" for word in (name, f"{name}_eager") if hasattr(fusebook, word)]
    there += [f"the card {name}"] if name in OPS else []
    there += ["a name of Python's or of the template's"] if {name} & {*dir(builtins), *names_of_the_template()} else []
    return f"{name} is taken by {', '.join(there)}: choose another name" if there else ""


def public(name):
    """The package's own module with the names of the new kernel; ruff sorts them."""
    text = (ROOT / PACKAGE).read_text(encoding="utf-8")
    names = [name, f"{name}_eager"]
    line = f"from fusebook.kernels.{name} import {', '.join(names)}\n"
    text = text.replace("from fusebook.kernels.", f"{line}from fusebook.kernels.", 1)
    return text.replace("__all__ = [", "__all__ = [\n" + "".join(f'    "{word}",\n' for word in names), 1)


def main(argv):
    """Write the files, put them into the house's style, and say what is next; returns the exit code."""
    if len(argv) != 1 or (why := refusal(argv[0])):
        print(f"new: {why if len(argv) == 1 else f'expected one name, such as my_kernel, got {argv}'}", file=sys.stderr)
        return 2
    written = files(argv[0])
    for target, text in written.items():
        (ROOT / target).parent.mkdir(exist_ok=True)
        (ROOT / target).write_text(text, encoding="utf-8")
    (ROOT / PACKAGE).write_text(public(argv[0]), encoding="utf-8")
    for how in (["check", "--fix"], ["format"]):  # lines are as long as the name makes them
        subprocess.run(
            [sys.executable, "-m", "ruff", *how, "--quiet", "--no-cache", *written, PACKAGE], cwd=ROOT, check=True
        )
    subprocess.run([sys.executable, str(ROOT / "docs/_ext/readme.py"), "pages"], cwd=ROOT, check=True)
    print(*written, f"next: change them, then pytest -k {argv[0]}; docs/contributing.rst says how", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
