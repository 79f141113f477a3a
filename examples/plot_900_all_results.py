"""
Look up
=======

Time, memory and call of each implementation, the fastest first. Search for an
operator and a size, such as *softmax 128256*, and choose a GPU at the head of
its column. For a GPU that is not recorded, see :doc:`/gpus`.
"""

import fusebook.lesson as lesson

# sphinx_gallery_tags = ["results"]
book = lesson.book("plot_900_all_results")
book.look_up()

# %%
# *GPU time* begins with a cold L2 cache. *End to end* is the larger of CPU and
# GPU time: what a program of many calls pays for each. *Latency* is one call
# that is synchronized. *Memory* is what a call allocates at its peak, its
# output included. In a *call*, F is ``torch.nn.functional``, and the names of
# sizes are those of the operator's lesson. :doc:`/method` has the details.
#
# Which one to take
# -----------------
#
# A row has the fastest implementation of each kind at one size.

book.take()

# %%
# How often Fusebook is the fastest
# ---------------------------------
#
# Times within 2 % count as equal. The evidence of each lesson lists where
# another implementation is faster.

book.counts()

# %%
book.downloads()
