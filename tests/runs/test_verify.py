"""What `dpoptim verify`, `sign` and `ledger` accept, and what they name as wrong."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from command_work import run
from dpoptim import Ledger
from dpoptim.assumptions import Assumption
from dpoptim.documents import sha256_of, with_digest
from dpoptim.evaluation import evaluate_classifier
from dpoptim.installed import SOURCES, digests
from dpoptim.runs.certificate import write_certificate
from dpoptim.runs.evaluation_section import BEGIN, NO_EVALUATION, keep_evaluation
from dpoptim.runs.evaluations import Evaluation
from dpoptim.runs.verify import verify_run
from dpoptim.training.assumptions import PACKAGE
from finished_run import SEEDED, small_run


def saved(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    result = replace(small_run(), **changes)
    (folder / "plan.json").write_text(result.plan.to_json())
    write_certificate(folder / "certificate.json", result)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the certificate by hand, and make its digest right again."""
    path = folder / "certificate.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(with_digest(document)))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, name))]
    if isinstance(value, list):
        return [leaf for place, inner in enumerate(value) for leaf in leaves(inner, (*path, place))]
    return [path]


@pytest.mark.parametrize("name", ["plan.json", "certificate.json"])
@pytest.mark.parametrize("damage", [lambda text: text[:-40], lambda text: text.replace("0", "1")])
def test_a_damaged_file_is_named(name: str, damage: Callable[[str], str], tmp_path: Path) -> None:
    path = saved(tmp_path / "run") / name
    path.write_text(damage(path.read_text()))
    said = run("verify", path.parent, code=2).replace(" ", "")
    assert f"{path}:".replace(" ", "") in said


# What only the run knew.
FREE = {"data", "model", "scores", "ledger", "training", "versions", "finished", "sha256"}


def test_every_entry_that_the_plan_determines_is_compared(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    document = json.loads((folder / "certificate.json").read_text())
    verify_run(folder)
    determined = [
        path
        for path in leaves(document)
        if path[0] not in FREE and path[:2] != ("basis", "trusted")
    ]
    assert len(determined) > 60
    for path in determined:
        changed = json.loads(json.dumps(document))
        inside = changed
        for name in path[:-1]:
            inside = inside[name]
        value = inside[path[-1]]
        other: Any = value * 1.001 if isinstance(value, float) else "household"
        inside[path[-1]] = (
            not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else other
        )
        (folder / "certificate.json").write_text(json.dumps(with_digest(changed)))
        if path[:2] == ("basis", "enforced"):
            expected = "basis.enforced lacks"
        else:
            expected = "do not trust it|lacks entries or has wrong ones|format"
        with pytest.raises(ValueError, match=expected):
            verify_run(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["guarantee"].update(neighboring="replace-one"),
        lambda d: d["guarantee"].update(unit="household"),
        lambda d: d["guarantee"].update(text="epsilon=0.01"),
        lambda d: d["verdict"].update(kind="none"),
        lambda d: d["basis"]["trusted"].pop(0),
        lambda d: d["basis"]["enforced"].clear(),
        lambda d: d.pop("attacker"),
        lambda d: d.update(extra=1),
        lambda d: d["further_deltas"].pop(),
        lambda d: d["plan"].update(n=2),
    ],
)
def test_edited_certificates(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    folder = saved(tmp_path)
    edit(folder, change)
    with pytest.raises(ValueError, match="do not trust it|lacks entries") as refused:
        verify_run(folder)
    assert "\n" not in str(refused.value)


def test_flipped_bytes_are_seen_or_mean_nothing(tmp_path: Path) -> None:
    """1,000 flips in the certificate: 366 once passed."""
    folder = saved(tmp_path)
    path = folder / "certificate.json"
    good = path.read_bytes()
    meaning, chance = json.loads(good), random.Random(2)
    passed = 0
    for _ in range(300):
        place = chance.randrange(len(good))
        path.write_bytes(
            good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :]
        )
        try:
            found = verify_run(folder)
        except ValueError:
            continue
        passed += 1
        assert found.certificate == meaning
    assert passed < 100  # spaces


def test_seeded_noise_cannot_be_left_out(tmp_path: Path) -> None:
    result = small_run()
    seeded = Assumption(
        "unproven", "noise and sampling were seeded: whoever knows the seed sees the data"
    )
    guarantee = replace(result.guarantee, notes=(SEEDED,))
    folder = saved(tmp_path, guarantee=guarantee, basis=(*result.basis, seeded))
    verify_run(folder)
    edit(folder, lambda d: d["guarantee"]["notes"].clear())
    with pytest.raises(ValueError, match="do not trust it"):
        verify_run(folder)


def test_a_run_without_noise_promises_nothing(tmp_path: Path) -> None:
    result = small_run(noise_multiplier=0)
    folder = saved(
        tmp_path, plan=result.plan, guarantee=result.guarantee, ledger=None, basis=result.basis
    )
    assert verify_run(folder).certificate["verdict"]["kind"] == "none"


def test_another_model_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"weights")
    digest = "9551dadbc76a27457946e70d1aebebe2132f8d3b7378d216ade853f3ec36aeeb"
    with pytest.raises(ValueError, match="not the model of this certificate"):
        verify_run(saved(tmp_path, model_sha256=digest))


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"{", b"[]", b"[" * 50_000, b'{"format": 1}', b"{}"]
)
@pytest.mark.parametrize("name", ["plan.json", "certificate.json"])
def test_files_that_are_something_else(tmp_path: Path, name: str, content: bytes) -> None:
    folder = saved(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match="text") as refused:
        verify_run(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("method", ["dp-sgd", "kl-spider"])
def test_the_commands_on_a_real_run(tmp_path: Path, method: str) -> None:
    folder, ledger = tmp_path / "run", tmp_path / "digits.ledger"
    short = ["--epochs", 1, "--batch-size", 512] if method == "dp-sgd" else []
    run(
        "train",
        "--method",
        method,
        "--epsilon",
        4,
        "--out",
        folder,
        "--ledger",
        ledger,
        "--no-compare",
        *short,
    )
    said = run("verify", folder, "--ledger", ledger)
    for part in (
        "epsilon=",
        "model.pt is the model",
        "the ledger holds its charge, committed",
        "unchecked",
        "report.html is the one that the certificate names",
    ):
        assert part in said
    shown = run("ledger", ledger, "--verify")
    digest = re.search(r"digest\s+([0-9a-f]{64})", shown)
    assert digest
    assert "verified" in shown
    assert "1 run" in shown
    assert "older copy" in run("ledger", ledger, "--verify", "--digest", "0" * 64, code=2)
    run("ledger", ledger, "--verify", "--digest", digest[1])
    other = tmp_path / "other.ledger"
    Ledger(other, dataset="digits")
    assert "holds no charge" in run("verify", folder, "--ledger", other, code=2)
    of_others = tmp_path / "patients.ledger"
    Ledger(of_others)
    assert "is the ledger of 'patients'" in run("verify", folder, "--ledger", of_others, code=2)
    (folder / "model.pt").write_bytes(b"another")
    assert "not the model" in run("verify", folder, code=2)
    (folder / "model.pt").unlink()
    assert "by SHA-256: model.pt." in run("verify", folder, code=2)
    shutil.rmtree(folder)
    assert "is missing" in run("verify", folder, code=2)
    assert "no ledger at" in run("ledger", tmp_path / "nowhere", code=2)


def test_signatures(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run")
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    private, public, foreign = (
        tmp_path / "key.pem",
        tmp_path / "public.pem",
        tmp_path / "foreign.pem",
    )
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(pem, pkcs8, plain))
    for path, one in ((public, key), (foreign, other)):
        info = serialization.PublicFormat.SubjectPublicKeyInfo
        path.write_bytes(one.public_key().public_bytes(pem, info))
    assert "was not signed" in run("verify", folder, "--public-key", public, code=2)
    assert "signed in" in run("sign", folder, "--key", private)
    assert "certificate.json is signed by this key" in run("verify", folder, "--public-key", public)
    assert "not this key's signature" in run("verify", folder, "--public-key", foreign, code=2)
    edit(folder, lambda d: d["data"].update(name="other"))  # what no plan determines
    run("verify", folder)
    assert "not this key's signature" in run("verify", folder, "--public-key", public, code=2)
    assert "no public Ed25519 key" in run("verify", folder, "--public-key", private, code=2)
    assert "no private Ed25519 key" in run("sign", folder, "--key", public, code=2)
    edit(folder, lambda d: d["guarantee"].update(epsilon=0.1))
    assert "do not trust it" in run("sign", folder, "--key", private, code=2)


def test_a_signature_covers_evaluations_until_there_is_another(tmp_path: Path) -> None:
    folder, key, public = saved(tmp_path / "run"), tmp_path / "key.pem", tmp_path / "public.pem"
    made = Ed25519PrivateKey.generate()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(made.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(made.public_key().public_bytes(pem, info))
    ledger = Ledger(neighboring="zero-out")
    scores = evaluate_classifier(
        np.full((99, 2), 0.5), [0, 1, 1] * 33, classes=[0, 1], epsilon=1.0, ledger=ledger
    )
    event = ledger.entries()[0].event
    found = Evaluation(scores, "h", "hold-out", event, None, "0" * 64, "2026-07-25T14:03:22+02:00")
    keep_evaluation(folder, found, ("no", "yes"))
    run("sign", folder, "--key", key)
    assert "evaluations.json is signed" in run("verify", folder, "--public-key", public)
    path = folder / "evaluations.json"
    good, document = path.read_text(), json.loads(path.read_text())
    document["evaluations"][0]["scores"]["accuracy"]["value"] = 1.0
    path.write_text(json.dumps(with_digest(document)))
    assert "signature of evaluations.json" in run("verify", folder, "--public-key", public, code=2)
    path.write_text(good)
    keep_evaluation(folder, found, ("no", "yes"))
    said = run("verify", folder, "--public-key", public)
    assert "certificate.json is signed" in said
    assert "unchecked evaluations.json: nobody signed it" in said


def test_every_file_of_a_run_is_checked_unchecked_or_unknown(tmp_path: Path) -> None:
    """A schema and a report once passed whatever was written into them, signed or not."""
    folder = tmp_path / "run"
    files = {"schema.toml": "[columns.a]\n", "report.html": f"<p>{NO_EVALUATION}</p>"}
    saved(folder, files={name: sha256_of(text) for name, text in files.items()})
    assert "SHA-256: schema.toml, report.html." in run("verify", folder, code=2)  # once passed
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "notes.txt").write_text("")
    (folder / "private.checkpoint").write_text("")
    said = run("verify", folder)
    counts = [said.count(f"{kind} ") for kind in ("checked", "unchecked", "unknown")]
    counts[0] -= counts[1]
    assert said.startswith("{} checked, {} unchecked, {} unknown, none".format(*counts))
    for name in files:
        assert f"checked {name} is the one that the certificate names" in said
    assert "unknown notes.txt" in said
    assert "unchecked private.checkpoint: of an unfinished run" in said
    for name, text in files.items():
        (folder / name).write_text(f"{text} ")
        assert f"{name} was edited" in run("verify", folder, code=2)
        (folder / name).write_bytes(b"\xff")
        assert f"{name} was edited" in run("verify", folder, code=2)
        (folder / name).write_text(text)
    shown = files["report.html"].replace(BEGIN, f"{BEGIN}accuracy 1")
    (folder / "report.html").write_text(shown)
    assert "its evaluations are not those" in run("verify", folder, code=2)


def of_package(digest: str | None, *, said: bool = True) -> dict[str, Any]:
    """A run by the package with this digest, and whether its basis speaks of that."""
    result = small_run()
    named = {} if digest is None else {SOURCES: digest}
    return {
        "versions": {**result.versions, **named},
        "basis": (*result.basis, PACKAGE) if said else result.basis,
    }


def test_the_package_that_trained_is_compared(tmp_path: Path) -> None:
    own = verify_run(saved(tmp_path, **of_package(digests()[SOURCES])))
    assert any("names this package, dpoptim 0.1.0" in line for line in own.checked)
    assert not any("which package" in line for line in own.open)
    other = verify_run(saved(tmp_path, **of_package("0" * 64)))
    assert not any("names this package" in line for line in other.checked)
    (line,) = (line for line in other.open if "which package" in line)
    assert "0" * 64 in line


def test_an_earlier_versions_certificate_is_verified_and_said_to_name_no_package(
    tmp_path: Path,
) -> None:
    found = verify_run(saved(tmp_path, **of_package(None, said=False)))
    (line,) = (line for line in found.open if "which package" in line)
    assert "of an earlier version, no SHA-256" in line


@pytest.mark.parametrize(
    ("digest", "said", "lacks"),
    [("0" * 64, False, "basis.trusted lacks"), (None, True, "versions lacks 'dpoptim SHA-256'")],
)
def test_nothing_stands_for_the_program_but_a_package_with_its_digest(
    tmp_path: Path, digest: str | None, said: bool, lacks: str
) -> None:
    with pytest.raises(ValueError, match=lacks):
        verify_run(saved(tmp_path, **of_package(digest, said=said)))
