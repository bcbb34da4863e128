"""The fused op clover::gdn_preview."""
