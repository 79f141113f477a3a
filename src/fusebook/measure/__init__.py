"""Inputs, checks, clocks and records: how operators are measured."""

import argparse
from typing import Any

__all__: list[str] = []


class _Removed(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option} went with version 0.2.0: {self.const}")


def _removed(parser: argparse.ArgumentParser, options: dict[str, str]) -> None:
    """Refuse options of earlier versions by a sentence that says what to do instead."""
    for option, instead in options.items():
        parser.add_argument(option, action=_Removed, nargs="*", const=instead, help=argparse.SUPPRESS)
