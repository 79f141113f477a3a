"""
History: five documents, and what became of them
================================================

This book grew from five documents of 2012 to 2024. Each of them states what is
fast and what is not. This page has their statements in order, and the numbers
of a GPU of today next to them. Nothing is measured here. The advice of 2012
was tried once, on an NVIDIA H200. All other numbers are those of the lessons.
"""

import fusebook.lesson as lesson

# sphinx_gallery_tags = ["history", "using the GPU", "transfers"]
book = lesson.book("plot_001_using_the_gpu")
book.history()

# %%
# 2012: Theano, *Using the GPU*
# -----------------------------
#
# Theano is an ancestor of today's frameworks. Its manual had `a chapter on
# using the GPU <https://github.com/Theano/Theano/blob/master/doc/tutorial/
# using_gpu.txt>`__: how to see that it is used, what to keep there, what it is
# good at, and a list of tips. Much of that has become folklore.
#
# Its first program computes the exponential of 230400 elements a thousand
# times. Then it searches its graph for operators of the CPU, since a compiler
# decided where each of them ran. Today the data decides: an operation runs
# where its operands are.
#
# *Then*: the thousand exponentials took 46 s as a loop on the CPU that copied
# its operand, 3.07 s as a loop that did not, 0.639 s on a GeForce GTX 580 with
# results copied back, and 0.349 s with results left there. *Now*: the same
# advice gains more, because GPUs have become faster than the link to them.

book.advice()

# %%
# *Then*: the manual lists CUDA, OpenCL, PyCUDA and PyOpenCL for those who
# program a GPU directly. It names five advantages of `PyCUDA
# <https://github.com/inducer/pycuda>`__: convenience, all of the driver's
# interface, errors as exceptions, a base layer in C++, and memory that is
# freed with its object. *Now*: PyTorch and CuPy have all of them but the
# driver's interface, which NVIDIA's `cuda-python
# <https://nvidia.github.io/cuda-python/>`__ has. Kernels are written in
# Python, in Triton for example. The manual's first exercises, a product, a sum
# and a difference, are kernels of :doc:`plot_101_elementwise`.
#
# *Then*: "There is a limit of one GPU per process". *Now*: a process sees all
# GPUs that ``CUDA_VISIBLE_DEVICES`` leaves it. :doc:`plot_402_two_gpus` keeps
# several of them busy.
#
# *Then*: the manual trains a logistic regression on 400 pictures for ten
# thousand steps, and asks what would make the GPU faster. It leaves the answer
# to the reader. *Now*: :doc:`plot_301_logistic_step` has all steps in one
# kernel.

# %%
# 2022: Triton, *Fused Softmax*
# -----------------------------
#
# The second tutorial of Triton 1.1.2 is the source of
# :doc:`plot_102_softmax`. `The tutorial of today
# <https://triton-lang.org/main/getting-started/tutorials/
# 02-fused-softmax.html>`__ has another kernel and most of the old sentences.
# TorchScript, its baseline, is deprecated, and torch.compile has replaced it.
# A statement without a verdict cannot be tested as it is written.

book.statements("plot_102_softmax")

# %%
# 2023: PyTorch, *Compiling NumPy code into C++ or CUDA*
# ------------------------------------------------------
#
# `The announcement <https://pytorch.org/blog/compiling-numpy-code/>`__ of
# torch.compile for NumPy has one line of k-means as its example. *Then*:
# compiled, it is 9 times as fast as NumPy on one core and 57 times on 32
# cores. On a GPU it is 8 times as fast with copies, and 200 times without.
# :doc:`plot_302_numpy_to_cuda` follows it statement by statement.

book.statements("plot_302_numpy_to_cuda")

# %%
# 2024: onnx-extended, *Masked ScatterND*
# ---------------------------------------
#
# *Optimizing Masked ScatterND operator on CUDA* replaces five nodes of ONNX
# Runtime by one kernel. *Then*: it prints gains of 10.6x, 6.8x and 49.8x over
# these nodes, timed on the CPU, and explains them by atomic additions. Its
# script never compares the results, and the fast kernel is incorrect for more
# than 128 indices. *Now*: most of the gain comes from leaving ONNX Runtime's
# own ScatterND. The evidence of :doc:`plot_103_scatter_nd` counts each part,
# and :doc:`plot_501_onnxruntime` runs the graphs.

book.statements("plot_103_scatter_nd")

# %%
book.statements("plot_501_onnxruntime")

# %%
# 2024: onnx-extended, *Gemm Exploration with CUDA*
# -------------------------------------------------
#
# The question is whether two matmuls and a concat should be a concat and one
# matmul. *Then*: "It seems the fused operator is 33% faster", a sentence that
# its own table contradicts at two of three sizes. *Now*: the answer depends on
# the size, and a kernel that writes each result into its place needs no concat
# at all: :doc:`plot_201_gemm_concat`.

book.statements("plot_201_gemm_concat")
