"""clover-compile: a compiler from Clover checkpoints to engines that prove themselves."""

__version__ = "0.1.0"
