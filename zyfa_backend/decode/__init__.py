"""Decode: one new token per sequence over a cache that prefill wrote."""
