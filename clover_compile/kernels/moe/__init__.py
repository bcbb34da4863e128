"""The fused op clover::moe."""
