"""Builds the compiled libraries at first use, and keeps them.

`load("cpu")` answers in about 10 ms when the library is in the cache, else builds it:

    look up -> lock -> look up again -> build aside -> fsync -> rename into place -> load

- The key names everything that decides the machine code (`recipe.py`), the compilers included.
  These are recognised by path, size and modification time (`tools.py`), so a warm start runs no
  process, needs no compiler and no ninja, and does not import torch's build machinery. Where
  something needed for building is missing, a build by any compiler is taken, as long as the rest
  of the key agrees.
- Builds run ninja (`manifest.py`) in a child process (`child.py`), in a private folder that becomes
  the cache entry by one rename (`store.py`): a killed build leaves nothing that could be taken for
  a library.
- The folder is the user's cache folder; where that cannot be written to or cannot be trusted
  (`folder.py`), a private folder below the temporary one.
- What fails is remembered for the life of the process, warned about once, and tried again by the
  next process. Calls then run on PyTorch's kernels. Only UPCONV_BACKEND=native makes it an error.
"""

from __future__ import annotations

from .loader import (
    LoadResult,
    UpconvWarning,
    cache_state,
    clear,
    load,
    obstacle,
    prebuild,
    spec,
)
from .recipe import BuildSpec
from .store import CacheState, Entry

__all__ = [
    "BuildSpec",
    "CacheState",
    "Entry",
    "LoadResult",
    "UpconvWarning",
    "cache_state",
    "clear",
    "load",
    "obstacle",
    "prebuild",
    "spec",
]
