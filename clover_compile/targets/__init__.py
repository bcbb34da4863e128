"""One folder per target family; table.py names them without importing them."""
