"""upconv: the fastest transposed convolution (ConvTranspose1d/2d/3d) for PyTorch.

    import upconv
    print(upconv.accelerate(model))      # or build with upconv.ConvTranspose2d

Importing touches neither a GPU nor a compiler; what is needed is built at the first call.
"""

from __future__ import annotations

from .version import __version__

try:
    import torch as _torch  # noqa: F401
except (ImportError, OSError) as _error:
    # `upconv doctor` has to run exactly then; all else says what is missing when it is asked for.
    _why_no_torch = _error

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(
                f"upconv.{name} needs PyTorch, which cannot be imported: {_why_no_torch}"
            ) from _why_no_torch
        raise AttributeError(f"module 'upconv' has no attribute {name!r}")
else:
    # Imported here and not when first asked for: the submodule has the function's name, and
    # loading it later would put the module in the function's place.
    from .explain import explain
    from .exporter import export
    from .functional import conv_transpose1d, conv_transpose2d, conv_transpose3d
    from .modules import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
    from .swap import accelerate, restore

__all__ = [
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "__version__",
    "accelerate",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "explain",
    "export",
    "restore",
]
