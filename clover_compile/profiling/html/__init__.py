"""A profile as one HTML page that needs nothing else."""
