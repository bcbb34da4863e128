"""The fused op clover::gdn_scan."""
