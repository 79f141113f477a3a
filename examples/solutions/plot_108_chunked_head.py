"""Solutions to the exercises of the page on the chunked head.

Both take the logits of a few rows at a time, as the page does. They use torch
alone, so that they can be read next to the page's loop.
"""

import torch

# 1. The gradient of the bias is the sum of the logits' gradient over rows, and
# a sum over rows adds up chunk by chunk.
#
# 2. A buffer in float32 takes twice the memory of the head's gradient. The
# matmul must return float32, too: a rounded product is rounded already.


def _chunk(logits, target, scale):
    """Losses of some rows, and the gradient of their logits."""
    logits = logits.float()
    losses = (
        torch.logsumexp(logits, 1) - logits.gather(1, target[:, None])[:, 0]
    )
    dx = torch.softmax(logits, 1)
    dx[torch.arange(len(target), device=target.device), target] -= 1
    return losses, dx * scale


def with_bias(h, head, bias, target, rows=8):
    losses, dh = h.new_empty(len(h)), torch.empty_like(h)
    dhead, dbias = torch.zeros_like(head), torch.zeros_like(bias)
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        logits = torch.addmm(bias, h[part], head.T)
        losses[part], dx = _chunk(logits, target[part], 1 / len(h))
        dh[part] = dx @ head
        dhead += dx.T @ h[part]
        dbias += dx.sum(0)
    return losses.mean(), dh, dhead, dbias


def rounded_once(h, head, target, rows=1):
    losses, dh = h.new_empty(len(h), dtype=torch.float32), torch.empty_like(h)
    dhead = torch.zeros_like(head, dtype=torch.float32)
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        logits = h[part] @ head.T
        losses[part], dx = _chunk(logits, target[part], 1 / len(h))
        dx = dx.to(h.dtype)
        dh[part] = dx @ head
        dhead += dx.T.float() @ h[part].float()
    return losses.mean(), dh, dhead.to(head.dtype)
