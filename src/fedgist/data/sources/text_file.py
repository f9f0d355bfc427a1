"""Data source for a user's texts: JSON lines or a table, with a text and a client per row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedgist.core.objectives.target import Target
from fedgist.data.division import Division
from fedgist.data.label_check import MissingClients, MissingLabels
from fedgist.data.sources.file_formats import expect_text
from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.data.sources.locations import existing
from fedgist.data.sources.splits import note_on_left_out
from fedgist.data.sources.table_file import is_missing, is_table, load_table
from fedgist.data.sources.text_rows import SplitTexts, Texts, note_on_empty
from fedgist.data.vocabulary import sentences_of
from fedgist.errors import DataError, first_line, listed

_TIMES = 10  # bytes of memory per byte of the file while it is read


def text_file(
    *,
    file: str,
    test_file: str | None = None,
    text: str = "text",
    client: str | None = None,
    label: str | None = None,
    sentences: bool | None = None,
    test_fraction: float | None = None,
    target: Target = "words",
    missing_labels: MissingLabels = "refuse",
    missing_clients: MissingClients = "refuse",
) -> SplitTexts:
    """Read texts from a file of JSON lines (``.jsonl``) or a table (``.csv``, ``.parquet`` ...).

    Parameters
    ----------
    file
        The file of the training texts.
    test_file
        The file of the test texts.
    text
        The field or column with the text, or with a list of texts.
    client
        The field or column with the client. By default texts belong to no client.
    label
        The field or column with the class of a text, or with a list of its labels, for the
        objectives ``text_classes`` and ``multilabel``.
    sentences
        Whether each sentence of a text is a row of its own. The default is true without ``label``.
    test_fraction
        Fraction of each client's texts, the last ones, held out as test rows. Default 0.2. Not with
        ``test_file``.

    Notes
    -----
    Words are changed to lower case, and punctuation marks are words. Words follow Unicode's rules:
    see [Texts](data.md#texts). Texts without a word are left out, and longer ones than
    ``data.words.length`` are cut; both are counted. Words need no normalization.

    Examples
    --------
    A recipe's section::

        [data]
        name = "text_file"
        file = "posts.jsonl"
        client = "author"

        [objective]
        name = "next_word"

        [partition]
        name = "natural"

        [model]
        name = "word_lstm"
    """
    place = existing(file)
    if label is not None and target not in {"class", "labels"}:
        raise DataError(
            f"data.label = {label!r}: objective next_word reads no labels; leave it out"
        )
    by_sentence = label is None if sentences is None else sentences
    form = {
        "sentences": by_sentence,
        "masked": missing_labels == "mask",
        "ownable": missing_clients == "drop",
    }
    train = read_texts(place, text, client, label, **form)
    unlabelled, ownerless, empty = train.unlabelled, train.ownerless, 0
    if test_file is not None:
        Division(test_fraction).refuse("test_file has the test rows")
        held = existing(test_file)
        test = read_texts(held, text, client, label, **form)
        unlabelled, ownerless = unlabelled + test.unlabelled, ownerless + test.ownerless
    else:
        some = train.with_words()
        empty = len(train.texts) - len(some.texts)
        train, test = some.split(test_fraction)
    notes = (*note_on_left_out(unlabelled), *note_on_left_out(ownerless, "client"))
    return SplitTexts(place.name, train, test, (*notes, *note_on_empty(empty)))


def read_further(place: Path, text: str = "text", *, sentences: bool = False) -> list[str]:
    """Return the texts in a file: one per line of a ``.txt``, otherwise one per row's field.

    With ``sentences``, texts are cut into sentences, and parts without a word are left out.
    Otherwise each text is returned unchanged.
    """
    if place.suffix.lower() != ".txt":
        read = read_texts(existing(place), text, None, None, sentences=sentences)
        return list((read.with_words() if sentences else read).texts)
    expect_text(existing(place), "a text")
    try:
        whole = place.read_text("utf-8-sig")  # \r\n and \r become \n; no other sign ends a line
    except UnicodeDecodeError as error:
        raise DataError(f"{place.name} is no text in UTF-8: {first_line(error)}") from error
    lines = whole.removesuffix("\n").split("\n") if whole else []
    if not sentences:
        return lines
    return list(Texts([s for line in lines for s in sentences_of(line)]).with_words().texts)


def read_texts(
    place: Path,
    text: str,
    client: str | None,
    label: str | None,
    *,
    sentences: bool,
    masked: bool = False,
    ownable: bool = False,
    unlabelled_too: bool = False,
) -> Texts:
    """Return the texts in a file with their clients and labels.

    With ``masked``, texts without a label are left out, and with ``ownable`` texts without a
    client. With ``unlabelled_too`` the former have no labels. Otherwise both are an error.
    """
    texts, owners, labels, unlabelled, ownerless = [], [], [], 0, 0
    for location, line in _lines(place, label):
        if ownable and client is not None and _is_blank(line.get(client)):
            ownerless += 1
            continue
        if masked and label is not None and _is_missing(line.get(label)):
            unlabelled += 1
            continue
        written = field(line, text, location)
        parts = sentences_in(written, location) if sentences else _texts_in(written, location)
        texts += parts
        if client is not None:
            owners += [_client_in(line, client, location)] * len(parts)
        if label is not None:
            lacks = unlabelled_too and _is_missing(line.get(label))
            labels += [() if lacks else _labels_in(line, label, location)] * len(parts)
    clients = None if client is None else owners
    own_labels = None if label is None else labels
    return Texts(texts, clients, own_labels, unlabelled, ownerless)


def _is_missing(written: object) -> bool:
    """Return whether a field of labels holds none."""
    absent = isinstance(written, float) and math.isnan(written)
    return absent or written is None or written in ("", [])


def _is_blank(client: object) -> bool:
    """Return whether a field of clients holds none."""
    return _is_missing(client) or (isinstance(client, str) and not client.strip())


def _labels_in(line: Mapping[str, object], label: str, location: str) -> tuple[str, ...]:
    """Return the label of a text, or the labels of a list of them."""
    if label in line and _is_missing(line[label]):
        raise DataError(
            f"{location}: the text has no label in {label!r}; with data.missing_labels = 'mask' "
            "such texts are left out"
        )
    written = field(line, label, location)
    labels = written if isinstance(written, list) else [written]
    if any(isinstance(label, list | dict) or label is None for label in labels):
        raise DataError(f"{location}: a label is a text or a number, not {written!r:.60}")
    return tuple(dict.fromkeys(str(label) for label in labels))


def sentences_in(written: object, location: str) -> list[str]:
    """Return the sentences of a text or a list of texts; raise DataError for other values."""
    return [sentence for text in _texts_in(written, location) for sentence in sentences_of(text)]


def _texts_in(written: object, location: str) -> list[str]:
    texts = written if isinstance(written, list) else [written]
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"{location}: a text, or a list of texts, is needed, not {text!r:.60}")
    return list(texts)


def _client_in(line: Mapping[str, object], client: str, location: str) -> str:
    """Return the client of a text."""
    if client in line and _is_blank(line[client]):
        raise DataError(
            f"{location}: the text has no client in {client!r}; with data.missing_clients = "
            "'drop' such texts are left out"
        )
    written = field(line, client, location)
    if isinstance(written, list | dict):
        raise DataError(f"{location}: a client is a text or a number, not {written!r:.60}")
    return str(written)


def field(line: Mapping[str, object], name: str, location: str) -> object:
    """Return a field of a line; raise DataError if the line lacks it."""
    value = line.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"{location} has no {name!r}; it has {listed(list(line))}")
    return value


def _lines(place: Path, label: str | None = None) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the location and the fields of each row of a file.

    In a table a label that is a sign of a missing value is missing.
    """
    if is_table(place):
        table = load_table(place)
        frame = table.frame
        if label is not None and label in frame.columns:
            frame = frame.assign(**{label: frame[label].where(~is_missing(table, label), None)})
        for row, line in enumerate(frame.to_dict("records")):
            yield f"{place.name}, row {row}", line
        return
    yield from json_lines(place)


def json_lines(place: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the location and the fields of each line in a file of JSON lines."""
    check_memory(_TIMES * regular(place).stat().st_size, str(place))
    expect_text(place, "a file of JSON lines")
    with place.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            location = f"{place.name}, line {number}"
            if not raw.strip():
                continue
            try:
                line: object = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{location} is no JSON: {first_line(error)}") from error
            if not isinstance(line, dict):
                raise DataError(f"{location} is no table of fields")
            yield location, line
