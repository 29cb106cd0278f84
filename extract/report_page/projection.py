"""States on a plane: PCA always, UMAP where the package is installed.

Both see states scaled to length 1, so that near means what it means for cosines, and a long state does not outweigh
the others.
"""

import numpy as np
import numpy.typing as npt

from extract.shards.values import Float32

Float64 = npt.NDArray[np.float64]

MAX_FITTED = 2_048
"""Rows that decide the axes; an eigenvalue problem of this size takes seconds."""
MIN_UMAP_ROWS = 20
UMAP_NEIGHBOURS = 15


def pca(unit: Float32) -> tuple[Float64, tuple[float, float]]:
    """The two directions of largest variance.

    Args:
        unit: [N, H], N at least 1.

    Returns:
        Coordinates [N, 2], and the share of the variance along each axis. Axes are turned so that the largest weight of
        each is positive, or equal inputs could give mirrored maps.
    """
    fitted = unit[np.arange(min(len(unit), MAX_FITTED)) * len(unit) // min(len(unit), MAX_FITTED)].astype(np.float64)
    centre = fitted.mean(axis=0)
    fitted -= centre
    small = fitted @ fitted.T if len(fitted) < fitted.shape[1] else fitted.T @ fitted
    values, vectors = np.linalg.eigh(small)
    values, vectors = values[::-1][:2], vectors[:, ::-1][:, :2]
    axes = fitted.T @ vectors if len(fitted) < fitted.shape[1] else vectors
    axes = axes / np.maximum(np.linalg.norm(axes, axis=0), 1e-300)
    axes *= np.where(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])] < 0, -1.0, 1.0)
    total = float(np.trace(small))
    places, shares = np.zeros((len(unit), 2)), [0.0, 0.0]
    for axis in range(axes.shape[1]):
        if values[axis] > 1e-9 * max(total, 1e-300) and total > 0:  # what is left is rounding: there is no such axis
            places[:, axis] = (unit - centre) @ axes[:, axis]
            shares[axis] = float(values[axis]) / total
    return places, (shares[0], shares[1])


def umap(unit: Float32) -> tuple[Float64 | None, str]:
    """Coordinates [N, 2] by UMAP, or `None` and why not."""
    if len(unit) < MIN_UMAP_ROWS:
        return None, f"needs at least {MIN_UMAP_ROWS} rows"
    try:
        from umap import UMAP
    except ImportError:
        return None, "not installed: pip install 'extract-hidden-states[umap]'"
    # one job and a seed: the same output gives the same map
    reducer = UMAP(n_neighbors=min(UMAP_NEIGHBOURS, len(unit) - 1), metric="cosine", random_state=0, n_jobs=1)
    found: Float64 = np.asarray(reducer.fit_transform(unit), np.float64)
    return (found, "") if np.isfinite(found).all() else (None, "it gave places that are not finite")
