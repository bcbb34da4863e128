"""Targets for one GPU architecture each: launch programs and precompiled Triton kernels."""
