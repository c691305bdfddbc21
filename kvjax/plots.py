"""Plots of measured caches. matplotlib is imported when one is drawn."""

import pathlib

import numpy as np


def plot_comparison(
    file: pathlib.Path, bytes_by_cache: dict[str, dict[str, int]], kl: np.ndarray, first: int
) -> None:
    """Bytes per tier of each cache, and KL along the scored tokens.

    Args:
      bytes_by_cache: cache name -> storage name -> bytes.
      kl: nats per scored token.
      first: position of the first of them.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    kinds = list(dict.fromkeys(kind for table in bytes_by_cache.values() for kind in table))
    base = np.zeros(len(bytes_by_cache))
    for kind in kinds:
        height = np.array([table.get(kind, 0) / 1e6 for table in bytes_by_cache.values()])
        left.bar(list(bytes_by_cache), height, bottom=base, label=kind)
        base += height
    left.set_ylabel("cache, MB")
    left.legend(fontsize="small")
    positions = first + np.arange(kl.size)
    # Nothing is below float32's own noise.
    right.semilogy(positions, np.maximum(kl, 1e-7), ".", markersize=3, label="each token")
    right.axhline(kl.mean(), color="black", linewidth=1, label=f"mean {kl.mean():.4f}")
    right.set_xlabel("position in the text")
    right.set_ylabel("KL(full || tiered), nats")
    right.legend(fontsize="small")
    figure.savefig(file, dpi=120)
