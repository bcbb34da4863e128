"""One folder per fused op: reference, spec and the slots that lower it."""
