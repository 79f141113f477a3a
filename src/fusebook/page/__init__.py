"""What a page needs: its arguments, its results, and prose that cannot go stale.

A page asks for results and never whether there is a GPU. With one, they are measured; without, they are read from the
records of a named GPU and say so. What a block ends in is an object that renders itself in the gallery and in a
notebook, and prints itself when the page runs as a script.

Environment variables decide the rest; docs/contributing has the table. Variables that begin with ``_FUSEBOOK`` are set
by the project for its own processes, and not by users.
"""

from fusebook.extras import extra

# What its modules name in their `__all__` is what a page needs.
with extra("book"):
    from fusebook.page import draw, verdicts
    from fusebook.page.claims import *  # noqa: F403
    from fusebook.page.claims import __all__ as _claims
    from fusebook.page.counters import *  # noqa: F403
    from fusebook.page.counters import __all__ as _counters
    from fusebook.page.results import *  # noqa: F403
    from fusebook.page.results import __all__ as _results
    from fusebook.page.show import *  # noqa: F403
    from fusebook.page.show import __all__ as _show

__all__ = ["draw", "extra", "verdicts", *_claims, *_counters, *_results, *_show]
