"""Data sets of the Hugging Face hub, or saved with its library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from fedgist.data.dataset import Dataset
from fedgist.data.sources.hub_columns import HubColumns, HubOptions
from fedgist.data.sources.hub_given import hub_dataset, named_splits, with_a_class, with_a_client
from fedgist.data.sources.optional_packages import need
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.splits import RowOptions, division_of
from fedgist.errors import DataError

_NEED = "reading Hugging Face data sets needs datasets: pip install 'fedgist[huggingface]'"
_SAVED = ("dataset_dict.json", "state.json")  # files that save_to_disk writes


def huggingface(
    *,
    path: str | Path,
    config: str | None = None,
    label: str | list[str] | None = None,
    image: str | None = None,
    features: list[str] | None = None,
    client: str | None = None,
    group: str | None = None,
    image_size: int | list[int] | None = None,
    train: str = "train",
    test: str | None = None,
    read: Read = "auto",
    **row_options: Unpack[RowOptions],
) -> Dataset:
    """Read a Hugging Face data set: labels, and a column of images or columns of numbers.

    Parameters
    ----------
    path
        A name on the hub, or a folder saved by the datasets library.
    config
        The configuration, if the data set has several.
    label
        The column of labels. The default is the column ``label``, ``labels``, ``target`` or ``y``,
        or the only column of class labels. If the data set names its classes, these names and their
        order are used. For the objectives ``regression`` and ``multilabel`` it holds numbers, or 1
        and 0, and may be a list of columns; for ``multilabel`` also lists of class labels.
    image
        The column of images. The default is the only one. Give either this or ``features``.
    features
        The columns of numbers. The default without images is all of them: whole numbers, real
        numbers, decimals, Booleans, and arrays or lists of these with one shape in all rows.
    client
        The column with the name of the client that owns a row.
    group
        The column of what stays together when test or validation rows are chosen, such as
        ``"patient"``.
    image_size
        Size of all images: the side of a square in pixels, or ``[height, width]``. The default is
        the size of the first image, which may have at most 2048x2048 pixels.
    train
        The split of training rows.
    test
        The split of test rows. The default is the split ``test``, if there is one.

    Notes
    -----
    This source needs the package datasets, which may download data from the hub. Columns that are
    neither input nor label, such as texts, are named in a note. A single column of arrays keeps its
    shape, and arrays of bytes are images, as in the source ``npz``; several columns are joined.

    Pooled normalization: mean and deviation of each column, or of each channel of images, 0 to 1,
    over all training rows, those held out for validation included. With ``data.read = "lazy"``, or
    if the inputs would fill more than half of the memory, rows are read from the library's files
    when they are used; missing numbers are then refused.

    A class label of -1 or None is missing. With ``data.missing_labels = "mask"`` such rows are left
    out; in splits that are given to ``fedgist.run`` it is an error. The other rules are the same
    there.

    Examples
    --------
    A recipe's section::

        [data]
        name = "huggingface"
        path = "ylecun/mnist"
        image = "image"
    """
    missing, division = row_options.get("missing", "refuse"), division_of(row_options)
    target, classes = row_options.get("target", "class"), row_options.get("classes", ())
    options = HubOptions(
        label, image, features, client, image_size, train, test, division.fraction, missing, group
    )
    given = named_splits(_load(path, config), str(path), options)
    if given.tests:
        division.refuse(f"{path} has the split {test or 'test'!r}")
    if row_options.get("missing_labels") == "mask" and target == "class":
        given = with_a_class(given, HubColumns.of(given.train[0], options, target))
    if row_options.get("missing_clients") == "drop":
        given = with_a_client(given, HubColumns.of(given.train[0], options, target))
    drawn = None if given.tests else division
    data, _ = hub_dataset(
        given, options, read, target, classes=classes, stored=True, division=drawn
    )
    return replace(data, name=str(path))


def _load(path: str | Path, config: str | None) -> Mapping[str, object]:
    library = need("datasets", _NEED)
    folder = Path(path).expanduser()
    try:
        if any((folder / file).is_file() for file in _SAVED):
            loaded = library.load_from_disk(str(folder))
        else:
            loaded = library.load_dataset(str(folder) if folder.exists() else str(path), config)
    except (OSError, ValueError, RuntimeError, LookupError, ImportError) as error:
        problem = " ".join(str(error).split("\n")[:2])  # the second line may have the choices
        raise DataError(
            f"the Hugging Face data set {str(path)!r} cannot be loaded: {problem}"
        ) from error
    return loaded if isinstance(loaded, dict) else {"train": loaded}
