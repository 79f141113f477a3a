"""Solutions to the exercises of the page on a kernel that becomes an operator.

They import only PyTorch.
"""

import torch

# 1. One element for each row.


def fake_row_sums(x):
    return x.new_zeros(x.shape[:-1])


# 2. With the batch in front, the last axis is that of each member.


def batched_row_sums(x, axis):
    return x.movedim(axis, 0).sum(-1), 0


# 3. The gradient of each argument is multiplied by the other argument.


def gate_slopes(dz, x, u):
    s = torch.sigmoid(x)
    return dz * u * s * (1 + x * (1 - s)), dz * x * s
