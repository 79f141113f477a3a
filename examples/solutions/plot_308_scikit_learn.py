"""Solutions to the exercises of the page on k-means against scikit-learn."""

import fusebook  # noqa: F401  before triton

import torch

# 1. The nearest centre of each point alone counts.


def inertia(points, centres):
    return (points - centres[:, None]).square().sum(2).amin(0).sum()


# 2. Squared distances. A point that is a centre already has no chance.


def chances(points, centres):
    square = (points - centres[:, None]).square().sum(2).amin(0)
    return square / square.sum()


# 3. The variance of each coordinate by itself, and then their mean. How far
# apart the axes are does not matter then.


def threshold(points, tol):
    return tol * points.var(0, correction=0).mean()


if __name__ == "__main__":
    x = torch.rand(1000, 2)
    print(inertia(x, x[:3]), chances(x, x[:3]).max(), threshold(x, 1e-4))
