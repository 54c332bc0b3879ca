"""Problems: a module through the recorder and a linear model in closed form say the same, and
bound each record.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.solvers import Budget, Objective, select_stationary
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.problem import LinearProblem, ModuleProblem
from support import CASES, Case, record_loss


def truth(
    model: nn.Module, x: Tensor, y: Tensor, terms: list[tuple[float, Tensor]], bound: float
) -> Tensor:
    """Record by record, by autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for i in range(len(x)):
        combined = torch.zeros_like(total)
        for c, w in terms:
            torch.nn.utils.vector_to_parameters(w.to(parameters[0].dtype), parameters)
            loss = record_loss(model(x[i : i + 1]), y[i : i + 1]).sum()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            filled = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(parameters, gradients, strict=True)
            ]
            combined += c * torch.cat([g.double().flatten() for g in filled])
        total += combined * min(1.0, bound / max(float(combined.norm()), 1e-300))
    return total


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_combinations_are_those_of_autograd_for_every_layer(case: Case) -> None:
    torch.manual_seed(1)
    model = case.build().double()
    x, y = case.inputs(5, torch.float64)
    problem = ModuleProblem(model, record_loss, capacity=5)
    w = problem.initial()
    terms = [(1.0, w + 0.05 * torch.randn_like(w)), (-1.0, w)]
    for bound in (0.02, 1e3):
        ours = problem.clipped_sum((x, y), terms, bound)
        expected = truth(case.build().double(), x, y, terms, bound)
        assert float((ours - expected).norm()) <= 1e-5 * float(expected.norm())


def test_a_linear_module_and_the_closed_form_agree() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 6, dtype=torch.float64), torch.randint(0, 4, (30,))
    module = nn.Linear(6, 4).double()
    hooked = ModuleProblem(
        module, lambda s, t: F.cross_entropy(s, t, reduction="none"), capacity=30
    )
    closed = LinearProblem(LinearModel("softmax", features=6, outputs=4), capacity=30)
    w, v = torch.randn(28, dtype=torch.float64), torch.randn(28, dtype=torch.float64)

    def in_module_order(w: Tensor) -> Tensor:
        return torch.cat([w.view(4, 7)[:, :6].flatten(), w.view(4, 7)[:, 6]])

    terms = [(1.0, w), (-0.5, v)]
    ours = closed.clipped_sum(closed.prepare((x, y)), terms, 0.3)
    theirs = hooked.clipped_sum((x, y), [(c, in_module_order(p)) for c, p in terms], 0.3)
    # their margins differ
    torch.testing.assert_close(in_module_order(ours), theirs, rtol=1e-4, atol=1e-8)
    assert closed.total_loss((x, y), w) == pytest.approx(
        hooked.total_loss((x, y), in_module_order(w))
    )


def test_the_penalty_is_public_and_leaves_out_intercepts() -> None:
    problem = LinearProblem(LinearModel("squared", features=2, outputs=2), capacity=1, l2=0.5)
    w = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)
    assert problem.penalty_gradient(w).tolist() == [0.5, 1.0, 0.0, 2.0, 2.5, 0.0]
    assert problem.penalty(w) == 0.25 * (1 + 4 + 16 + 25)


def test_the_callers_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    problem = ModuleProblem(model, lambda s, t: (s - t).square().sum(1), capacity=4)
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    w = problem.initial()
    first = problem.clipped_sum(batch, [(1.0, w + 1), (-1.0, w)], 1.0)
    assert first.equal(problem.clipped_sum(batch, [(1.0, w + 1), (-1.0, w)], 1.0)), "dropout is off"
    assert model.training
    assert "forward" not in vars(model[0])
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e38, 0.0])
def test_one_record_moves_a_modules_sum_by_no_more_than_the_bound(value: float) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    problem = ModuleProblem(model, lambda s, t: (s[:, 0] - t).square(), capacity=16)
    w = problem.initial()
    x, y = torch.randn(16, 4), torch.randn(16)
    other = x.clone()
    other[3] = value
    for terms in ([(1.0, w)], [(1.0, w + 0.1), (-1.0, w)]):
        for bound in (1e-8, 0.2):
            total = problem.clipped_sum((x, y), terms, bound)
            without = problem.clipped_sum(
                (torch.cat([x[:3], x[4:]]), torch.cat([y[:3], y[4:]])), terms, bound
            )
            changed = problem.clipped_sum((other, y), terms, bound)
            assert bool(torch.isfinite(changed).all())
            assert float((total - without).norm()) <= bound
            assert float((changed - without).norm()) <= bound


class Counting(nn.Module):
    """Keeps a statistic of its inputs, which later records would see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        return self.layer(x) * self.seen


def test_modules_whose_records_could_see_each_other_are_refused() -> None:
    batch = (torch.randn(4, 4), torch.randn(4))
    with pytest.raises(PrivacyError, match="buffer"):
        problem = ModuleProblem(Counting(), record_loss, capacity=4)
        problem.clipped_sum(batch, [(1.0, problem.initial())], 1.0)
    with pytest.raises(PrivacyError, match="batch"):
        by_batch = nn.BatchNorm1d(4, track_running_stats=False)
        ModuleProblem(nn.Sequential(nn.Linear(4, 4), by_batch), record_loss, capacity=4)


def test_statistics_that_are_held_are_a_map_of_each_record() -> None:
    """Copies run in evaluation mode, in which a batch normalisation looks at no batch."""
    x, y = torch.randn(4, 4), torch.randn(4)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    problem = ModuleProblem(module, record_loss, capacity=4)
    terms = [(1.0, problem.initial())]
    together = problem.clipped_sum((x, y), terms, 0.1)
    alone = [problem.clipped_sum((x[i : i + 1], y[i : i + 1]), terms, 0.1) for i in range(4)]
    torch.testing.assert_close(together, sum(alone[1:], alone[0]))


@pytest.mark.parametrize(
    "wrong", [{"capacity": 0}, {"capacity": 2.5}, {"l2": -1.0}, {"l2": float("nan")}]
)
def test_wrong_settings_are_refused_by_name(wrong: dict) -> None:
    for make in (
        lambda **k: LinearProblem(LinearModel("squared", features=2), **k),
        lambda **k: ModuleProblem(nn.Linear(2, 1), record_loss, **k),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make(**{"capacity": 4, **wrong})


def test_a_stationary_point_of_a_network_is_found() -> None:
    """Whose loss is not convex: the case that Theorem 5 of Menart et al. is for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    problem = ModuleProblem(model, lambda s, t: (s[:, 0] - t).square(), capacity=2_000)
    x = torch.randn(2_000, 4)
    data = (x, torch.tanh(x[:, 0]))
    result = select_stationary(
        Objective(problem, data),
        None,
        Budget(delta=1e-6, epsilon=8.0),
        lipschitz=2.0,
        smoothness=4.0,
        noise_seed=0,
    )

    def slope(w: Tensor) -> float:
        return float(problem.clipped_sum(data, [(1.0, w)], 1e6).norm()) / 2_000

    assert result.guarantee.epsilon <= 8.0
    assert slope(result.weights) < slope(problem.initial()) / 5
