"""``python -m fusebook.ort build --arch 80,90,100 --out libfusebook_ort.so``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fusebook.ort.aot import ARCHITECTURES, TYPES, build


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fusebook.ort", description="Operators for ONNX Runtime.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="compile the kernels into a library that needs no Python")
    make.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)), help="by commas; 90 is sm_90")
    make.add_argument("--dtype", default=",".join(TYPES), help=f"by commas, of {', '.join(TYPES)}")
    make.add_argument("--out", default="libfusebook_ort.so")
    args = parser.parse_args(argv)
    try:
        architectures = [int(word.removeprefix("sm_")) for word in args.arch.split(",")]
    except ValueError:
        parser.error(f"--arch: expected numbers by commas such as 80,90, got {args.arch!r}")
    try:
        print(build(args.out, arch=architectures, dtype=args.dtype.split(","), progress=True))
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
