"""The fused op clover::block_attention."""
