"""Graph passes over Units: one pass a file, one ordered list in pipeline.py."""
