"""Saved features in two dimensions, computed once and kept beside them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from fedgist.federation import atomic_files as files
from fedgist.federation.record import to_json
from fedgist.federation.saved_features import FEATURES

CACHE = "features-tsne.json"
MOST = 1000  # points: more take long and show no more
Points = list[tuple[float, float]]


def embedding(folder: Path) -> tuple[Points, list[int], list[int]] | None:
    """Return points, clients and classes by t-SNE (van der Maaten and Hinton 2008).

    None if the file of features is damaged.
    """
    blob = (folder / FEATURES).read_bytes()
    try:
        arrays = safetensors.numpy.load(blob)
        z, clients, labels = (arrays[name] for name in ("features", "client", "label"))
    except (safetensors.SafetensorError, KeyError):
        return None
    some = np.linspace(0, len(z) - 1, min(MOST, len(z))).round().astype(int)
    mark = hashlib.sha256(blob).hexdigest()
    points = _kept(folder / CACHE, mark)
    if points is None or len(points) != len(some):
        points = _compute(z[some])
        with contextlib.suppress(
            OSError
        ):  # a folder that cannot be written to: computed again next time
            files.write(folder / CACHE, to_json({"of": mark, "points": points}) + "\n")
    return points, clients[some].tolist(), labels[some].tolist()


def _kept(path: Path, mark: str) -> Points | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return [(float(x), float(y)) for x, y in kept["points"]] if kept["of"] == mark else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _compute(z: np.ndarray) -> Points:
    from sklearn.manifold import TSNE  # noqa: PLC0415  # a second, which pages without features should not wait

    if len(z) < 4 or not np.isfinite(z).all():  # noqa: PLR2004  # nothing to arrange
        return [(float(i), 0.0) for i in range(len(z))]
    tsne = TSNE(2, perplexity=min(30.0, (len(z) - 1) / 3), init="pca", random_state=0, n_jobs=1)
    return [(float(x), float(y)) for x, y in tsne.fit_transform(z.astype(np.float64))]
