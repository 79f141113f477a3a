"""Solutions to the exercises of the page on an all-reduce and a norm."""

import fusebook  # noqa: F401  before triton

import torch

# 1. Every rank fetches each share from the rank that has added it.


def two_shot(parts):
    out = torch.zeros_like(parts)
    for rows in torch.arange(parts.shape[1]).chunk(len(parts)):
        out[:, rows] = parts[:, rows].sum(0)
    return out


# 2. A read is correct between its own write and the next.


def spoiled(log):
    written = read = wrong = 0
    for action in log:
        written += action == "w"
        read += action == "r"
        wrong += action == "r" and written != read
    return torch.tensor([wrong])
