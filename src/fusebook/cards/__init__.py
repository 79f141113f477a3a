"""The cards: what each operator means, costs, is measured at, and who else computes it. One module per family.

A module is found because it is here, and in no list: it has ``OPS``, its cards, and ``PAGE``, the number of the page
that tells of them.
"""

import importlib
import pkgutil

from fusebook.op import Op

__all__ = ["OPS"]

_MODULES = [
    importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if not found.name.startswith("_")
]

#: Every card of the library by its name, in reading order: as the pages that tell of them are numbered.
OPS: dict[str, Op] = {op.name: op for module in sorted(_MODULES, key=lambda module: module.PAGE) for op in module.OPS}
