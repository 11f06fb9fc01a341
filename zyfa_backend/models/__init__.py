"""Checkpoints to test and measure with, and captures of a model's Q, K and V."""
