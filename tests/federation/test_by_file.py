"""One exchange by file: the same model as online, whoever sends when, and nothing else is taken."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from commands import fedgist
from fedgist.federation.keys.kits import read_kit
from fedgist.federation.network.signed_file import (
    envelopes_in,
    joined,
    read_signed,
    write_signed,
)
from fedgist.models.encoders import encoder_digest
from fedgist.runs.files import checkpoint
from fedgist.runs.files.record import read_lines
from fedgist.wire.envelope import seal, unseal
from real_federation import RealFederation, real_federation
from three_sites import NAMES, recipe

ONE = {"train": {"num_rounds": 1}, "model": {"name": "logistic"}}
LOCAL = {"unit": "record", "epsilon": 5.0, "delta": 1e-5, "clip": 1.0, "where": "local"}


def analytic(**sections: Any) -> dict[str, Any]:
    return recipe("analytic", rounds=1, model={"name": "logistic"}, **sections)


def printed(fed: RealFederation, *words: object, ok: bool = True) -> str:
    """Run a command once; return what it printed, as one line."""
    done = fedgist(*words, cwd=fed.folder, code=None)
    text = " ".join((done.stdout + done.stderr).split())
    assert (done.returncode == 0) == ok, text
    return text


def site(fed: RealFederation, name: str, *more: object, ok: bool = True) -> str:
    """Run fedgist site once; return what it printed."""
    kit, table = fed.folder / "kits/sites" / name, fed.folder / f"{name}.toml"
    given = ("--config", table, "--recipe", fed.folder / "recipe.toml")
    return printed(fed, "site", kit, *given, *more, ok=ok)


def send(fed: RealFederation, name: str, **about: Any) -> Path:
    path = fed.folder / "replies" / f"{name}.fedgist"
    path.parent.mkdir(exist_ok=True)
    site(fed, name, "--to-file", path, **about)
    return path


def serve(fed: RealFederation, out: str = "by_file", *, ok: bool = True) -> str:
    """Run fedgist server on the replies; return what it printed."""
    kit, given = fed.folder / "kits/server", fed.folder / "recipe.toml"
    about = ("--from-files", fed.folder / "replies", "--out", fed.folder / out)
    return printed(fed, "server", kit, given, *about, ok=ok)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    saved = checkpoint.load(folder)
    assert saved is not None
    return {n: a for n, a in saved.arrays().items() if n.startswith("server/")}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_files_of_three_processes_are_the_online_run_bit_for_bit(tmp_path: Path) -> None:
    with real_federation(tmp_path) as fed:
        fed.write_recipe(analytic(federation={"least_sites": 3, "least_replies": 3}))
        for name in NAMES:
            send(fed, name)
        said = serve(fed)
        assert "3 of 3 sites sent a file" in said
        for name in NAMES:  # the run online has state folders of its own
            fed.write_site(name, state=f"online-{name}")
        fed.start_server()
        for name in NAMES:
            fed.start_site(name)
        for label in ("server", *NAMES):
            fed.wait_end(label)
        assert same(state_of(fed.run), state_of(tmp_path / "by_file"))


@pytest.mark.slow
def test_a_site_gets_its_model_and_a_later_reply_is_added(tmp_path: Path) -> None:
    with real_federation(tmp_path) as fed:
        fed.write_recipe(analytic())
        first = send(fed, "berlin").read_bytes()
        send(fed, "ulm")
        own = tmp_path / "by_file/figure.png"  # seen: a folder was replaced with all that it held
        own.parent.mkdir()
        own.write_bytes(b"a user's")
        assert "figure.png is no file of a run" in serve(fed, ok=False)
        assert own.read_bytes() == b"a user's"
        own.unlink()
        assert "2 of 3 sites sent a file; without lyon" in serve(fed)
        own.write_bytes(b"a user's")
        two = state_of(tmp_path / "by_file")
        said = site(fed, "berlin", "--to-file", tmp_path / "replies/berlin.fedgist")
        assert "was made before: the same file is written again" in said
        assert (tmp_path / "replies/berlin.fedgist").read_bytes() == first
        send(fed, "lyon")
        serve(fed)
        three = state_of(tmp_path / "by_file")
        assert not same(two, three)
        assert three["server/heard"].tolist() == [1.0, 1.0, 1.0]
        assert own.read_bytes() == b"a user's"
        assert [p.name for p in tmp_path.iterdir() if "fedgist-" in p.name] == []
        (line,) = read_lines(tmp_path / "by_file/rounds.jsonl")
        assert line["clients/replied"] == 3
        # seen: a model that the site refuses ended with exit code 0
        kit = read_kit(tmp_path / "kits/server")
        sent = read_signed(tmp_path / "by_file/models.fedgist", kit, "models")
        importlib.import_module("fedgist.methods.analytic")  # its messages
        late = []
        for envelope in envelopes_in(sent.content):
            header, messages = unseal(envelope, 1 << 40)
            late.append(seal(header.model_copy(update={"round": 5, "messages": {}}), messages))
        about = sent.header.run, sent.header.recipe
        write_signed(tmp_path / "late.fedgist", kit, "models", *about, joined(late))
        said = site(fed, "lyon", "--from-file", tmp_path / "late.fedgist", ok=False)
        assert "error: the site refuses: message: round 5 is after the last round" in said
        said = site(fed, "lyon", "--from-file", tmp_path / "by_file/models.fedgist")
        (model,) = (tmp_path / "state-lyon/models").iterdir()
        assert str(model) in said
        rows, out = tmp_path / "lyon.npz", tmp_path / "predicted.csv"
        fedgist("predict", model, rows, "--client", "0", "--out", out, cwd=tmp_path)
        assert len(out.read_text().splitlines()) > 100


@pytest.mark.environment
@pytest.mark.slow
def test_fedlog_over_rows_without_a_body_goes_by_file(tmp_path: Path) -> None:
    with real_federation(tmp_path) as fed:
        fed.write_recipe(recipe("fedlog", rounds=1, model={"name": "logistic"}))
        for name in NAMES:
            send(fed, name)
        serve(fed)
        assert state_of(tmp_path / "by_file")["server/eta"].shape == (10, 65)


def encoder(folder: Path, seed: int) -> str:
    """Write an encoder with random weights; return its digest."""
    torch.manual_seed(seed)
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**small, intermediate_size=32, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(folder)
    prepares = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepares))
    return encoder_digest(str(folder))


@pytest.mark.environment
@pytest.mark.slow
def test_sites_have_their_own_copies_of_one_encoder(tmp_path: Path) -> None:
    """The recipe states its digest; another encoder, or one that learns, is refused."""
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    digest = encoder(tmp_path / "copy", 0)
    encoder(tmp_path / "other", 1)
    facts = {"input_shape": [1, 8, 8], "element": "uint8", "scale": 255.0}
    with real_federation(tmp_path, images=True) as fed:
        raw = recipe("analytic", rounds=1)
        raw["facts"] = facts | {"feature_width": 16, "encoder": digest}
        raw["data"] = {"classes": raw["data"]["classes"], "normalize": "none"}
        fed.write_recipe(raw)
        for name in NAMES:
            fed.write_site(name, model={"name": "transformers:copy", "frozen": True})
        assert f"encoder = '{digest}', feature_width = 16" in site(fed, "ulm", "--check")
        tried = site(fed, "ulm", "--check")
        assert "a message was made, and nothing is trained" in tried
        for name in NAMES:
            send(fed, name)
        said = serve(fed)
        assert "fedgist-new" not in said
        (line,) = read_lines(tmp_path / "by_file/rounds.jsonl")
        assert "train/loss" not in line  # nothing is trained
        predict = ("predict", tmp_path / "by_file", tmp_path / "ulm.npz", "--client", "0")
        assert "each site's is private" in printed(fed, *predict, ok=False)
        assert state_of(tmp_path / "by_file")["server/known/private/head/eta"].shape == (10, 17)
        said = site(fed, "ulm", "--from-file", tmp_path / "by_file/models.fedgist")
        assert "the trained model is in" in said
        for model, says in (
            ({"name": "transformers:other", "frozen": True}, "the weights or the preparation"),
            ({"name": "transformers:copy"}, "use name = 'transformers:FOLDER' and frozen = true"),
        ):
            fed.write_site("berlin", model=model, state="state-anew")
            assert says in site(fed, "berlin", "--to-file", tmp_path / "b.fedgist", ok=False)
        del raw["data"]["normalize"]
        fed.write_recipe(raw)
        said = serve(fed, ok=False)
        assert "has its own normalization: use 'none'" in said
        raw["data"]["normalize"] = "none"
        raw["facts"]["feature_width"] = 24
        fed.write_recipe(raw)
        fed.write_site(
            "ulm", model={"name": "transformers:copy", "frozen": True}, state="state-wide"
        )
        said = site(fed, "ulm", "--to-file", tmp_path / "u.fedgist", ok=False)
        assert "the features of the encoder are not facts.feature_width = 24 numbers" in said
        raw["facts"]["feature_width"] = 16
        del raw["facts"]["encoder"]
        fed.write_recipe(raw)
        said = site(fed, "ulm", "--to-file", tmp_path / "u.fedgist", ok=False)
        assert "all sites need the same body: state facts.encoder" in said
        raw["facts"] = facts
        fed.write_recipe(raw | {"model": {"name": "transformers:copy", "frozen": True}})
        fed.write_site("ulm", state="state-more")
        said = site(fed, "ulm", "--to-file", tmp_path / "u.fedgist", ok=False)
        assert "names a file, which a server may not do at a site: state its digest" in said


@pytest.mark.slow
def test_a_private_reply_is_one_release_of_the_budget(tmp_path: Path) -> None:
    with real_federation(tmp_path) as fed:
        private = LOCAL | {"noise": "system"}
        method = {"name": "analytic", "wire": "float64"}
        stated = {"max_rows": 2000}
        raw = analytic(privacy=private, method=method, clients=stated)
        fed.write_recipe(raw)
        for name in NAMES:
            policy = {"epsilon": 8.0, "delta": 1e-4, "max_rows": 2000}
            fed.write_site(name, policy=policy)
        path = send(fed, "berlin")
        before = path.read_bytes()
        ledger = (tmp_path / "state-berlin/ledger.json").read_text()
        send(fed, "berlin")
        assert path.read_bytes() == before
        assert (tmp_path / "state-berlin/ledger.json").read_text() == ledger
        fed.write_recipe(analytic(privacy=private, method=method, clients=stated, seed=9))
        said = site(fed, "berlin", "--to-file", path, ok=False)
        assert "would spend more epsilon than this site's policy allows" in said
        fed.write_recipe(analytic(privacy=private | {"where": "central"}, method=method))
        said = site(fed, "berlin", "--to-file", path, ok=False)
        assert "a file is seen by itself: use 'local'" in said


def other_run(blob: bytes) -> bytes:
    """Return a file whose header names another run, as long as before."""
    before, run, after = blob.partition(b'"run":"')
    return before + run + (b"0" if after[:1] != b"0" else b"1") + after[1:]


BAD: dict[str, tuple[Any, str]] = {
    "cut": (lambda blob: blob[:-9], "its content is not what its header says"),
    "changed": (lambda blob: blob[:-9] + b"x" * 9, "its content is not what its header says"),
    "header": (lambda blob: blob.replace(b'"size":', b'"Size":', 1), "cannot be read: size"),
    "another run": (other_run, "its signature is not by the key of its certificate"),
    "another kind": (lambda blob: blob.replace(b"reply", b"model", 1), "cannot be read: kind"),
    "empty": (lambda blob: b"", "it is no file of this version"),
    "text": (lambda blob: b"hello", "it is no file of this version"),
}


@pytest.mark.slow
def test_files_that_are_not_as_sent_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with real_federation(tmp_path) as fed:
        fed.write_recipe(analytic())
        good = send(fed, "berlin").read_bytes()
        send(fed, "ulm")
        serve(fed)
        before = state_of(tmp_path / "by_file")
        path = tmp_path / "replies/berlin.fedgist"
        for change, says in BAD.values():
            path.write_bytes(change(good))
            said = serve(fed, ok=False)
            assert says in said
            assert "berlin.fedgist" in said
        path.unlink()
        said = serve(fed, ok=False)
        assert "the reply of site number 0 that is part of" in said
        path.write_bytes(good)
        (tmp_path / "replies/copy.fedgist").write_bytes(good)
        assert "is the same reply as" in serve(fed)
        fed.write_recipe(analytic(seed=9))
        said = serve(fed, "other", ok=False)
        assert "was made for a recipe with the digest" in said
        assert same(before, state_of(tmp_path / "by_file"))


@pytest.mark.environment
@pytest.mark.slow
def test_a_site_that_leaves_takes_its_sums_out_of_the_totals(tmp_path: Path) -> None:
    """The server and the others then have what a run without it would have given them."""
    method = {"name": "analytic", "wire": "float64"}
    with real_federation(tmp_path) as fed:
        fed.write_recipe(analytic(method=method))
        for name in ("berlin", "lyon"):
            send(fed, name)
        serve(fed, "without_ulm")
        all_three = {"least_sites": 3, "least_replies": 3}
        fed.write_recipe(analytic(method=method, federation=all_three))
        fed.start_server()
        for name in NAMES:
            fed.write_site(name, state=f"online-{name}")
            fed.start_site(name)
        for label in ("server", *NAMES):
            fed.wait_end(label)
        fed.write_site("ulm", state="by-file-ulm")
        kit, path = fed.folder / "kits/server", send(fed, "ulm")
        command = ("forget", fed.run, "--reply", path, "--kit", kit)
        good = path.read_bytes()
        path.write_bytes(good[:-8] + bytes(8))
        assert "it was cut or changed" in printed(fed, *command, ok=False)
        path.write_bytes(good)
        assert "the sums of ulm are out of the totals" in printed(fed, *command)
        said = printed(fed, *command, ok=False)
        assert "keeps nothing of client ulm" in said
        after, expected = state_of(fed.run), state_of(tmp_path / "without_ulm")
        assert after["server/heard"].tolist() == [1.0, 1.0, -1.0]
        for name, array in expected.items():
            if name != "server/heard":
                torch.testing.assert_close(after[name], array, rtol=1e-5, atol=1e-6)
        fed.start_server()
        for name in ("berlin", "lyon"):
            fed.start_site(name)
        for label in ("server", "berlin", "lyon"):
            fed.wait_end(label)
        (model,) = (tmp_path / "online-lyon/models").iterdir()
        rows, tables = tmp_path / "lyon.npz", []
        fed.write_recipe(analytic(method=method))
        site(fed, "lyon", "--from-file", tmp_path / "without_ulm/models.fedgist")
        by_file = next(p for p in (tmp_path / "online-lyon/models").iterdir() if p != model)
        for place in (model, by_file):
            out = tmp_path / "predicted.csv"
            fedgist("predict", place, rows, "--client", "0", "--out", out, cwd=tmp_path)
            tables.append(out.read_text())
        assert tables[0] == tables[1]
        says = "is not a run of fedgist server over a network"
        other = ("forget", tmp_path / "without_ulm", "--reply", path, "--kit", kit)
        assert says in printed(fed, *other, ok=False)


@pytest.mark.slow
def test_what_needs_several_exchanges_is_refused(tmp_path: Path) -> None:
    with real_federation(tmp_path) as fed:
        path = tmp_path / "berlin.fedgist"
        for raw in (
            recipe("fedavg", rounds=2, model={"name": "logistic"}),
            analytic(method={"name": "analytic", "calibrate": True}),
        ):
            fed.write_recipe(raw)
            said = site(fed, "berlin", "--to-file", path, ok=False)
            assert "has several exchanges" in said
            assert not path.exists()
        kit = fed.folder / "kits/sites/berlin"
        given = ("--config", tmp_path / "berlin.toml", "--to-file", path)
        says = "--to-file needs --recipe RECIPE: the recipe that the server uses"
        assert says in printed(fed, "site", kit, *given, ok=False)
        assert "--to-file does not go with --check" in site(
            fed, "berlin", "--to-file", path, "--check", ok=False
        )
        assert "--to-file does not go with --from-file" in site(
            fed, "berlin", "--to-file", path, "--from-file", path, ok=False
        )
