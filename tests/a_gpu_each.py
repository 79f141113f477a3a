"""Of several GPUs that CUDA_VISIBLE_DEVICES names, each worker of a run has another one first, and the rest behind it.

To be imported before anything asks CUDA what there is: it looks at the variable once.
"""

import os


def turned(gpus, worker):
    """What worker ``gw1`` is to see where all see ``0,1,2``: ``1,2,0``."""
    names = gpus.split(",")
    first = int(worker.removeprefix("gw")) % len(names)
    return ",".join(names[first:] + names[:first])


if "PYTEST_XDIST_WORKER" in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = turned(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["PYTEST_XDIST_WORKER"])
