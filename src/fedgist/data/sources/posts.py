"""Data sources for posts of small Stack Exchange sites, and Shakespeare's plays by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path  # needed at run time: fedgist.data.sources.loading reads the annotations
from typing import Literal

from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.text_file import field, json_lines, sentences_in
from fedgist.data.sources.text_rows import SplitTexts, Texts

Kinds = Literal["both", "questions", "answers"]
ADVICE = "put a file with a table in JSON in each line into ROOT/"


def is_wanted(kind: str, kinds: Kinds) -> bool:
    """Return whether posts of a kind, ``question`` or ``answer``, are among the kinds to read."""
    return kinds in {"both", f"{kind}s"}


def stackexchange(
    *,
    kinds: Kinds = "both",
    by_kind: bool = False,
    test_fraction: float = 0.2,
    root: Path | None = None,
) -> SplitTexts:
    """Read posts of small Stack Exchange sites: sentences, to predict the next word.

    Parameters
    ----------
    kinds
        Which posts are read: ``questions``, ``answers``, or ``both``.
    by_kind
        Whether a user's questions and answers are two clients, ``SITE/USER/question`` and
        ``SITE/USER/answer``, and not one, ``SITE/USER``.
    test_fraction
        Fraction of each client's sentences, the last ones, held out as test rows.

    Notes
    -----
    ``stackexchange_posts.jsonl`` has one post per line, with ``source`` (the site), ``user``,
    ``kind`` and ``text``. Rows are sentences. Titles of questions and posts of unknown users
    (``null``) are left out. Use it in place of ``stackoverflow``, which is large. Words need no
    normalization.

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

    def post(line: Mapping[str, object], location: str) -> tuple[str, list[str]] | None:
        kind, user = field(line, "kind", location), line.get("user")
        if user is None or not is_wanted(str(kind), kinds):
            return None
        owner = f"{field(line, 'source', location)}/{user}"
        return (
            f"{owner}/{kind}" if by_kind else owner,
            sentences_in(field(line, "text", location), location),
        )

    return _read("stackexchange", "stackexchange_posts.jsonl", root, test_fraction, post)


def shakespeare(*, test_fraction: float = 0.2, root: Path | None = None) -> SplitTexts:
    """Read Shakespeare's plays, to predict the next word. Each role is a client.

    Parameters
    ----------
    test_fraction
        Fraction of each role's sentences, the last ones, held out as test rows.

    Notes
    -----
    ``shakespeare_by_role.jsonl`` has one role per line, with ``play``, ``role`` and ``speeches``, a
    list. Each role of a play is a client, ``PLAY/ROLE``. Words need no normalization.

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

    def role(line: Mapping[str, object], location: str) -> tuple[str, list[str]]:
        client = f"{field(line, 'play', location)}/{field(line, 'role', location)}"
        return client, sentences_in(field(line, "speeches", location), location)

    return _read("shakespeare", "shakespeare_by_role.jsonl", root, test_fraction, role)


def _read(
    name: str,
    file: str,
    root: Path | None,
    test_fraction: float,
    of_line: Callable[[Mapping[str, object], str], tuple[str, list[str]] | None],
) -> SplitTexts:
    """Return the texts in a file of JSON lines; ``of_line`` gives client and texts, or None."""
    base = data_root(root)
    if not (place := base / file).is_file():
        raise absent(name, file, base, ADVICE + file)
    texts, owners = [], []
    for location, line in json_lines(place):
        if (owned_texts := of_line(line, location)) is not None:
            client, parts = owned_texts
            texts += parts
            owners += [client] * len(parts)
    return SplitTexts(name, *Texts(texts, owners).with_words().split(test_fraction))
