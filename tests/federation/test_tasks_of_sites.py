"""Numbers, labels and pixels over the network, as in the simulation; a site's policy on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedgist
from fedgist.data.dataset import Dataset
from fedgist.errors import InputError, SiteError
from fedgist.federation.agreement.recipe_check import check_setup
from fedgist.federation.site.file import read_site_file
from fedgist.federation.site.setup import allowed_rows, plain_data
from fedgist.recipe.resolve import resolve
from fedgist.runs.files.record import read_lines
from real_federation import compare
from sites_in_threads import Kits
from small_tasks import TASKS, federated, labels, numbers
from three_sites import NAMES, parsed, write_site

CASES = [
    ("regression", {"name": "fedlog"}),
    ("multilabel", {"name": "fedlog"}),
    ("segmentation", {"name": "fedproto"}),
]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    return Kits.make(tmp_path_factory.mktemp("kits"))


def write(folder: Path, data: Dataset) -> None:
    """Write each site's rows: those of one client of a small task."""
    assert data.clients is not None
    assert data.clients_test is not None
    for number, name in enumerate(NAMES):
        write_site(folder, name, data, data.clients == number, data.clients_test == number)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "method"), CASES)
def test_over_the_network_a_task_gives_the_simulations_numbers(
    objective: str, method: dict[str, Any], kits: Kits, tmp_path: Path
) -> None:
    data = TASKS[objective][0]()
    write(tmp_path, data)
    raw = federated(objective, method, data)
    kits.serve(raw, tmp_path)
    assert data.clients is not None
    assert data.clients_test is not None
    alone = {key: value for key, value in raw.items() if key not in {"facts", "federation"}}
    rows = [(data.clients == i).nonzero()[:, 0] for i in range(len(NAMES))]
    tests = [(data.clients_test == i).nonzero()[:, 0] for i in range(len(NAMES))]
    expected = fedgist.run(
        alone,
        data=data,
        clients=dict(zip(NAMES, rows, strict=True)),
        clients_test=dict(zip(NAMES, tests, strict=True)),
    )
    compare(read_lines(tmp_path / "run/rounds.jsonl"), expected.rounds)


def site(tmp_path: Path, data: Dataset, target: str, policy: str) -> Any:
    write(tmp_path, data)
    text = f'target = "{target}"\n[data]\nname = "npz"\npath = "berlin.npz"\n[policy]\n{policy}\n'
    (tmp_path / "berlin.toml").write_text(text)
    return read_site_file(tmp_path / "berlin.toml")


def test_rows_with_a_withheld_label_are_not_used(tmp_path: Path) -> None:
    file = site(tmp_path, labels(), "labels", 'never_released = ["1"]')
    whole = plain_data(file)
    assert whole.target == "labels"
    kept, sentences = allowed_rows(whole, file)
    assert not bool((kept.y[:, 1] > 0).any())
    assert not bool((kept.y_test[:, 1] > 0).any())
    assert len(kept.y) == int((whole.y[:, 1] == 0).sum())
    assert "class 1: its rows are not used" in sentences[0]


def test_numbers_have_no_classes_to_withhold_and_need_enough_rows(tmp_path: Path) -> None:
    file = site(tmp_path, numbers(), "numbers", 'never_released = ["1"]')
    with pytest.raises(SiteError, match="never_released names classes"):
        allowed_rows(plain_data(file), file)
    file = site(tmp_path, numbers(), "numbers", "least_rows = 17")
    with pytest.raises(SiteError, match=r"16 training rows, fewer than policy\.least_rows = 17"):
        allowed_rows(plain_data(file), file)
    file = site(tmp_path, numbers(), "numbers", "least_rows = 16")
    assert torch.equal(allowed_rows(plain_data(file), file)[0].y, numbers().y[::3])


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"objective": {"name": "regression"}}, "objective.mean and objective.std are missing"),
        (
            {"objective": {"name": "text_classes"}, "model": {"name": "text_mean"}},
            "texts are not supported yet",
        ),
    ],
)
def test_what_a_federation_cannot_know_is_refused(sections: dict[str, Any], says: str) -> None:
    raw = federated("regression", {"name": "fedavg"}, numbers()) | sections
    with pytest.raises(InputError, match=says):
        check_setup(resolve(parsed(raw)))
