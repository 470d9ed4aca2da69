"""What every test shares: a private build cache, no UPCONV_* from outside, and the gpu marker."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--build-cache",
        metavar="DIR",
        help="keep the compiled libraries in DIR instead of a new temporary folder",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One cache folder for the session: xdist workers inherit it, so that one of them builds."""
    if hasattr(config, "workerinput"):
        share_cores(config.workerinput["workercount"])
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # children would ignore Ctrl-C
    for name in [name for name in os.environ if name.startswith("UPCONV_")]:
        del os.environ[name]
    kept = config.getoption("--build-cache")
    if kept:
        os.makedirs(kept, mode=0o700, exist_ok=True)
        os.environ["UPCONV_CACHE_DIR"] = os.path.abspath(kept)
    else:
        folder = tempfile.mkdtemp(prefix="upconv-tests-")
        os.environ["UPCONV_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def share_cores(workers: int) -> None:
    """Workers that outnumber the cores make OpenMP spin: 118 s instead of 7 for tiny calls."""
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none here"))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Tests that draw inputs draw the same ones in every run, whatever ran before them."""
    import torch

    torch.manual_seed(20240229)
