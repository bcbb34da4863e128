"""The kernel of moe over fp8 weights."""
