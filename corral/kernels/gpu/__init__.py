"""Triton kernels and their launchers: tensors in, tensors out, no autograd.

In every kernel: sizes in capitals are compile-time constants (a new value compiles a new variant), `x_ptr` is a pointer
to the first element of `x`, and offsets are int64 wherever rows x width can pass 2**31 elements.
"""
