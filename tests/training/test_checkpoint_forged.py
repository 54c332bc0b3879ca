"""Checkpoints that were changed, or are taken up too often: the charge covers each release
once.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import DPSGD, Ledger, LedgerError
from dpoptim.accounting import ledger_charge
from dpoptim.gate import Gate
from dpoptim.training.checkpoints.checkpoint import PLAIN
from dpoptim.training.private_training import PrivateTraining

STEPS = 6
KEY = bytes(range(32))


def begin(**options: Any) -> tuple[PrivateTraining, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = DPSGD(1.0).plan(n=40, batch_size=10, steps=STEPS, noise_multiplier=2.0, delta=1e-5)
    return dpoptim.attach(plan, model, optimizer, data, **options), model, optimizer


def train(
    private: PrivateTraining, model: nn.Module, optimizer: torch.optim.Optimizer, until: int = STEPS
) -> None:
    for x, y in private.batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if private.steps_done == until:
            return


def saved_after(steps: int, folder: Path, **options: Any) -> tuple[Path, Ledger]:
    path, ledger = folder / "run.secret", Ledger(folder / "ledger")
    private, model, optimizer = begin(ledger=ledger, **options)
    train(private, model, optimizer, steps)
    private.save(path)
    private.detach()
    return path, ledger


def forge(path: Path, **changes: Any) -> None:
    """Change entries, and make the checksum right again."""
    contents = torch.load(io.BytesIO(path.read_bytes().partition(b"\n")[2]), weights_only=True)
    for name, value in changes.items():
        if name in contents["gate"]:
            contents["gate"][name] = value
        else:
            contents[name] = value
    write(path, contents)


def write(path: Path, contents: object) -> None:
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    body = buffer.getvalue()
    path.write_bytes(PLAIN + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def test_one_checkpoint_makes_one_model(tmp_path: Path) -> None:
    """Five resumes without `with` once gave five complete models on one charge."""
    path, ledger = saved_after(2, tmp_path)
    finished = 0
    for _ in range(5):
        try:
            private, model, optimizer = begin(ledger=ledger, resume=path)
        except LedgerError:
            continue
        train(private, model, optimizer)
        private.detach()
        finished += 1
    assert finished == 1
    (entry,) = ledger.entries()
    assert (entry.state, entry.resumed, entry.repeated) == ("committed", 1, 0)


def test_two_processes_do_not_complete_one_run(tmp_path: Path, monkeypatch: Any) -> None:
    """Releases are announced several at a time; the last one asks whether the run goes on
    elsewhere.
    """
    monkeypatch.setattr(ledger_charge, "ANNOUNCEMENTS", 1)  # all at once
    path, _ = saved_after(2, tmp_path)
    slow, fast = (begin(ledger=Ledger(tmp_path / "ledger"), resume=path) for _ in range(2))
    train(*slow, until=4)
    train(*fast)
    with pytest.raises(LedgerError, match="completed"):
        train(*slow)
    assert (fast[0].steps_done, slow[0].steps_done) == (STEPS, STEPS - 1)
    for private, _, _ in (slow, fast):
        private.detach()


def test_a_run_that_is_taken_up_during_its_last_release_completes_once(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Between the ledger's answer and the mark of completion somebody else goes on, and ends."""
    path, _ = saved_after(2, tmp_path)
    slow, fast = (begin(ledger=Ledger(tmp_path / "ledger"), resume=path) for _ in range(2))
    train(*slow, until=STEPS - 1)
    honest, meanwhile = Gate._add_noise, [fast]

    def add_noise(gate: Gate, sums: Any) -> None:
        if meanwhile:
            train(*meanwhile.pop())
        honest(gate, sums)

    monkeypatch.setattr(Gate, "_add_noise", add_noise)
    before = slow[1].weight.clone()
    with pytest.raises(LedgerError, match="taken up from a checkpoint meanwhile"):
        train(*slow)
    assert torch.equal(slow[1].weight, before)  # nothing of it left the gate
    assert (fast[0].steps_done, slow[0].steps_done) == (STEPS, STEPS - 1)
    for private, _, _ in (slow, fast):
        private.detach()


def test_parts_that_are_done_again_are_counted(tmp_path: Path) -> None:
    path, ledger = saved_after(2, tmp_path)
    for until in (4, 5, 3):
        private, model, optimizer = begin(ledger=ledger, resume=path)
        train(private, model, optimizer, until)
        private.detach()  # as if killed
    (entry,) = ledger.entries()
    assert entry.repeated == 2 + 3
    assert "up to 5 releases made again" in ledger.describe()


@pytest.mark.parametrize(
    "changes",
    [
        {"released": -100, "steps_done": -100},
        {"released": 0, "steps_done": 0},
        {"released": 1, "steps_done": 1},
        {"released": STEPS + 1, "steps_done": STEPS + 1},
        {"released": True, "steps_done": True},
        {"released": 2.0, "steps_done": 2.0},
        {"released": 1},
        {"steps_done": 0},
        {"model": None},
        {"gate": None},
        {"optimizers": {}},
        {"extra": 1},
        {"model": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}},
    ],
    ids=str,
)
def test_a_changed_checkpoint_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path, ledger = saved_after(2, tmp_path)
    forge(path, **changes)
    with pytest.raises((ValueError, LedgerError), match="^resume: .*Fix: ") as refused:
        begin(ledger=ledger, resume=path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("contents", [None, 3, [1, 2], {"gate": 1}])
def test_what_is_no_mapping_does_not_start_afresh(tmp_path: Path, contents: object) -> None:
    path = tmp_path / "run.secret"
    write(path, contents)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        begin(resume=path)


def test_bytes_that_no_unpickler_reads(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    for body in (b"", b"PK", b"\x80\x02junk", b"(" * 100_000):
        path.write_bytes(PLAIN + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        with pytest.raises(ValueError, match="holds no checkpoint"):
            begin(resume=path)


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path, ledger = saved_after(2, tmp_path)
    private, model, optimizer = begin(ledger=ledger)
    train(private, model, optimizer, 3)
    private.save(tmp_path / "other.secret")
    other = private.reservation
    private.detach()
    forge(path, reservation=other)
    with pytest.raises(LedgerError, match="knows of no such checkpoint"):
        begin(ledger=ledger, resume=path)


def test_a_sealed_checkpoint(tmp_path: Path) -> None:
    path, ledger = saved_after(2, tmp_path, checkpoint_key=KEY)
    content = path.read_bytes()
    assert b"momentum" not in content
    assert b"parameters" not in content
    with pytest.raises(ValueError, match="is sealed with a key. Fix: give the checkpoint_key"):
        begin(ledger=ledger, resume=path)
    with pytest.raises(ValueError, match="another key, or changed"):
        begin(ledger=ledger, resume=path, checkpoint_key=bytes(32))
    with pytest.raises(ValueError, match="must be 32 bytes"):
        begin(ledger=ledger, resume=path, checkpoint_key=b"short")
    head, _, body = content.partition(b"\n")
    changed = body[:-1] + bytes([body[-1] ^ 1])
    path.write_bytes(head[:-64] + hashlib.sha256(changed).hexdigest().encode() + b"\n" + changed)
    with pytest.raises(ValueError, match="another key, or changed"):
        begin(resume=path, checkpoint_key=KEY)
    path.write_bytes(content)
    private, model, optimizer = begin(ledger=ledger, resume=path, checkpoint_key=KEY)
    train(private, model, optimizer)
    private.detach()
    assert ledger.entries()[0].state == "committed"


def test_a_plain_checkpoint_does_not_pass_for_a_sealed_one(tmp_path: Path) -> None:
    path, ledger = saved_after(2, tmp_path)
    with pytest.raises(ValueError, match="not sealed"):
        begin(ledger=ledger, resume=path, checkpoint_key=KEY)
