"""Hostile settings: many devices, no implicit promotion. Warnings are errors, see pyproject.toml.

KVJAX_TEST_GPU=1 leaves the choice of platform to jax and lets the tests marked `gpu` and
`multi_gpu` run; without it everything runs on the CPU.
"""

import os

import pytest

USE_GPU = os.environ.get("KVJAX_TEST_GPU") == "1"
if not USE_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"  # in the environment too: tests start subprocesses

import jax  # noqa: E402  after the platform is chosen

if not USE_GPU:
    jax.config.update("jax_platforms", "cpu")  # a pytest plugin may have imported jax before
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def gpu_count() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:  # how jax says that there is no such platform
        return 0


def pytest_collection_modifyitems(items):
    needs = {"gpu": 1, "multi_gpu": 2}
    marked = [
        (item, needs[mark.name])
        for item in items
        for mark in item.iter_markers()
        if mark.name in needs
    ]
    if not marked:
        return
    have = gpu_count() if USE_GPU else 0
    for item, wanted in marked:
        if not USE_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: set KVJAX_TEST_GPU=1"))
        elif have < wanted:
            reason = f"needs {wanted} GPU(s): jax sees {have}"
            item.add_marker(pytest.mark.skip(reason=reason))
