"""Attention on a CPU in compiled loops: what an engine calls where the reference in torch would be slow."""
