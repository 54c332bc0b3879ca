"""What the gate released stays in ``.grad`` after a step, as in a plain loop, and no longer."""

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.errors import PrivacyError

N = 60


def problem() -> tuple[nn.Sequential, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return model, TensorDataset(torch.randn(N, 4), torch.randint(0, 2, (N,)))


def plan() -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=20, steps=4, noise_multiplier=1.0, delta=1e-3
    )


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def none_of(model: nn.Module) -> bool:
    return all(g is None for g in gradients(model))


@pytest.mark.parametrize("zeroes", [None, True, False], ids=["never", "to none", "in place"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
def test_what_an_optimizer_used_can_be_looked_at_until_the_next_batch(
    zeroes: bool | None, several: bool
) -> None:
    model, data = problem()
    parts: list[nn.Module] = [model[0], model[2]] if several else [model]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    found: list[Tensor] = []
    with dpoptim.attach(plan(), model, optimizers, data) as private:
        optimizers[0].register_step_pre_hook(
            lambda *_: found.extend(g.clone() for g in gradients(model) if g is not None)
        )
        for x, y in private.batches(physical_batch_size=8):
            assert none_of(model), "a batch is there"
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            assert none_of(model), "its sums stay inside"
            found.clear()
            for optimizer in optimizers:
                optimizer.step()
            assert private.finished_step == bool(found)
            for left, used in zip(gradients(model), found, strict=False):
                assert left is not None
                assert torch.equal(left, used)
            for optimizer in optimizers if zeroes is not None else ():
                optimizer.zero_grad(set_to_none=zeroes)
        assert private.steps_done == 4
    assert none_of(model), "the model is left as it was"


def test_zero_grad_frees_the_memory() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            kept = [weakref.ref(g) for g in gradients(model) if g is not None]
            assert len(kept) == 4
            optimizer.zero_grad()
            assert all(each() is None for each in kept)


@pytest.mark.parametrize("other", [torch.ones_like, lambda used: used], ids=["foreign", "used"])
def test_nothing_but_the_release_of_a_step_is_used_in_it(other: Any) -> None:
    """Neither what somebody wrote nor the last step's, put back while a batch is there."""
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        used: Tensor | None = None
        with pytest.raises(PrivacyError, match="'0.weight' has a .grad that did not come"):
            for x, y in private.batches():
                if used is not None:
                    model[0].weight.grad = other(used)
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
                used = model[0].weight.grad
        assert private.steps_done == 1


def test_a_gradient_written_between_steps_is_not_dropped_in_silence() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            if private.steps_done == 1:
                break
            optimizer.step()
            model[0].bias.grad = torch.ones(3)
        with pytest.raises(PrivacyError, match="'0.bias' has a .grad that did not come"):
            optimizer.step()


def test_a_checkpoint_redoes_only_the_update_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two optimizers the first fails after the release, and the second uses its share."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    model, data = problem()
    parts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    ledger = dpoptim.Ledger(tmp_path / "ledger")
    private = dpoptim.attach(plan(), model, parts, data, ledger=ledger)
    x, y = next(iter(private.batches()))
    private.backward(F.cross_entropy(model(x), y, reduction="none"))
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.sgd"], "sgd", fail)
        with pytest.raises(MemoryError):
            parts[0].step()
    parts[1].step()
    before, waits = model[0].weight.detach().clone(), model[0].weight.grad
    assert waits is not None
    assert model[2].weight.grad is not None
    private.save(tmp_path / "secret")
    private.detach()
    again, _ = problem()
    others = [torch.optim.SGD(again[i].parameters(), lr=0.1) for i in (0, 2)]
    private = dpoptim.attach(plan(), again, others, data, ledger=ledger, resume=tmp_path / "secret")
    torch.testing.assert_close(again[0].weight, before - 0.1 * waits)
    assert torch.equal(again[2].weight, model[2].weight)
    assert none_of(again)
    private.detach()


@pytest.mark.filterwarnings("ignore")  # PEFT's and Transformers' own
def test_adalora_takes_ranks_away_by_released_gradients() -> None:
    peft, transformers = map(pytest.importorskip, ("peft", "transformers"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    shrinks = {"init_r": 6, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 1, "total_step": 12}
    model = peft.get_peft_model(
        transformers.BertForSequenceClassification(config),
        peft.AdaLoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS", **shrinks),
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    data = TensorDataset(torch.randint(1, 23, (N, 5)), torch.randint(0, 2, (N,)))
    promised = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=20, steps=12, epsilon=8.0, delta=1e-3
    )
    with dpoptim.attach(promised, model, optimizer, data) as private:
        for step, (x, y) in enumerate(private.batches()):
            private.backward(F.cross_entropy(model(input_ids=x).logits, y, reduction="none"))
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
    ranks = [int(p.count_nonzero()) for name, p in model.named_parameters() if "lora_E" in name]
    assert sum(ranks) == 2 * 2
    assert sum(p.numel() for name, p in model.named_parameters() if "lora_E" in name) == 2 * 6
