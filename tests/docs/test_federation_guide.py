"""The guide to federations: its five minutes work as they are pasted, and its files can be read."""

from __future__ import annotations

import re
import signal
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from commands import Command, call, fedgist, wait_until
from fedgist.federation.agreement.recipe_check import check_setup, check_stated
from fedgist.federation.keys.provision import read_federation
from fedgist.federation.site.file import read_site_file
from fedgist.recipe.reading import make, read
from fedgist.recipe.resolve import resolve
from fedgist.world.facts.question import read_question
from real_federation import free_port

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "federation.md").read_text("utf-8")
FIVE_MINUTES = GUIDE.partition("## On one machine")[2].partition("\n## ")[0]
FILES = re.findall(r"^cat > \S+ <<'END'\n(.*?)^END$", FIVE_MINUTES, re.MULTILINE | re.DOTALL)
(WAITING,) = re.findall(r"^hospitals, run .*\n(.*)$", FIVE_MINUTES, re.MULTILINE)
TOML = [*re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL), *FILES]


def kind_of(table: dict[str, object]) -> str:
    """Return which file a TOML block is of, by a key that the others lack."""
    if "sites" in table:
        return "federation"
    if "columns" in table:
        return "question"
    return "recipe" if "method" in table or "clients" in table else "site"


@pytest.mark.parametrize("text", TOML, ids=range(len(TOML)))
def test_every_file_of_the_guide_can_be_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text, "utf-8")
    kind = kind_of(table := tomllib.loads(text))
    if kind == "federation":
        assert list(read_federation(path).sites) == table["sites"]
    elif kind == "question":
        assert read_question(path).columns
    elif kind == "site":
        assert read_site_file(path).table.data.name in {"table", "folder"}
    elif "facts" in table:
        check_stated(recipe := read(path))
        check_setup(resolve(recipe))
    else:  # a part of a recipe: places for later sites, or private rows
        recipe = make(table)
        assert recipe.clients.num_clients == 6 or recipe.privacy.noise == "system"


def test_all_kinds_of_files_are_there() -> None:
    kinds = [kind_of(tomllib.loads(text)) for text in TOML]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "federation": 2,
        "site": 7,
        "question": 2,
        "recipe": 4,
    }


@pytest.mark.slow
def test_the_recipe_of_the_guide_is_a_federations_alone(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "federation" / "hospitals.toml"
    check_stated(read(recipe))
    for command in ("run", "partition"):
        done = fedgist(command, "federation/hospitals", cwd=tmp_path, code=2)
        assert "facts.feature_width = 16" in done.stderr
        assert "fedgist server" in " ".join(done.stderr.split())


def test_the_files_of_a_deployment_name_commands_that_exist() -> None:
    deploy = ROOT / "deploy"
    services = yaml.safe_load((deploy / "compose.yaml").read_text("utf-8"))["services"]
    assert [service["command"][0] for service in services.values()] == ["server", "site"]
    for name in ("server", "site"):
        unit = (deploy / f"fedgist-{name}.service").read_text("utf-8")
        assert re.search(rf"^ExecStart=\S+/fedgist {name} /etc/fedgist/\S+", unit, re.MULTILINE)
    for path in (deploy / "compose.yaml", deploy / "Containerfile", *deploy.glob("*.service")):
        assert "Not run here" in path.read_text("utf-8")


def ended(running: dict[str, Command]) -> None:
    """Wait until the federation has ended; end the web page, which has printed its address."""
    page = running.pop("fedgist watch runs/hospitals --serve")
    wait_until(lambda: "http://127.0.0.1:" in page.printed())
    page.signal(signal.SIGINT)
    page.end()
    for line in list(running):
        done = running.pop(line).end()
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"


def facts_are_there(running: dict[str, Command]) -> None:
    """Wait until the question was answered."""
    for line in [line for line in running if line.startswith("fedgist facts")]:
        done = running.pop(line).end()
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        assert "the sites wait; train with: fedgist server" in done.stdout


def shown(folder: Path) -> str:
    """Return what an administrator sees, if the server is there."""
    return fedgist("status", "kits/administrators/anna", cwd=folder, code=None).stdout


@pytest.mark.environment
def test_the_five_minutes_work_as_they_are_pasted(tmp_path: Path) -> None:
    files, *blocks = re.findall(r"```sh\n(.*?)```", FIVE_MINUTES, re.DOTALL)
    folder = tmp_path / "hospitals"
    pasted = files.replace(":8443", f":{free_port()}").replace("python -", f"{sys.executable} -")
    call(["bash", "-e", "-c", pasted], tmp_path)
    running = dict[str, Command]()
    try:
        for block in blocks:
            (line,) = block.strip().splitlines()
            name, *words = line.split()[1:]
            if "hospitals.toml" in words and name != "facts":
                facts_are_there(running)
            if name in {"facts", "server", "watch"} or (name == "site" and "--check" not in words):
                running[line] = Command([name, *words], folder)
                continue
            if name == "status":
                wait_until(lambda: WAITING in shown(folder))
                continue
            if name == "show":
                ended(running)
            matches = [str(path) for word in words for path in folder.glob(word) if "*" in word]
            assert len(matches) == ("*" in line)
            done = fedgist(name, *(matches[0] if "*" in w else w for w in words), cwd=folder)
        assert "of 20 rows" in done.stderr
        assert len((folder / "predictions.csv").read_text("utf-8").splitlines()) == 21
        for hospital in ("berlin", "lyon", "ulm"):
            log = (folder / f"state-{hospital}" / "audit.log").read_text("utf-8")
            assert len(re.findall(r"round \d+, train: sent upload", log)) == 20
    finally:
        for process in running.values():
            process.signal(signal.SIGKILL)
            process.end()
