"""TensorFlow Federated's Stack Overflow: questions and answers of its users."""

from __future__ import annotations

from pathlib import Path  # needed at run time: fedgist.data.sources.loading reads the annotations

from fedgist.core import random
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.posts import Kinds, is_wanted
from fedgist.data.sources.text_rows import SplitTexts, Texts
from fedgist.data.sources.tff_file import examples_of, users_of
from fedgist.errors import DataError

NAME, FILE = "stackoverflow", "stackoverflow.sqlite"
ADVICE = f"put {FILE} of TensorFlow Federated into ROOT"


def stackoverflow(
    *,
    users: int = 1000,
    kinds: Kinds = "both",
    by_kind: bool = False,
    root: Path | None = None,
    seed: int = 0,
) -> SplitTexts:
    """Read TensorFlow Federated's Stack Overflow: sentences, to predict the next word.

    Parameters
    ----------
    users
        Number of users to read, of 342,477. They are drawn from the run's seed.
    kinds
        Which posts are read: ``questions``, ``answers``, or ``both``.
    by_kind
        Whether a user's questions and answers are two clients, ``USER/question`` and
        ``USER/answer``, and not one, ``USER``.

    Notes
    -----
    The file is the unpacked file of ``tff.simulation.datasets.stackoverflow``. Rows are sentences.
    Training rows are from the split ``train``. Test rows are later sentences of the same users,
    from ``test``. (``text_file`` reads an export as CSV or JSONL.) Words need no normalization.

    Examples
    --------
    A recipe's section::

        [data]
        name = "stackoverflow"
        users = 5000

        [data.words]
        tokenizer = "wordpiece"
        size = 4000

        [objective]
        name = "next_word"

        [partition]
        name = "natural"

        [model]
        name = "word_lstm"
    """
    base = data_root(root)
    if not (file := base / FILE).is_file():
        raise absent(NAME, FILE, base, ADVICE)
    every = users_of(file, "train")
    if not 1 <= users <= len(every):
        raise DataError(f"data.users = {users}: {file} has {len(every)}")
    drawn = random.choice(random.key(seed, "users"), len(every), users)
    chosen = [every[i] for i in drawn]
    train, test = (
        _texts(file, split, chosen, kinds, by_kind=by_kind) for split in ("train", "test")
    )
    return SplitTexts(NAME, train, test)


def _texts(file: Path, split: str, users: list[str], kinds: Kinds, *, by_kind: bool) -> Texts:
    texts, owners = [], []
    for user, example in examples_of(file, split, users):
        kind = example.get("type", "")
        if is_wanted(kind, kinds):
            texts.append(example.get("tokens", ""))
            owners.append(f"{user}/{kind}" if by_kind else user)
    return Texts(texts, owners)
