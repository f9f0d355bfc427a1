"""Posts of small Stack Exchange sites, and the plays of Shakespeare by role."""

from __future__ import annotations

from pathlib import Path  # needed at run time: fedgist.data.sources.loading reads the annotations
from typing import Literal

from fedgist.data.dataset import Dataset
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.text_file import field, json_lines, sentences_in
from fedgist.data.sources.text_rows import Reading, Texts, text_dataset
from fedgist.data.vocabulary import Tokenizer, Vocabulary

Kinds = Literal["both", "questions", "answers"]
STACKEXCHANGE, SHAKESPEARE = "stackexchange", "shakespeare"
POSTS, ROLES = "stackexchange_posts.jsonl", "shakespeare_by_role.jsonl"
WHERE = "put a file with a table in JSON in each line into ROOT/"


def is_wanted(kind: str, kinds: Kinds) -> bool:
    """Return whether posts of a kind, ``question`` or ``answer``, are among those that are read."""
    return kinds in {"both", f"{kind}s"}


def stackexchange(
    *,
    kinds: Kinds = "both",
    by_kind: bool = False,
    test_fraction: float = 0.2,
    length: int = 20,
    tokenizer: Tokenizer = "words",
    vocabulary_size: int = 10_000,
    vocabulary_file: str | None = None,
    vocabulary: Vocabulary | None = None,
    root: Path | None = None,
) -> Dataset:
    """Read the posts of small Stack Exchange sites: what comes next in a sentence.

    Parameters
    ----------
    kinds
        Which posts are read: ``questions``, ``answers``, or ``both``.
    by_kind
        Whether a user's questions and answers are two clients, ``SITE/USER/question`` and
        ``SITE/USER/answer``, and not one, ``SITE/USER``.
    test_fraction
        The share of each client's sentences, the last ones, that is held out.
    length
        How many places of each text there are: what is longer is cut.
    tokenizer
        Whole words (``"words"``), or pieces of words (``"wordpiece"``).
    vocabulary_size
        How many words or pieces are known: the most frequent in the training texts.
    vocabulary_file
        A file of those that are known, one in each line, in their place.

    Notes
    -----
    ``stackexchange_posts.jsonl`` has a post in each line, with ``source`` (the site), ``user``,
    ``kind`` and ``text``. Rows are sentences; titles of questions are not among them, nor posts
    whose user is not known (``null``). It stands
    in for ``stackoverflow``, which is large. Words need no normalization.

    Examples
    --------
    A recipe's section::

        [data]
        name = "stackexchange"

        [objective]
        name = "next_word"

        [partition]
        name = "natural"

        [model]
        name = "word_lstm"
    """
    base = data_root(root)
    if not (file := base / POSTS).is_file():
        raise absent(STACKEXCHANGE, POSTS, base, WHERE + POSTS)
    found, owners = [], []
    for where, line in json_lines(file):
        kind, user = field(line, "kind", where), line.get("user")
        if user is None or not is_wanted(str(kind), kinds):
            continue
        parts = sentences_in(field(line, "text", where), where)
        owner = f"{field(line, 'source', where)}/{user}"
        found += parts
        owners += [f"{owner}/{kind}" if by_kind else owner] * len(parts)
    train, test = Texts(found, owners).with_words().split(test_fraction)
    reading = Reading(length, tokenizer, vocabulary_size, vocabulary_file, vocabulary)
    return text_dataset(STACKEXCHANGE, train, test, reading)


def shakespeare(
    *,
    test_fraction: float = 0.2,
    length: int = 20,
    tokenizer: Tokenizer = "words",
    vocabulary_size: int = 10_000,
    vocabulary_file: str | None = None,
    vocabulary: Vocabulary | None = None,
    root: Path | None = None,
) -> Dataset:
    """Read Shakespeare's plays, each role a client: what comes next in a sentence.

    Parameters
    ----------
    test_fraction
        The share of each role's sentences, the last ones, that is held out.
    length
        How many places of each text there are: what is longer is cut.
    tokenizer
        Whole words (``"words"``), or pieces of words (``"wordpiece"``).
    vocabulary_size
        How many words or pieces are known: the most frequent in the training texts.
    vocabulary_file
        A file of those that are known, one in each line, in their place.

    Notes
    -----
    ``shakespeare_by_role.jsonl`` has a role in each line, with ``play``, ``role`` and ``speeches``,
    a list. Clients are ``PLAY/ROLE``: the first lord of two plays are two. Words need
    no normalization.

    Examples
    --------
    A recipe's section::

        [data]
        name = "shakespeare"

        [objective]
        name = "next_word"

        [partition]
        name = "natural"

        [model]
        name = "word_lstm"
    """
    base = data_root(root)
    if not (file := base / ROLES).is_file():
        raise absent(SHAKESPEARE, ROLES, base, WHERE + ROLES)
    found, owners = [], []
    for where, line in json_lines(file):
        parts = sentences_in(field(line, "speeches", where), where)
        found += parts
        owners += [f"{field(line, 'play', where)}/{field(line, 'role', where)}"] * len(parts)
    train, test = Texts(found, owners).with_words().split(test_fraction)
    reading = Reading(length, tokenizer, vocabulary_size, vocabulary_file, vocabulary)
    return text_dataset(SHAKESPEARE, train, test, reading)
