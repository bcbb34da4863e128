"""The matrix products between the fused ops: x W^T."""
