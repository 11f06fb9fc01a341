"""Checkpoints for trying ZYFA without a download, and captures of what their attention sees."""
