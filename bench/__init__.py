"""Measures the `ort-cpu` path against the eager model, the machine's limits and a bare open."""
