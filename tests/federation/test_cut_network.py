"""A network of two namespaces is cut, or slow and lossy: the run ends as if it were not."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import call
from real_federation import RealFederation, compare, real_federation
from three_sites import ARCHITECTURES, NAMES, recipe, simulated

SERVER, SITES = f"fg-server-{os.getpid()}", f"fg-sites-{os.getpid()}"
HOST, OTHER, MASK = "10.77.0.1", "10.77.0.2", 24
LINK = "fg0"
RECIPE = recipe(
    "fedlog",
    rounds=60,
    clients={"architectures": ARCHITECTURES},
    federation={"least_sites": 3, "least_replies": 3, "deadline_s": 30.0},
)


def ip(*words: object) -> None:
    call(["ip", *words], Path("/"))


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Two network namespaces with one line between them."""
    try:
        for space in (SERVER, SITES):
            ip("netns", "add", space)
        ip("-n", SERVER, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", SITES)
        for space, address in ((SERVER, HOST), (SITES, OTHER)):
            ip("-n", space, "address", "add", f"{address}/{MASK}", "dev", LINK)
            ip("-n", space, "link", "set", LINK, "up")
        yield
    finally:
        for space in (SERVER, SITES):
            call(["ip", "netns", "del", space], Path("/"), code=None)


def why_not() -> str:
    """Return why this machine cannot do it; an empty text if it can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed"
    made = call(["ip", "netns", "add", f"{SERVER}-try"], Path("/"), code=None)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    ip("netns", "del", f"{SERVER}-try")
    return ""


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[RealFederation]:
    """A federation whose server and sites are in two namespaces."""
    if reason := why_not():
        pytest.skip(reason)
    spaces = {"server": SERVER, **dict.fromkeys(NAMES, SITES)}
    with two_namespaces(), real_federation(tmp_path, host=HOST, spaces=spaces) as made:
        made.write_recipe(RECIPE)
        yield made


def start(fed: RealFederation) -> None:
    fed.start_server()
    for name in NAMES:
        fed.start_site(name)


def check_end(fed: RealFederation, columns: tuple[str, ...]) -> None:
    for label in ("server", *NAMES):
        fed.wait_end(label)
    lines = fed.rounds()
    assert all(line["clients/replied"] == 3 for line in lines)
    compare(lines, simulated(RECIPE).rounds, columns=columns)


@pytest.mark.environment
def test_a_cut_line_is_noticed_and_the_round_is_finished_when_it_is_back(
    fed: RealFederation,
) -> None:
    start(fed)
    fed.wait_round(3)
    ip("-n", SITES, "link", "set", LINK, "down")
    # nobody says that the line is cut: the server notices that nobody answers
    fed.wait_for(lambda: all(site["state"] == "absent" for site in fed.status()["sites"]))
    done = len(fed.rounds())
    assert done < RECIPE["train"]["num_rounds"]
    ip("-n", SITES, "link", "set", LINK, "up")
    # scores are asked once: those of the round in which the line was cut may be missing
    check_end(fed, ("train/", "comm/"))


@pytest.mark.environment
def test_a_slow_line_that_loses_packets_changes_nothing(fed: RealFederation) -> None:
    netem = ["tc", "qdisc", "add", "dev", LINK, "root", "netem", "delay", "20ms", "loss", "1%"]
    done = call(["ip", "netns", "exec", SERVER, *netem], fed.folder, code=None)
    if done.returncode:
        pytest.skip(f"tc netem is not permitted here: {done.stderr.strip()}")
    start(fed)
    check_end(fed, ("eval/client", "train/", "comm/"))
