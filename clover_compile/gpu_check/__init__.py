"""`make gpu-check`: every kernel on a real GPU, beside its reference and its byte floor."""
