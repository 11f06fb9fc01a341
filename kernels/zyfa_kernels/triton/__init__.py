"""Kernels in Triton, for any GPU that it compiles for."""
