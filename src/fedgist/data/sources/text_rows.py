"""Texts with their clients and labels, and the data sets made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgist.core.batch import NO_WORD
from fedgist.core.objectives.next_word import BEGIN, END, PADDING
from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.division import Division
from fedgist.data.sources.file_sizes import check_memory
from fedgist.data.sources.locations import existing
from fedgist.data.sources.splits import codes, in_order, last_of_each
from fedgist.data.sources.text_labels import label_names, label_numbers
from fedgist.data.vocabulary import (
    PRETRAINED,
    Rule,
    Tokenizer,
    Vocabulary,
    pretrained_vocabulary,
    read_vocabulary,
    vocabulary_of,
    words_of,
)
from fedgist.errors import DataError

_NEXT_WORDS = 20  # tokens of a text to predict the next words of, if a recipe says nothing
_MOST_TEXTS = 0.95  # share of labelled texts that are not cut, if a recipe says nothing
_BYTES = 8  # bytes per position: a word and a label


@dataclass(frozen=True)
class Reading:
    """Settings for turning texts into numbers: the length, the rule for words, the vocabulary.

    Without a ``length`` it is 20 for next words, and for labels that of 95 % of the training texts.
    ``known`` is an existing vocabulary, and ``file`` is one with a word per line. Without them the
    vocabulary has the ``size`` most frequent words of the training texts.
    """

    length: int | None = None
    rule: Rule = 2
    tokenizer: Tokenizer = "words"
    size: int = 10_000
    file: str | None = None
    known: Vocabulary | None = None

    def measured(self, target: Target) -> frozenset[str]:
        """Parts computed from the training texts: vocabulary and length, unless they are given."""
        is_stated = self.known is not None or self.file is not None or self._is_pretrained
        by_texts = self.length is None and target != "words"
        return frozenset(
            {*(() if is_stated else ("vocabulary",)), *(("length of texts",) if by_texts else ())}
        )

    @property
    def _is_pretrained(self) -> bool:
        return self.tokenizer.startswith(PRETRAINED)

    def check(self) -> None:
        """Raise DataError if the length is below 1, or there are two vocabularies."""
        if self._is_pretrained and self.file is not None:
            raise DataError("data.words.file: the tokenizer of an encoder has its own words")
        if self.length is not None and self.length < 1:
            raise DataError(f"data.words.length must be at least 1, not {self.length}")

    def vocabulary(self, texts: Sequence[str]) -> Vocabulary:
        """Return the vocabulary: the given one, or that of the training texts."""
        if self.known is not None:
            return self.known
        if self._is_pretrained:
            return pretrained_vocabulary(self.tokenizer)
        if self.file is not None:
            return read_vocabulary(existing(self.file), self.tokenizer, self.rule)
        return vocabulary_of(texts, self.size, self.tokenizer, self.rule)

    def places(self, texts: Sequence[Sequence[int]], target: Target) -> int:
        """Return the length of all rows in tokens, from encoded training texts."""
        if self.length is not None:
            return self.length
        if target == "words":
            return _NEXT_WORDS
        lengths = [1 + len(words) for words in texts]  # with the begin token
        return int(np.quantile(lengths, _MOST_TEXTS, method="higher"))


@dataclass(frozen=True)
class Texts:
    """Texts in order, and the client and the labels of each text if known."""

    texts: Sequence[str]
    clients: Sequence[str] | None = None
    labels: Sequence[Sequence[str]] | None = None
    unlabelled: int = 0  # rows of the file without a label, which are not among these
    ownerless: int = 0  # rows of the file without a client, which are not among these

    def with_words(self) -> Texts:
        """Return the texts with at least one word."""
        return self.only([i for i, text in enumerate(self.texts) if words_of(text)])

    def only(self, rows: Sequence[int]) -> Texts:
        """Return the texts of these numbers."""
        clients = None if self.clients is None else [self.clients[i] for i in rows]
        labels = None if self.labels is None else [self.labels[i] for i in rows]
        return Texts([self.texts[i] for i in rows], clients, labels)

    def split(self, fraction: float | None) -> tuple[Texts, Texts]:
        """Split off the last share of each client's texts, or of all texts without clients."""
        groups = self.clients or ("",) * len(self.texts)
        held = last_of_each(np.array(groups, dtype=object), Division(fraction).share).tolist()
        return self._where(held, wanted=False), self._where(held, wanted=True)

    def _where(self, held: Sequence[bool], *, wanted: bool) -> Texts:
        return self.only([i for i, is_held in enumerate(held) if is_held == wanted])


@dataclass(frozen=True)
class SplitTexts:
    """Training texts and test texts, as a source of texts returns them."""

    name: str
    train: Texts
    test: Texts
    notes: tuple[str, ...] = ()


def text_dataset(source: SplitTexts, reading: Reading, target: Target = "words") -> Dataset:
    """Make a data set whose inputs are words, and whose labels are the next words or the texts'.

    Inputs start with a begin token. Next words end with an end token unless cut at ``length``.
    """
    reading.check()
    name, train, test = source.name, source.train.with_words(), source.test.with_words()
    if not train.texts:
        raise DataError(f"{name} has no texts with a word in them")
    vocabulary = reading.vocabulary(train.texts)
    numbered = _encoded(name, train.texts, vocabulary), vocabulary.encode(test.texts)
    length = reading.places(numbered[0], target)
    places = (len(train.texts) + len(test.texts)) * length
    check_memory(_BYTES * places, name, "take a smaller data.words.length")
    (x, y), (x_test, y_test) = (_numbers(texts, length) for texts in numbered)
    empty = len(source.train.texts) + len(source.test.texts) - len(x) - len(x_test)
    notes = (*source.notes, *note_on_empty(empty), *_note_on_cut(numbered, length, target))
    names = vocabulary.words
    if target != "words":
        names = label_names(name, target, train.labels)
        y, y_test = (label_numbers(name, target, part.labels, names) for part in (train, test))
    clients = _all_clients(train, test)
    return Dataset(
        name,
        *(x, y, x_test, y_test, len(names)),
        classes=names,
        clients=None if train.clients is None else _codes(train.clients, clients),
        clients_test=None if test.clients is None else _codes(test.clients, clients),
        client_names=clients,
        vocabulary=vocabulary,
        target=target,
        notes=notes,
        measured=reading.measured(target),
    )


def note_on_empty(count: int) -> tuple[str, ...]:
    """Return a note for the user on texts that were left out because they have no words."""
    return (f"texts that are left out because they have no words: {count}",) if count else ()


def _note_on_cut(
    parts: Sequence[Sequence[Sequence[int]]], length: int, target: Target
) -> tuple[str, ...]:
    """Return a note for the user on texts that are longer than a row."""
    places = length if target == "words" else length - 1  # the first holds the begin token
    texts = [words for part in parts for words in part]
    cut = sum(len(words) > places for words in texts)
    note = f"texts longer than data.words.length = {length} that are cut: {cut} of {len(texts)}"
    return (note,) if cut else ()


def _encoded(name: str, texts: Sequence[str], vocabulary: Vocabulary) -> Sequence[Sequence[int]]:
    """Return the words of training texts by number; raise DataError if none is known."""
    encoded = vocabulary.encode(texts)
    if not any(vocabulary.is_word(number) for text in encoded for number in text):
        raise DataError(
            f"{name} has no word that the vocabulary knows, such as {vocabulary.words[-1]!r:.40}"
        )
    return encoded


def further_texts(texts: Sequence[str], data: Dataset) -> tuple[Tensor, Tensor]:
    """Return new texts in the form of ``data.x`` and ``data.y``, int32 (texts, length) each."""
    assert data.vocabulary is not None  # the caller's: they are texts
    encoded = data.vocabulary.encode(texts)
    if not encoded or not all(encoded):
        which = f"text {encoded.index([])} (counted from 0) has no words" if encoded else "no texts"
        raise DataError(f"{which}: a text to go on with needs a word")
    return _numbers(encoded, data.input_shape[0])


def encoded_texts(texts: Sequence[str], data: Dataset) -> Tensor:
    """Return new texts in the form of ``data.x``, int32 (texts, length)."""
    return further_texts(texts, data)[0]


def prompts(texts: Sequence[str], data: Dataset) -> Tensor:
    """Return prompts to continue, int32 (texts, length); long prompts keep their last words."""
    places = data.input_shape[0]
    assert data.vocabulary is not None  # the caller's: they are texts
    further_texts(texts, data)
    x = np.full((len(texts), places), PADDING, dtype=np.int32)
    for row, words in enumerate(data.vocabulary.encode(texts)):
        last = [BEGIN, *words][-places:]
        x[row, : len(last)] = last
    return torch.from_numpy(x)


def _all_clients(train: Texts, test: Texts) -> tuple[str, ...]:
    """Return the clients with training texts, then the clients with only test texts."""
    train_clients = in_order(train.clients or ())
    return train_clients + in_order(set(test.clients or ()) - set(train_clients))


def _codes(clients: Sequence[str], names: tuple[str, ...]) -> Tensor:
    return codes(np.array(clients, dtype=object), names)


def _numbers(texts: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, int32 (texts, length) each."""
    x = np.full((len(texts), length), PADDING, dtype=np.int32)
    y = np.full((len(texts), length), NO_WORD, dtype=np.int32)
    for row, words in enumerate(texts):
        before, after = [BEGIN, *words][:length], [*words, END][:length]
        x[row, : len(before)], y[row, : len(after)] = before, after
    return torch.from_numpy(x), torch.from_numpy(y)
