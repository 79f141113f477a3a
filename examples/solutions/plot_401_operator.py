"""Solutions to the exercises of the page on kernels that become operators.

They import from nothing but PyTorch.
"""

import torch

# 1. One number a row.


def fake_row_sums(x):
    return x.new_empty(x.shape[:-1])


# 2. With the batch in front, the last axis is the members' last.


def batched_row_sums(x, along):
    return x.movedim(along, 0).sum(-1), 0


# 3. Each argument's slope times the other's value.


def gate_slopes(dz, x, u):
    s = torch.sigmoid(x)
    return dz * u * s * (1 + x * (1 - s)), dz * x * s
