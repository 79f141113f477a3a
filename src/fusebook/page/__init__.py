"""What a page needs: its arguments, its results, and prose that cannot go stale.

A page asks for results and never whether there is a GPU. With one, they are measured; without, they are read from the
records of a named GPU and say so. What a block ends in is an object that renders itself in the gallery and in a
notebook, and prints itself when the page runs as a script.

The environment decides the rest:

FUSEBOOK_STRICT
    ``1``: a false claim and a page without results are errors.
FUSEBOOK_REPLAY
    ``1``: replay the record on a machine that could measure.
FUSEBOOK_GPU
    The recorded machine to replay, ``nvidia-h200`` unless set.
FUSEBOOK_RECORDS
    A folder of your own GPU's records, to be replayed before the package's; see `fusebook.machine.places`.
FUSEBOOK_RECORD
    A folder of records: what is measured is written there too.
FUSEBOOK_DOWNLOADS
    Where downloads go. Unless set, ``build/downloads`` in the page's checkout, or in the current folder.
FUSEBOOK_DEPS
    A file in which a page notes what it reads: records, sources that it shows, solutions. The site sets it, and runs a
    page again when one of them has changed.
FUSEBOOK_DUE
    A file in which a page that replays notes whether its record lacks times of the device or of the host.
FUSEBOOK_COUNT
    Set by a page for itself, when Nsight Compute runs it, see `fusebook.page.counters`.
FUSEBOOK_RANKS
    Set by a page for the processes that it starts on several GPUs, see `fusebook.page.ranks`.
FUSEBOOK_REPOSITORY
    The address of the repository, for links to it.
"""

from fusebook.extras import extra

# What its modules name in their `__all__` is what a page needs.
with extra("book"):
    from fusebook.page import draw, verdicts
    from fusebook.page.claims import *  # noqa: F403
    from fusebook.page.claims import __all__ as _claims
    from fusebook.page.counters import *  # noqa: F403
    from fusebook.page.counters import __all__ as _counters
    from fusebook.page.ranks import *  # noqa: F403
    from fusebook.page.ranks import __all__ as _ranks
    from fusebook.page.results import *  # noqa: F403
    from fusebook.page.results import __all__ as _results
    from fusebook.page.show import *  # noqa: F403
    from fusebook.page.show import __all__ as _show

__all__ = ["draw", "extra", "verdicts", *_claims, *_counters, *_ranks, *_results, *_show]
