"""Load data from a source by its name, and check its options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedgist.core.objectives.target import Target
from fedgist.data.content_draws import split_by_content
from fedgist.data.dataset import Dataset, check, with_classes
from fedgist.data.division import USUAL, Division, OwnTestRowsError
from fedgist.data.label_check import MissingClients, MissingLabels
from fedgist.data.sources import SOURCES
from fedgist.data.sources.file_sizes import MissingFileError, readable
from fedgist.data.sources.locations import data_root, expanded_path
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.text_rows import Reading, SplitTexts, text_dataset
from fedgist.data.usable_rows import Unlisted, usable
from fedgist.errors import DataError, did_you_mean, shown
from fedgist.options import Options, check_options, options_of

TEST_FRACTION_KEY = "test_fraction"
WORDS_FILE = "words.file"
FILE_KEYS = ("path", "test", "file", "test_file", WORDS_FILE)  # of [data]
# parameters that sources share
NO_OPTIONS = (
    "root",
    "classes",
    "seed",
    "read",
    "target",
    "missing_labels",
    "unlisted",
    "missing_clients",
    "division",
    "drawn",
    "precise",
)


def load_data(
    name: str,
    *,
    root: Path | None = None,
    classes: Sequence[str] = (),
    seed: int = 0,
    words: Reading | None = None,
    target: Target | None = None,
    missing_labels: MissingLabels = "refuse",
    missing_clients: MissingClients = "refuse",
    read: Read = "auto",
    source: Callable[..., Dataset | SplitTexts] | None = None,
    secret: int | None = None,
    unlisted: Unlisted = "refuse",
    division: Division = USUAL,
    **options: object,
) -> Dataset:
    """Return the validated data set of the source ``name``.

    ``root`` is the folder of downloaded data (see :func:`.data_root`). ``classes`` are the names
    of all classes in the order of their numbers, if they differ from the source's. ``seed`` is the
    run's seed, for sources that draw their examples. ``words`` are the settings for texts.
    ``target`` is the form of the labels to read, if the source has several; the default is the
    source's own. With ``missing_labels = "mask"`` labels may be missing. With ``missing_clients``
    ``"drop"`` rows without a client are left out. ``read`` says how rows are read: once, or when
    they are used. ``source`` reads the data set if the name is a user's own.
    With a ``secret``, test rows that the source would draw by their places are drawn by their
    content (:mod:`fedgist.data.content_draws`). With ``unlisted = "none"``, unlisted categories and
    rows that cannot be used are no errors (:mod:`fedgist.data.usable_rows`), and with ``"keep"``
    they are returned as they are: the data are then not valid for training. ``division`` says how
    test rows are chosen, with the option ``test_fraction``. ``options`` are those of the source.
    """
    source = source or _source(name)
    arguments = check_options(source, options, name, "data", NO_OPTIONS)
    common = {"root": data_root(root), "classes": classes, "seed": seed, "read": read}
    lenient, kept = unlisted != "refuse", unlisted == "keep"
    arguments |= {"missing": "refuse"} if kept and "missing" in arguments else {}
    if lenient and target in {None, "class"}:
        common["classes"] = ()  # rows of other classes are left out afterwards
    common |= {"missing_labels": "mask" if lenient else missing_labels, "unlisted": unlisted}
    common |= {"missing_clients": missing_clients, "division": division, "precise": kept}
    common |= {} if target is None else {"target": target}
    taken, _ = options_of(source)
    if read == "lazy" and "read" not in taken:
        raise DataError(f"data.read = 'lazy': the rows of {name} are read once, into memory")
    if division.is_stated and "division" not in taken:
        division.refuse(f"the test rows of {name} are always the same")
    arguments |= {key: value for key, value in common.items() if key in taken}

    def whole(**further: object) -> Dataset:
        with readable(name), _naming_key({WORDS_FILE: words and words.file, **options}):
            data = _as_dataset(source(**arguments | further), name, words, target)
            if kept:
                return data
            data = usable(data, classes) if lenient else data
            return with_classes(check(data, missing_labels), classes)

    if secret is None or TEST_FRACTION_KEY not in taken:
        return whole()
    if "group" in options:
        raise DataError(
            "data.group keeps rows together, and privacy.unit = 'record' protects each row: leave "
            "it out"
        )
    stated = replace(division, fraction=arguments.get(TEST_FRACTION_KEY))
    return _divided(whole, stated, secret, {"division": USUAL} if "division" in taken else {})


@contextlib.contextmanager
def _naming_key(options: Options) -> Iterator[None]:
    """Let the error about a missing file begin with the key that names the file."""
    try:
        yield
    except MissingFileError as error:
        stated = {key: str(options.get(key) or "") for key in FILE_KEYS}
        keys = [key for key, text in stated.items() if expanded_path(text) == error.path]
        key = f"data.{keys[0]}: " if keys else ""
        raise MissingFileError(f"{key}{error}", error.path) from error


def _as_dataset(
    data: Dataset | SplitTexts, name: str, words: Reading | None, target: Target | None
) -> Dataset:
    """Return what a source read, with its texts as words."""
    if isinstance(data, SplitTexts):
        kind = "words" if data.train.labels is None else target or "class"
        return text_dataset(data, words or Reading(), kind)
    if words is not None:
        raise DataError(f"data.words is about texts, and {name} has none")
    return data


def _divided(
    whole: Callable[..., Dataset], division: Division, secret: int, without_folds: Options
) -> Dataset:
    """Return data whose test rows are drawn by content, unless they have test rows of their own."""
    try:
        undivided = whole(test_fraction=0.0, **without_folds)
    except OwnTestRowsError:
        return whole()
    return split_by_content(undivided, division, secret)[0]


def _source(name: str) -> Callable[..., Dataset | SplitTexts]:
    if name not in SOURCES:
        raise DataError(f"data.name: unknown data set {shown(name)}{did_you_mean(name, SOURCES)}")
    return SOURCES[name]
