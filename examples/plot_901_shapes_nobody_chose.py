"""
Random problems: what to expect at your size
============================================

A benchmark shows sizes that its author chose, and a kernel is fast where it
was tuned. Here a rule that knows nothing of the kernels draws the problems.
No kernel was tuned with them.

Prerequisites: :doc:`plot_900_all_results`.
"""

import fusebook.lesson as lesson

# sphinx_gallery_tags = ["results"]
book = lesson.book("plot_901_shapes_nobody_chose")
book.problems(seed=2811, cases=24, seconds=40)

# %%
# Each dot is a problem. Left of the line Fusebook is faster.

book.spread()

# %%
# Widths are those of models (65 %), other multiples of 8 (25 %) and odd
# (10 %). 80 % of the problems are contiguous in memory. The evidence of each
# lesson lists its problems, and says why Fusebook is slower where we know it.
# On your GPU, ``--seed 7`` draws other ones. So does a command, for the
# operators that you name:
#
# .. code-block:: sh
#
#    python -m fusebook.measure.explore softmax swiglu --seed 7 --cases 100
