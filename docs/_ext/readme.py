"""Draw the README's figure from the record of softmax: ``python docs/_ext/readme_figure.py``.

Writes docs/_static/softmax.svg, its caption to softmax.txt, and both into the README, between its two markers. The
caption says where the numbers come from, as the record does.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "docs" / "_static"
MARKERS = "<!-- drawn by docs/_ext/readme_figure.py -->", "<!-- end -->"
sys.path.insert(0, str(ROOT / "src"))


def main():
    """Draw bandwidth over width, under the measured roof."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same record gives the same file.
    mpl.rcParams.update({"svg.hashsalt": "fusebook", "savefig.transparent": True})
    from fusebook import plots, record

    slug = os.environ.get("FUSEBOOK_GPU", "nvidia-h200")
    df = record.read("softmax", slug)
    df = df[(df["config"] == "triton") & (df["dtype"] == "float32")]
    axes = plots.bandwidth(df)
    axes.figure.savefig(STATIC / "softmax.svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    machine = df.attrs["machine"]
    caption = (
        f"Softmax of 4096 rows in float32 on one {machine.name}, cold, by the width of a row: bandwidth of the least "
        f"traffic, under the measured roof. {df['versions'].iloc[0]}; {df['date'].iloc[0]}."
    )
    (STATIC / "softmax.txt").write_text(caption + "\n", encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    picture = f"![{caption}](docs/_static/softmax.svg)\n\n{caption}"
    text = f"{before}{MARKERS[0]}\n\n{picture}\n\n{MARKERS[1]}{after}"
    (ROOT / "README.md").write_text(text, encoding="utf-8")
    print(STATIC / "softmax.svg")


if __name__ == "__main__":
    main()
