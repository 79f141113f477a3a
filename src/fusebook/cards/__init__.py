"""The cards: what each operator means, costs, is measured at, and who else computes it. One module per family.

A module is found because it is here, and in no list: it has ``OPS``, its cards, and ``PAGE``, the number of the page
that tells of them.
"""

import importlib
import pkgutil

from fusebook.op import Op

__all__ = ["MODULES", "OPS"]

#: The modules, in reading order: as the pages that tell of them are numbered.
MODULES = sorted(
    (
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
        if not found.name.startswith("_")
    ),
    key=lambda module: module.PAGE,
)

#: Every card of the library by its name, in reading order.
OPS: dict[str, Op] = {op.name: op for module in MODULES for op in module.OPS}
