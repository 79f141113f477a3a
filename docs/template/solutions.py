"""Solutions to the exercise of the squared ReLU lesson."""

import torch


def without_clamp(x):
    return torch.where(x > 0, x * x, 0.0)
