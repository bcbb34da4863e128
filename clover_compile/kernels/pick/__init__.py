"""The fused op clover::pick."""
