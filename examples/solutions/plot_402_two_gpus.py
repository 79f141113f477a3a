"""Solutions to the exercises of the page on k-means over several GPUs."""

import fusebook  # noqa: F401  before triton

import torch

# 1. Only the lower half of the shifted word belongs to the number.


def received(x, times):
    LOW = 0xFFFFFFFF
    bits = x.view(torch.int64)
    high, low = (bits & ~LOW) | times, (bits << 32) | times
    return ((high & ~LOW) | ((low >> 32) & LOW)).view(torch.float64)


# 2. The last column is the sum of weights.


def weighted(points, weights, labels, K):
    own = torch.cat((points * weights[:, None], weights[:, None]), 1)
    total = points.new_zeros(K, own.shape[1]).index_add_(0, labels, own)
    return total[:, :-1] / total[:, -1:]
