"""upconv: the fastest transposed convolution for PyTorch."""

from .version import __version__

__all__ = ["__version__"]
