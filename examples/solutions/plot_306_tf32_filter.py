"""Solutions to the exercises of the page on a TF32 filter."""

import fusebook  # noqa: F401  before triton

import torch

# 1. What is subtracted from all changes no difference between them, and near
# the origin nothing large is left to cancel.


def far_product(points, centres):
    middle = centres.mean(0)
    points, centres = points - middle, centres - middle
    return (centres.square().sum(1) - 2 * points @ centres.T).argmin(1)


# 2. Adding half of the last kept bit turns cutting into rounding. A tie goes
# to the even neighbour, so its last kept bit decides.


def as_tf32(x):
    bits = x.view(torch.int32)
    half = 2**12 - 1 + ((bits >> 13) & 1)
    return ((bits + half) & -(2**13)).view(torch.float32)


# 3. The two smallest distances of each point, and their difference.


def undecided(points, centres, error):
    square = (points - centres[:, None]).square().sum(2)
    least = square.topk(2, dim=0, largest=False).values
    return (least[1] - least[0] <= error).float()


if __name__ == "__main__":
    x, c = torch.rand(1000, 20), torch.rand(30, 20)
    print(torch.bincount(far_product(x, c)), (as_tf32(x) - x).abs().max())
    print(undecided(x, c, 0.1).mean())
