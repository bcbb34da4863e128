"""Eager Clover in plain PyTorch: nothing here knows about export or targets."""
