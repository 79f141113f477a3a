"""The cards: what each operator means, costs, is measured at, and who else computes it. One module per family.

A module is found because it is here, and in no list: its cards are in its ``__all__``, and so is ``PAGE``, the number
of the page that tells of them.
"""

import importlib
import pkgutil

from fusebook.measure.op import Op

__all__ = ["FAMILIES", "OPS"]

_modules = [
    importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if not found.name.startswith("_")
]

#: The cards of each module, in reading order: as the pages that tell of them are numbered.
FAMILIES = {
    module: tuple(card for name, card in vars(module).items() if isinstance(card, Op) and name in module.__all__)
    for module in sorted(_modules, key=lambda module: module.PAGE)
}

#: Every card of the library by its name, in reading order.
OPS: dict[str, Op] = {op.name: op for family in FAMILIES.values() for op in family}
