"""Kernels of ZYFA, free of any engine."""
