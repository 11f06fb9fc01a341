"""Kernels in Triton, for the GPUs that it supports."""
