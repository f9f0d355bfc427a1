"""Vocabularies that map texts to numbers: whole words or word pieces."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import regex

from fedgist.core.objectives.next_word import SPECIAL, UNKNOWN
from fedgist.data.sources.optional_packages import need
from fedgist.errors import DataError

if TYPE_CHECKING:  # extras
    import tokenizers
    import transformers

#: ``words``, ``wordpiece``, or that of a pretrained encoder, ``transformers:FOLDER``.
Tokenizer = str
PRETRAINED = "transformers:"

NEED_TRANSFORMERS = (
    "tokenizer = 'transformers:...' needs transformers: pip install 'fedgist[encoders]'"
)
NEED_TOKENIZERS = "tokenizer = 'wordpiece' needs tokenizers: pip install 'fedgist[text]'"
Rule = Literal[1, 2]  # the rule that splits texts into words
_WORD_1 = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
# letters that stand without spaces: each is a word, as in Unicode's default rule
_APART = (
    r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}"
    r"\p{Script=Myanmar}"
)
_LETTERS = rf"[[\w\p{{N}}\p{{M}}\u200c\u200d]--[{_APART}]]+"  # with marks and joiners
_WORD_2 = regex.compile(rf"{_LETTERS}(?:['\u2019]{_LETTERS})*|(?![\s\x1c-\x1f])\X", regex.V1)
_EMOJI = regex.compile(r"\p{Emoji_Presentation}|\p{Emoji}\ufe0f")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def words_of(text: str, rule: Rule = 2) -> list[str]:
    """Return the words and the punctuation marks of a text, in lower case.

    Rule 2 puts the text into Unicode's form NFC and keeps letters, their marks and emoji whole. It
    follows Unicode's default word boundaries (Unicode Standard Annex 29), except that a point or
    comma always ends a word. Of Chinese, Hiragana, Thai, Lao, Khmer and Burmese, which have no
    spaces, each letter is a word. Rule 1 is that of earlier versions, which cut words at marks.

    >>> words_of("Don't panic: it works!")
    ["don't", 'panic', ':', 'it', 'works', '!']
    >>> words_of("यह बहुत अच्छा है")
    ['यह', 'बहुत', 'अच्छा', 'है']
    """
    if rule == 1 or text.isascii():  # the rules agree on ASCII, and the first is faster
        return _WORD_1.findall(text.lower())
    words: list[str] = _WORD_2.findall(unicodedata.normalize("NFC", text).lower())
    return words


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, split after ``.``, ``!`` or ``?`` and white space.

    >>> sentences_of("It works. Does it? Yes")
    ['It works.', 'Does it?', 'Yes']
    """
    return [sentence for sentence in _SENTENCE.split(text.strip()) if sentence]


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary: words by number, after four special tokens (``core.next_word``).

    ``words`` are whole words, or WordPiece tokens: the first piece of a word is written as it is,
    the others with a leading ``##``. ``rule`` splits texts into words.
    """

    words: tuple[str, ...]
    tokenizer: Tokenizer = "words"
    rule: Rule = 2

    def is_word(self, number: int) -> bool:
        """Return whether a number stands for a word, a word piece or an emoji, and not a mark."""
        word = self.words[number]
        means = any(letter.isalnum() for letter in word) or _EMOJI.search(word) is not None
        return number >= len(SPECIAL) and means

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the word numbers of each text; a text without words has none."""
        if self.tokenizer.startswith(PRETRAINED):
            own, few = pretrained_tokenizer(self.tokenizer), list(texts)
            numbers: list[list[int]] = own(few, verbose=False)["input_ids"] if few else []
            return [[len(SPECIAL) + number for number in text] for text in numbers]
        if self.tokenizer == "wordpiece":
            made = _word_piece({word: number for number, word in enumerate(self.words)})
            split = [words_of(text, self.rule) for text in texts]
            encodings = made.encode_batch(split, is_pretokenized=True, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        number = {word: i for i, word in enumerate(self.words) if i >= len(SPECIAL)}
        return [[number.get(word, UNKNOWN) for word in words_of(text, self.rule)] for text in texts]


def vocabulary_of(
    texts: Sequence[str], size: int, tokenizer: Tokenizer, rule: Rule = 2
) -> Vocabulary:
    """Return a vocabulary of ``size`` words or word pieces, plus the four special tokens.

    It holds the most frequent words, with ties in alphabetical order, or the pieces that WordPiece
    training finds in the texts.
    """
    if size < 1:
        raise DataError(f"data.words.size must be at least 1, not {size}")
    counts = Counter(word for text in texts for word in words_of(text, rule))
    if tokenizer == "words":
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return Vocabulary((*SPECIAL, *ranked[:size]), rule=rule)
    trainers = need("tokenizers.trainers", NEED_TOKENIZERS)
    # numbered in advance: otherwise their numbers and the order of merges change from run to run
    inner = sorted({f"##{letter}" for word in counts for letter in word[1:]})
    if (least := len(inner) + len({word[0] for word in counts})) > size:
        raise DataError(
            f"data.words.size = {size}: the letters of these texts alone are {least} pieces"
        )
    made = _word_piece({})
    made.train_from_iterator(
        ([word] * counts[word] for word in sorted(counts)),
        trainers.WordPieceTrainer(
            vocab_size=size + len(SPECIAL), special_tokens=[*SPECIAL, *inner], show_progress=False
        ),
    )
    numbers = made.get_vocab()
    return Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__)), tokenizer, rule)


@functools.lru_cache(maxsize=2)
def pretrained_tokenizer(name: str) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer of an encoder, ``transformers:FOLDER``.

    Raises
    ------
    DataError
        If there is none, or it has code of its own.
    """
    library = need("transformers", NEED_TRANSFORMERS)
    place = name.removeprefix(PRETRAINED)
    local = Path(place).expanduser()
    try:
        made: transformers.PreTrainedTokenizerBase = library.AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else place, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, TypeError) as error:
        first = " ".join(str(error).split())
        raise DataError(f"data.words.tokenizer = {name!r} cannot be read: {first:.300}") from error
    return made


def pretrained_vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary of an encoder's tokenizer, in the order of its own numbers."""
    numbers: dict[str, int] = pretrained_tokenizer(name).get_vocab()
    words = sorted(numbers, key=numbers.__getitem__)
    return Vocabulary((*SPECIAL, *words), name)


def read_vocabulary(path: Path, tokenizer: Tokenizer, rule: Rule = 2) -> Vocabulary:
    """Return the vocabulary in a file with one word or piece per line, most frequent first.

    Rule 1 left marks without their letters: such words say that the file was made by it.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        words = [word for line in lines if (word := line.strip())]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.words.file: {path} cannot be read as a list of words: {error}"
        ) from error
    if twice := [word for word, count in Counter([*SPECIAL, *words]).items() if count > 1]:
        raise DataError(f"data.words.file: {path} names {twice[0]!r:.80} twice")
    if not words:
        raise DataError(f"data.words.file: {path} names no words")
    if any(all(unicodedata.category(letter)[0] == "M" for letter in word) for word in words):
        rule = 1
    if tokenizer == "words" and (lost := _odd_words(words, rule)):
        raise DataError(
            f"data.words.file: {path} names {lost[0]!r:.80}, which no text has: words are in "
            "lower case, and marks are words of their own"
        )
    return Vocabulary((*SPECIAL, *words), tokenizer, rule)


def _odd_words(words: Sequence[str], rule: Rule) -> list[str]:
    """Return the words that no text has under a rule."""
    return [word for word in words if words_of(word, rule) != [word]]


def _word_piece(numbers: dict[str, int]) -> tokenizers.Tokenizer:
    package = need("tokenizers", NEED_TOKENIZERS)
    model = package.models.WordPiece(numbers, unk_token=SPECIAL[UNKNOWN])
    made: tokenizers.Tokenizer = package.Tokenizer(model)
    return made
