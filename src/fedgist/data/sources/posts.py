"""Data sources for posts of small Stack Exchange sites, and Shakespeare's plays by role."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path  # needed at run time: fedgist.data.sources.loading reads the annotations
from typing import Annotated, Literal

from pydantic import Field

from fedgist.core.objectives.target import Target
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.text_file import field, json_lines, sentences_in
from fedgist.data.sources.text_rows import SplitTexts, Texts

Kinds = Literal["both", "questions", "answers"]
TAG = re.compile(r"<([^<>]+)>")  # in a list of tags
ADVICE = "put a file with a table in JSON in each line into ROOT/"


def is_wanted(kind: str, kinds: Kinds) -> bool:
    """Return whether posts of a kind, ``question`` or ``answer``, are among the kinds to read."""
    return kinds in {"both", f"{kind}s"}


def stackexchange(
    *,
    kinds: Kinds = "both",
    by_kind: bool = False,
    label: Literal["site", "tags"] | None = None,
    most_labels: Annotated[int, Field(ge=2)] = 20,
    client: Literal["user", "site"] = "user",
    test_fraction: float = 0.2,
    root: Path | None = None,
    target: Target = "words",
) -> SplitTexts:
    """Read posts of small Stack Exchange sites: for the next word, the site or the tags.

    Parameters
    ----------
    kinds
        Which posts are read: ``questions``, ``answers``, or ``both``. Only questions have tags.
    by_kind
        Whether a user's questions and answers are two clients, ``SITE/USER/question`` and
        ``SITE/USER/answer``, and not one, ``SITE/USER``.
    label
        The labels of posts, for the objectives ``text_classes`` and ``multilabel``: their site, or
        their tags. The class of a post is its most frequent tag. The default is the site for
        ``text_classes``, and the tags for ``multilabel``.
    most_labels
        Number of the most frequent tags that are labels. Posts without any of them are left out.
    client
        Who is a client: each ``user`` of a site, or each ``site``.
    test_fraction
        Fraction of each client's rows, the last ones, held out as test rows.

    Notes
    -----
    ``stackexchange_posts.jsonl`` has one post per line, with ``source`` (the site), ``user``,
    ``kind``, ``title``, ``tags`` and ``text``. Rows are sentences for the objective ``next_word``,
    without titles; for the others they are whole posts with their titles.
    Posts of unknown users (``null``) are left out. Use it in place of ``stackoverflow``, which is
    large. Words need no normalization.

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
    labels = label or ("tags" if target == "labels" else "site")

    def post(line: Mapping[str, object], location: str) -> Post | None:
        kind, user = field(line, "kind", location), line.get("user")
        if user is None or not is_wanted(str(kind), kinds):
            return None
        site = str(field(line, "source", location))
        owner = site if client == "site" else f"{site}/{user}"
        owner = f"{owner}/{kind}" if by_kind else owner
        text = field(line, "text", location)
        if target not in {"class", "labels"}:
            return Post(owner, sentences_in(text, location))
        tags = TAG.findall(str(line.get("tags") or "")) if labels == "tags" else [site]
        whole = [f"{line.get('title') or ''}\n{text}".strip()]
        return Post(owner, whole, tuple(dict.fromkeys(tags)))

    posts = _posts("stackexchange", "stackexchange_posts.jsonl", root, post)
    if target in {"class", "labels"}:
        most = most_labels if labels == "tags" else None
        posts = _with_frequent_labels(posts, most, single=target == "class")
    return _split("stackexchange", posts, test_fraction, labelled=target in {"class", "labels"})


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

    def role(line: Mapping[str, object], location: str) -> Post:
        client = f"{field(line, 'play', location)}/{field(line, 'role', location)}"
        return Post(client, sentences_in(field(line, "speeches", location), location))

    posts = _posts("shakespeare", "shakespeare_by_role.jsonl", root, role)
    return _split("shakespeare", posts, test_fraction, labelled=False)


@dataclass(frozen=True)
class Post:
    """Texts of one client with the same labels."""

    client: str
    texts: Sequence[str]
    labels: tuple[str, ...] = ()


def _posts(
    name: str,
    file: str,
    root: Path | None,
    of_line: Callable[[Mapping[str, object], str], Post | None],
) -> list[Post]:
    """Return the posts in a file of JSON lines; ``of_line`` gives a post, or None."""
    base = data_root(root)
    if not (place := base / file).is_file():
        raise absent(name, file, base, ADVICE + file)
    read = (of_line(line, location) for location, line in json_lines(place))
    return [post for post in read if post is not None]


def _with_frequent_labels(posts: Sequence[Post], most: int | None, *, single: bool) -> list[Post]:
    """Return the posts that have some of the most frequent labels, with these labels only.

    ``most`` is the number of labels that are kept, or None for all. With ``single``, a post keeps
    its most frequent label. Ties are in alphabetical order.
    """
    counts = Counter(label for post in posts for label in post.labels)
    ranked = sorted(counts, key=lambda label: (-counts[label], label))[:most]
    kept = []
    for post in posts:
        own = tuple(label for label in ranked if label in post.labels)
        if own:
            kept.append(replace(post, labels=own[:1] if single else own))
    return kept


def _split(name: str, posts: Sequence[Post], test_fraction: float, *, labelled: bool) -> SplitTexts:
    """Return the training and the test texts of posts: the last ones of each client."""
    texts = [text for post in posts for text in post.texts]
    owners = [post.client for post in posts for _ in post.texts]
    labels = [post.labels for post in posts for _ in post.texts] if labelled else None
    return SplitTexts(name, *Texts(texts, owners, labels).with_words().split(test_fraction))
