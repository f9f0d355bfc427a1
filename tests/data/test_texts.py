"""Texts: words, vocabularies, and the sources that read them, on miniatures of their files."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import call
from fedgist.core.batch import NO_WORD
from fedgist.core.objectives.next_word import BEGIN, END, PADDING, SPECIAL, UNKNOWN
from fedgist.data.dataset import Dataset, check
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.text_rows import Reading, SplitTexts, Texts, text_dataset
from fedgist.data.vocabulary import Vocabulary, sentences_of, vocabulary_of, words_of
from fedgist.errors import DataError, InputError

POSTS = [
    ("a", "1", "question", "What is it? It is late."),
    ("a", "1", "answer", "It is late."),
    ("a", "2", "answer", "Late it is! Is it late? It is late late late."),
    ("b", "1", "question", "!? ..."),
    ("b", None, "answer", "Nobody wrote it."),
]


def lines(path: Path, tables: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(table) + "\n" for table in tables))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    keys = ("source", "user", "kind", "text")
    lines(tmp_path / "stackexchange_posts.jsonl", [dict(zip(keys, p, strict=True)) for p in POSTS])
    roles = [
        {"play": "ham", "role": "First Lord", "speeches": ["It is late. Away!", "So late."]},
        {"play": "cym", "role": "First Lord", "speeches": ["Is it late?"]},
    ]
    lines(tmp_path / "shakespeare_by_role.jsonl", roles)
    return tmp_path


def text_of(data: Dataset, row: int) -> tuple[list[str], list[str]]:
    """Return a row's words and labels, without padding."""
    x, y = data.x[row].tolist(), data.y[row].tolist()
    places = sum(label != NO_WORD for label in y)
    assert all(word == PADDING for word in x[places:])
    assert all(label == NO_WORD for label in y[places:])
    return [data.classes[i] for i in x[:places]], [data.classes[i] for i in y[:places]]


def test_words_and_sentences() -> None:
    assert words_of("Don\u2019t PANIC (yet): 3.5 naïve_words?") == [
        "don\u2019t",
        "panic",
        "(",
        "yet",
        ")",
        ":",
        "3",
        ".",
        "5",
        "naïve_words",
        "?",
    ]
    assert sentences_of(" One. Two!  Three? four.five ") == ["One.", "Two!", "Three?", "four.five"]
    assert sentences_of("  ") == []
    assert words_of(" \n") == []


def test_the_most_frequent_words_are_known() -> None:
    vocabulary = vocabulary_of(["b a b", "c a b d"], 3, "words")
    assert vocabulary.words == (*SPECIAL, "b", "a", "c")  # of c and d the first
    assert vocabulary.encode(["D c, B", ""]) == [[UNKNOWN, 6, UNKNOWN, 4], []]
    # words that look like the numbers' names are none of them
    assert vocabulary.encode(["<pad>"]) == [[UNKNOWN, UNKNOWN, UNKNOWN]]


def test_each_place_sees_what_came_before(root: Path) -> None:
    data = load_data("stackexchange", root=root, words=Reading(5), test_fraction=0.0)
    assert data.text
    assert data.client_names == ("a/1", "a/2", "b/1")
    assert data.clients is not None
    assert data.clients.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert text_of(data, 0) == (
        ["<begin>", "what", "is", "it", "?"],
        ["what", "is", "it", "?", "<end>"],
    )
    before, after = text_of(data, 5)  # longer than 5 places: cut, without its end
    assert (before, after) == (
        ["<begin>", "it", "is", "late", "late"],
        ["it", "is", "late", "late", "late"],
    )
    assert int(data.x[0, 0]) == BEGIN
    assert int(data.y[0, 4]) == END


def test_questions_and_answers_may_be_two_clients(root: Path) -> None:
    data = load_data("stackexchange", root=root, by_kind=True, test_fraction=0.0)
    assert data.client_names == ("a/1/answer", "a/1/question", "a/2/answer", "b/1/question")
    questions = load_data("stackexchange", root=root, kinds="questions", test_fraction=0.0)
    assert questions.client_names == ("a/1", "b/1")


def test_the_last_texts_of_each_client_are_held_out(root: Path) -> None:
    data = load_data("stackexchange", root=root, test_fraction=0.4)
    assert (len(data.y), len(data.y_test)) == (5, 3)
    assert data.clients_test is not None
    assert data.clients_test.tolist() == [0, 1, 2]


def test_roles_of_one_name_are_of_their_plays(root: Path) -> None:
    data = load_data("shakespeare", root=root, test_fraction=0.0)
    assert data.client_names == ("cym/First Lord", "ham/First Lord")
    assert len(data.y) == 4


def test_another_source_is_read_by_the_first_ones_vocabulary(root: Path) -> None:
    data = load_data("stackexchange", root=root, words=Reading(size=4))
    other = load_data("shakespeare", root=root, words=Reading(known=data.vocabulary))
    assert other.classes == data.classes
    assert bool((other.y == UNKNOWN).any())


def test_files_of_ones_own(tmp_path: Path) -> None:
    tables: list[dict[str, Any]] = [
        {"body": "It is late. Very late.", "who": 7},
        {"body": ["Is it?", "Yes."], "who": "x"},
    ]
    file = lines(tmp_path / "posts.jsonl", tables)
    data = load_data("text_file", file=str(file), text="body", client="who", test_fraction=0.0)
    assert (len(data.y), data.client_names) == (4, ("7", "x"))
    whole = load_data(
        "text_file", file=str(file), text="body", sentences=False, test_file=str(file)
    )
    assert (len(whole.y), len(whole.y_test), whole.clients) == (3, 3, None)
    pytest.importorskip("pandas")
    table = tmp_path / "posts.csv"
    table.write_text("text,who\nIt is late,7\nIs it?,8\n")
    assert load_data(
        "text_file", file=str(table), client="who", test_fraction=0.0
    ).client_names == (
        "7",
        "8",
    )
    words = tmp_path / "words.txt"
    words.write_text("late\n\nis\n")
    known = load_data(
        "text_file", file=str(table), words=Reading(file=str(words)), test_fraction=0.0
    )
    assert known.classes == (*SPECIAL, "late", "is")


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ('{"text": "a"}\nnot json\n', {}, "posts.jsonl, line 2 is no JSON"),
        ("[1]\n", {}, "posts.jsonl, line 1 is no table of fields"),
        ('{"txt": "a"}\n', {}, "posts.jsonl, line 1 has no 'text'; it has txt"),
        ('{"text": "a"}\n', {"client": "who"}, "posts.jsonl, line 1 has no 'who'"),
        ("\n", {}, "has no texts with a word"),
        ('{"text": " "}\n', {}, "has no texts with a word"),
        ('{"text": {"a": 1}}\n', {}, "line 1: a text, or a list of texts, is needed, not {'a': 1}"),
        ('{"text": ["a", null]}\n', {}, "a text, or a list of texts, is needed, not None"),
        ('{"text": "a", "who": ["x"]}\n', {"client": "who"}, "a client is a text or a number"),
        ('{"text": NaN}\n', {}, "posts.jsonl, line 1 has no 'text'"),
        ('{"text": "a"}\n', {"words": Reading(0)}, "data.words.length must be at least 1, not 0"),
        ('{"text": "a"}\n', {"words": Reading(size=0)}, "words.size must be at least 1, not 0"),
        ('{"text": "a"}\n', {"test_fraction": 1.0}, "test_fraction is 1.0"),
        ('{"text": "a"}\n', {"words": Reading(file="nowhere.txt")}, "nowhere.txt does not exist"),
        ('{"text": "a"}\n', {"classes": ("x",)}, "data.classes cannot name the words of texts"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, content: str, options: dict[str, Any], says: str
) -> None:
    file = tmp_path / "posts.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=says) as caught:
        load_data("text_file", file=str(file), **options)
    assert "\n" not in str(caught.value)


def test_texts_without_a_known_word_are_refused(tmp_path: Path) -> None:
    file = lines(tmp_path / "posts.jsonl", [{"text": "nil novi"}])
    known = Vocabulary((*SPECIAL, "late"))
    with pytest.raises(DataError, match="has no word that the vocabulary knows, such as 'late'"):
        load_data("text_file", file=str(file), words=Reading(known=known))
    marks = lines(tmp_path / "marks.jsonl", [{"text": "nil novi."}])  # a full stop is no word
    with pytest.raises(DataError, match="has no word that the vocabulary knows"):
        load_data(
            "text_file", file=str(marks), words=Reading(known=Vocabulary((*SPECIAL, ".", "late")))
        )
    for content, says in (("The\n", "names 'The', which no text has"), ("\n", "names no words")):
        (tmp_path / "bad.txt").write_text(content)
        with pytest.raises(DataError, match=says):
            load_data("text_file", file=str(file), words=Reading(file=str(tmp_path / "bad.txt")))
    twice = tmp_path / "words.txt"
    twice.write_text("late\nlate\n")
    with pytest.raises(DataError, match="names 'late' twice"):
        load_data("text_file", file=str(file), words=Reading(file=str(twice)))


def test_missing_files_are_explained(tmp_path: Path) -> None:
    for name, file in (("stackexchange", "stackexchange_posts"), ("shakespeare", "shakespeare_by")):
        with pytest.raises(DataError, match=f"{name} was not found: looked for {file}"):
            load_data(name, root=tmp_path)


ALPHABET = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=60)
@given(st.lists(ALPHABET, min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 9))
def test_any_texts_become_rows_or_an_error(written: list[str], size: int, length: int) -> None:
    reading = Reading(length, size=size)
    with_words = [text for text in written if words_of(text)]
    known_words = vocabulary_of(with_words, size, "words").words[len(SPECIAL) :]
    shown = "".join(known_words)
    emoji = any(0x1F000 <= ord(letter) <= 0x1FAFF or letter == "\ufe0f" for letter in shown)
    if not emoji and not any(letter.isalnum() for letter in shown):  # but marks alone
        says = "has no word that the" if with_words else "no texts with a word"
        with pytest.raises(DataError, match=says):
            text_dataset(SplitTexts("mine", Texts(written), Texts([])), reading)
        return
    data = check(text_dataset(SplitTexts("mine", Texts(written), Texts(written)), reading))
    assert len(data.x) == len(data.x_test) == len(with_words)
    for row, text in enumerate(with_words):
        known = [w if w in data.classes[len(SPECIAL) :] else "<unknown>" for w in words_of(text)]
        assert text_of(data, row)[1] == [*known, "<end>"][:length]


PIECES = """
from fedgist.data.vocabulary import vocabulary_of
texts = ["late later latest", "newer newest new", "late new latest"] * 5
print(vocabulary_of(texts, 30, "wordpiece").words)
"""


@pytest.mark.slow
def test_pieces_of_words_are_the_same_in_every_process(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    runs = [call([sys.executable, "-c", PIECES], tmp_path).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    with pytest.raises(
        DataError, match=r"data.words.size = 3: the letters .* alone are \d+ pieces"
    ):
        vocabulary_of(["late later latest"], 3, "wordpiece")
    vocabulary = vocabulary_of(["late later latest", "newer newest new"] * 5, 30, "wordpiece")
    assert vocabulary.words[: len(SPECIAL)] == SPECIAL
    encoded = vocabulary.encode(["Latest new ☃", ""])
    joined = "".join(vocabulary.words[i].removeprefix("##") for i in encoded[0])
    assert joined == "latestnew<unknown>"
    assert encoded[1] == []


def test_without_the_package_for_pieces_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "tokenizers.trainers", None)
    with pytest.raises(DataError, match=r"pip install 'fedgist\[text\]'"):
        vocabulary_of(["late"], 9, "wordpiece")


def varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes in protocol buffers."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def tf_example(**texts: str) -> bytes:
    """Return a tf.Example in protocol buffers: written by hand from their specification."""
    features = b""
    for name, value in texts.items():
        feature = field(1, field(1, value.encode()))
        features += field(1, field(1, name.encode()) + field(2, feature))
    number = field(3, field(1, varint(7)))  # an int64 list, which is not read
    features += field(1, field(1, b"score") + field(2, number))
    return field(1, features)


def tff(path: Path, rows: list[tuple[str, str, bytes]]) -> Path:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE client_metadata (client_id, split_name, num_examples)")
        database.execute("CREATE TABLE examples (split_name, client_id, serialized_example_proto)")
        for split, user, blob in rows:
            database.execute("INSERT INTO client_metadata VALUES (?, ?, 1)", (user, split))
            database.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, user, blob))
        database.commit()
    return path


def test_stack_overflow_of_tensorflow_federated(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    long = "it is late " * 50  # longer than a byte says
    tff(
        tmp_path / "stackoverflow.sqlite",
        [
            ("train", "00001", tf_example(tokens="what is it ?", type="question", title="t")),
            ("train", "00001", tf_example(tokens=long, type="answer")),
            ("train", "00002", tf_example(tokens="it is late", type="answer")),
            ("test", "00001", tf_example(tokens="late again", type="answer")),
            ("test", "00009", tf_example(tokens="nobody here", type="answer")),
        ],
    )
    data = load_data("stackoverflow", root=tmp_path, users=2, words=Reading(4))
    assert data.client_names == ("00001", "00002")
    assert text_of(data, 0)[1] == ["what", "is", "it", "?"]
    assert (len(data.y), len(data.y_test)) == (3, 1)
    split = load_data("stackoverflow", root=tmp_path, users=2, by_kind=True, kinds="answers")
    assert split.client_names == ("00001/answer", "00002/answer")
    alone = [
        load_data("stackoverflow", root=tmp_path, users=1, seed=s).client_names for s in range(8)
    ]
    assert set(alone) == {("00001",), ("00002",)}
    with pytest.raises(DataError, match=r"data.users = 3: .* has 2"):
        load_data("stackoverflow", root=tmp_path, users=3)


@pytest.mark.parametrize("what", ["no database", "no table", "no example", "nothing"])
def test_a_broken_file_of_tensorflow_federated_is_named(tmp_path: Path, what: str) -> None:
    pytest.importorskip("google.protobuf")
    file = tmp_path / "stackoverflow.sqlite"
    if what == "no database":
        file.write_bytes(b"not a database, but long enough to look at it" * 99)
    elif what == "no table":
        sqlite3.connect(file).close()
        file.touch()
    elif what == "no example":
        tff(file, [("train", "1", b"\xff\xff\xff"), ("train", "1", b"")])
    said = {
        "no example": "holds an example that cannot be read",
        "nothing": "stackoverflow was not found: looked for stackoverflow.sqlite",
    }
    says = said.get(what, "is no file of TensorFlow Federated")
    with pytest.raises(DataError, match=says) as caught:
        load_data("stackoverflow", root=tmp_path, users=1)
    assert "\n" not in str(caught.value)


def test_how_texts_are_read_is_about_texts_alone() -> None:
    with pytest.raises(DataError, match=r"data.words is about texts, and digits has none"):
        load_data("digits", words=Reading())
