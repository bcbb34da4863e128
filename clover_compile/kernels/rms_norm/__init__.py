"""The fused op clover::rms_norm."""
