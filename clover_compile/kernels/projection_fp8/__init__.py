"""The kernel of projection over fp8 weights."""
