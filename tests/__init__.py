"""Tests of clover-compile; a package, so that helpers are imported as `tests.<name>`."""
