"""Triton kernels by their launch plans, interpreted on CPU tensors (TRITON_INTERPRET=1)."""
