"""WISDM and the ARFF format: what is held out, what is filled in, and files that are broken."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgist.data.sources.arff_file import read_arff
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.splits import last_of_each
from fedgist.data.sources.wisdm import ACTIVITIES, FILE
from fedgist.errors import DataError
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of

# the head of the file as WISDM wrote it: blanks around values, and none before a brace
HEAD = """@relation activity_recognition_labeled

@attribute "UNIQUE_ID" numeric
@attribute "user" {"33" , "17", "5" }
@attribute "X0" numeric
@attribute "XPEAK" numeric
@attribute class{ "Walking" , "Jogging" , "Upstairs" , "Downstairs" , "Sitting" , "Standing" }

@data
"""


def rows(*blocks: tuple[str, str, int]) -> list[str]:
    """Lines of some blocks of a person and an activity; X0 counts the lines."""
    people = [(user, activity) for user, activity, count in blocks for _ in range(count)]
    return [f"{n},{user},{n},{n % 7},{activity}" for n, (user, activity) in enumerate(people)]


BLOCKS = (("33", "Walking", 7), ("17", "Sitting", 2), ("33", "Walking", 3), ("17", "Walking", 5))


def write(root: Path, text: str) -> Path:
    path = root / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


def test_the_last_fifth_of_each_persons_rows_of_each_activity_is_held_out(tmp_path: Path) -> None:
    data = load_data("wisdm", root=write(tmp_path, HEAD + "\n".join(rows(*BLOCKS)) + "\n"))
    # 33 walks in lines 0-6 and 9-11: of these 10 the last 2; 17 sits twice: none; walks 5 times: 1
    assert data.x_test[:, 0].tolist() == [10, 11, 16]
    assert data.x[:, 0].tolist() == [n for n in range(17) if n not in {10, 11, 16}]
    assert data.classes == ACTIVITIES
    assert data.y_test.tolist() == [0, 0, 0]
    assert data.client_names == ("17", "33")
    assert data.clients_test is not None
    assert data.clients_test.tolist() == [1, 1, 0]
    assert [column.name for column in data.columns] == ["X0", "XPEAK"]


def test_missing_numbers_are_the_mean_of_the_training_rows(tmp_path: Path) -> None:
    lines = rows(("33", "Walking", 10))
    peaks = [2.0, 4.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 50.0, 60.0]
    cells = ["?" if n in {3, 9} else f"{peak}" for n, peak in enumerate(peaks)]
    lines = [
        ",".join([*line.split(",")[:3], cell, line.split(",")[4]])
        for line, cell in zip(lines, cells, strict=True)
    ]
    data = load_data("wisdm", root=write(tmp_path, HEAD + "\n".join(lines)))
    kept = [peak for n, peak in enumerate(peaks[:8]) if n != 3]  # the last two are held out
    assert float(data.x[3, 1]) == pytest.approx(np.mean(kept))
    assert data.x_test[:, 1].tolist() == pytest.approx([50.0, np.mean(kept)])
    filled = [*kept, float(np.mean(kept))]
    assert data.mean[1] == pytest.approx(np.mean(kept))
    assert data.std[1] == pytest.approx(np.std(filled))


def test_groups_keep_at_least_one_row() -> None:
    groups = np.array(["a", "b", "a", "a", "c", "c"], dtype=object)
    assert last_of_each(groups, 0.2).tolist() == [False, False, False, True, False, False]
    assert last_of_each(groups, 0.9).tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "has no line @data: it is no ARFF file"),
        ("@data\n1,2", "has no line @attribute"),
        (HEAD + "1,33,0.5,1\n", "line 10 has 4 cells; there are 5 columns"),
        (HEAD + "1,34,0.5,1,Walking\n", "line 10: user is '34', which is not among its values"),
        (HEAD + "1,33,a,1,Walking\n", "line 10: X0 is 'a', not a finite number"),
        (HEAD + "\n% a remark\n1,33,nan,1,Walking\n", "line 12: X0 is 'nan', not a finite"),
        (HEAD + "1,33,inf,1,Walking\n", "X0 is 'inf', not a finite number"),
        (HEAD + "1,33,1,1,?\n", "the label '' is not among the classes"),
        (HEAD.replace('"X0" numeric', '"X0" date'), "line 5: '@attribute.*date': a column is num"),
        (HEAD.replace("XPEAK", "X0"), "line 6: there are two columns 'X0'"),
        (HEAD.replace('"user"', '"person"') + "1,33,1,1,Walking", "has no column 'user'; it has"),
        (HEAD, "has no training rows"),
        (HEAD + "1,33,1,?,Walking\n", r"column 1 \(counted from 0\) is missing in every"),
        (HEAD + '1,33,"' + "9" * 200_000 + '",1,Walking', "line 10: field larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as error:
        load_data("wisdm", root=write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.arff").write_bytes(b"@data\n\xff\xfe")
    with pytest.raises(DataError, match=r"x\.arff is not text"):
        read_arff(tmp_path / "x.arff")


@pytest.mark.slow
def test_the_real_file() -> None:
    root = os.environ.get("FEDGIST_DATA")
    if not root or not (Path(root) / FILE).is_file():
        pytest.skip("WISDM is not in FEDGIST_DATA")
    data = load_data("wisdm")
    assert data.x.shape == (4335, 43)
    assert data.x_test.shape == (1083, 43)
    assert bool(torch.isfinite(data.x).all())
    assert len(data.client_names) == 36
    assert data.clients is not None
    both = torch.cat([data.y, data.y_test]).bincount().tolist()
    assert both == [2081, 1625, 632, 528, 306, 246]
    with (Path(root) / FILE).open() as file:
        lines = [line.strip().split(",") for line in file if line[:1].isdigit()]
    held: dict[tuple[str, str], list[list[str]]] = {}
    for cells in lines:
        held.setdefault((cells[1], cells[-1]), []).append(cells)
    count = {group: int(len(members) / 5 + 0.5) for group, members in held.items()}
    assert sum(count.values()) == len(data.y_test)
    assert sum(cells.count("?") for cells in lines) == 615
    world = world_of(make({"data": {"name": "wisdm"}, "partition": {"name": "natural"}}))
    assert len(world.partition.train) == 36
    for client, name in enumerate(data.client_names):
        expected = sum(size for (user, _), size in count.items() if user == name)
        assert len(world.partition.test[client]) == expected
