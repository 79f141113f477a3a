"""What processes that explore have in common, imported once: they are forked from a server that has this module."""

import torch._dynamo
import torch._inductor.codecache
import torch._inductor.compile_fx
import triton.runtime.cache

import fusebook.explore  # noqa: F401

# Digests of all that Triton and torch.compile are made of, by which they name what they keep.
triton.runtime.cache.triton_key()
torch._inductor.codecache.torch_key()
