"""Saved features of test rows arranged in a plane by t-SNE, once; kept beside them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from fedgist.federation import atomic_files
from fedgist.federation.record import FEATURES, to_json

CACHE = "features-tsne.json"
MOST_POINTS = 1000  # more take long and show no more
FEWEST_POINTS = 4  # fewer cannot be arranged

Points = list[tuple[float, float]]


def embedding(folder: Path) -> tuple[Points, list[int], list[int]] | None:
    """Return points by t-SNE (van der Maaten and Hinton 2008), their clients and their classes.

    The points are computed once and kept beside the features. None if the features are damaged.
    """
    blob = (folder / FEATURES).read_bytes()
    try:
        arrays = safetensors.numpy.load(blob)
        features, clients, labels = (arrays[name] for name in ("features", "client", "label"))
    except (safetensors.SafetensorError, KeyError):
        return None
    if not _fit_each_other(features, clients, labels):
        return None
    count = len(features)
    picks = np.linspace(0, count - 1, min(MOST_POINTS, count)).round().astype(int)
    digest = hashlib.sha256(blob).hexdigest()
    points = _cached_points(folder / CACHE, digest)
    if points is None or len(points) != len(picks):
        points = _compute_points(features[picks])
        with contextlib.suppress(OSError, ValueError):  # a folder that cannot be written to
            text = to_json({"of": digest, "points": points}) + "\n"
            atomic_files.write(folder / CACHE, text)
    return points, clients[picks].tolist(), labels[picks].tolist()


def _fit_each_other(features: np.ndarray, clients: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether there is one client and one class for each row of numbers."""
    numbers = np.issubdtype(features.dtype, np.floating)
    counts = all(np.issubdtype(array.dtype, np.integer) for array in (clients, labels))
    one_each = clients.shape == labels.shape == features.shape[:1]
    return bool(numbers and counts and one_each and len(features.shape[1:]) == 1 and len(features))


def _cached_points(path: Path, digest: str) -> Points | None:
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))
        points = [(float(x), float(y)) for x, y in cache["points"]]
        return points if cache["of"] == digest and np.isfinite(points).all() else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _compute_points(features: np.ndarray) -> Points:
    from sklearn.manifold import TSNE  # noqa: PLC0415  # a second that other pages need not wait

    count = len(features)
    if count < FEWEST_POINTS or not np.isfinite(features).all():
        return [(float(i), 0.0) for i in range(count)]
    tsne = TSNE(2, perplexity=min(30.0, (count - 1) / 3), init="pca", random_state=0, n_jobs=1)
    return [(float(x), float(y)) for x, y in tsne.fit_transform(features.astype(np.float64))]
