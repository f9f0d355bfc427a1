"""Saved features of test rows, and their t-SNE embedding, computed once and cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from fedgist.runs import atomic_files
from fedgist.runs.record import FEATURES, to_json

CACHE = "features-tsne.json"
MOST_POINTS = 1000  # more points take long and add nothing to the figure
FEWEST_POINTS = 4  # t-SNE needs at least this number

Points = list[tuple[float, float]]


@dataclass(frozen=True, eq=False)
class SavedFeatures:
    """The saved features of a run: ``features`` (points, width), ``clients``, ``labels`` (points,).

    ``heads`` are the weights (clients, classes, width) and biases (clients, classes) of the
    clients' heads, by client number, or None if they were not saved.
    """

    features: np.ndarray
    clients: np.ndarray
    labels: np.ndarray
    digest: str
    heads: tuple[np.ndarray, np.ndarray] | None = None


def saved(folder: Path, name: str = FEATURES) -> SavedFeatures | None:
    """Return the features saved in a run's folder, or None if the file is damaged."""
    blob = (folder / name).read_bytes()
    try:
        arrays = safetensors.numpy.load(blob)
        features, clients, labels = (arrays[name] for name in ("features", "client", "label"))
        heads = (arrays["weight"], arrays["bias"]) if "weight" in arrays else None
    except (safetensors.SafetensorError, KeyError):
        return None
    fits = _fit_each_other(features, clients, labels)
    if not fits or (heads and not _are_heads_of(*heads, features, clients)):
        return None
    return SavedFeatures(features, clients, labels, hashlib.sha256(blob).hexdigest(), heads)


def tsne_points(folder: Path) -> tuple[Points, list[int], list[int]] | None:
    """Return t-SNE points (van der Maaten and Hinton 2008), their clients and their classes.

    The points are computed once and cached in the folder. None if the features are damaged.
    """
    saved_features = saved(folder)
    if saved_features is None:
        return None
    count = len(saved_features.features)
    picks = np.linspace(0, count - 1, min(MOST_POINTS, count)).round().astype(int)
    points = _cached_points(folder / CACHE, saved_features.digest)
    if points is None or len(points) != len(picks):
        points = arranged(saved_features.features[picks])
        with contextlib.suppress(OSError, ValueError):  # the folder may be read-only
            text = to_json({"of": saved_features.digest, "points": points}) + "\n"
            atomic_files.write(folder / CACHE, text)
    return points, saved_features.clients[picks].tolist(), saved_features.labels[picks].tolist()


def _fit_each_other(features: np.ndarray, clients: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether features (points, width) have one client and one class per point."""
    numbers = np.issubdtype(features.dtype, np.floating)
    counts = all(np.issubdtype(array.dtype, np.integer) for array in (clients, labels))
    one_each = clients.shape == labels.shape == features.shape[:1]
    return bool(numbers and counts and one_each and len(features.shape[1:]) == 1 and len(features))


def _are_heads_of(
    weight: np.ndarray, bias: np.ndarray, features: np.ndarray, clients: np.ndarray
) -> bool:
    """Return whether there is one finite head per client, of the features' width."""
    count, width = len(np.unique(clients)), features.shape[1]
    fits = weight.shape == (count, *bias.shape[1:], width) and bias.shape[:1] == (count,)
    return bool(fits and all(np.isfinite(array).all() for array in (weight, bias, features)))


def _cached_points(path: Path, digest: str) -> Points | None:
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))
        points = [(float(x), float(y)) for x, y in cache["points"]]
        return points if cache["of"] == digest and np.isfinite(points).all() else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def arranged(features: np.ndarray) -> Points:
    """Return the t-SNE point of each row of features (points, width)."""
    from sklearn.manifold import TSNE  # noqa: PLC0415  # a slow import that other pages do not need

    count = len(features)
    if count < FEWEST_POINTS or not np.isfinite(features).all():
        return [(float(i), 0.0) for i in range(count)]
    tsne = TSNE(2, perplexity=min(30.0, (count - 1) / 3), init="pca", random_state=0, n_jobs=1)
    return [(float(x), float(y)) for x, y in tsne.fit_transform(features.astype(np.float64))]
