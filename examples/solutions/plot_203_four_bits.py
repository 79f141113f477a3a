"""Solution to the exercise of the page on weights of four bits."""

# (code - zero) is (code - 8) less (zero - 8). The second part is the same
# for a whole group, so it multiplies the sum of x over that group.


def matmul_without(x, codes, scales):
    """What the page's kernels compute, in torch: all zero points are 8."""
    return x @ ((codes.to(x.dtype) - 8) * scales.repeat_interleave(128, 1)).T


def with_zeros(x, codes, scales, zeros, matmul=matmul_without):
    sums = x.float().view(len(x), -1, 128).sum(2)  # [M, G]
    shift = (zeros.float() - 8) * scales.float()  # [N, G]
    return (matmul(x, codes, scales).float() - sums @ shift.T).to(x.dtype)
