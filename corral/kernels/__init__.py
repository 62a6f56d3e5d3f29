"""The arithmetic that is worth a kernel of its own, each as a function of tensors.

A function computes with plain torch on CPU tensors and with Triton on CUDA tensors, to the same result but for
rounding. The Triton side is in `corral.kernels.gpu`, which is imported only when a CUDA tensor arrives: a machine
without a GPU needs no Triton. Nothing here knows models, recipes or batches.
"""
