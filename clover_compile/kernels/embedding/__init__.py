"""Embedding rows by id: not a fused op, but part of every Unit."""
