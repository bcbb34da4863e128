"""Rotary angles of positions: not a fused op, but part of Units with attention."""
