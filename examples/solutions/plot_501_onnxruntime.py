"""Solutions to the exercises of the page on ONNX Runtime."""

import torch

# 1. Attributes arrive by name. What is returned is not looked at: out counts.


def leaky(x, out, *, alpha):
    torch.where(x > 0, x, x * alpha, out=out)


# 2. The mask is whatever the node says; only then do indices count from the
# end.


def masked_by(shape, indices, updates, out, *, maskedValue):
    live = indices[:, 0] != maskedValue
    rows = indices[live, 0] % out.shape[0]
    out.zero_()
    out.index_add_(0, rows, updates[live])
