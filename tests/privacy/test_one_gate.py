"""Privacy noise is drawn in the gate alone, and charged there alone."""

import re
from pathlib import Path

import dpoptim

SOURCE = Path(dpoptim.__file__).parent
DRAWS = re.compile(
    r"randn|\.normal_\(|standard_normal|torch\.normal|np\.random|default_rng|add_normal|draw_normal_ahead|random\.|torch\.rand\(|(?<!exact_)(?<!sparse_)bernoulli|uniform_|multinomial|urandom|randperm|exponential_(?!choice|mechanism)|randint|rand_like|cauchy_|secrets\.|exponential_choice|torch\.distributions|rng\.normal|noise\.on_device|noise\.kernels|noise\.exact_bernoulli"
)
# Who may draw at all, and what for. Outside noise/ only the gate may call add_normal, and draw
# ahead for it.
ALLOWED = {
    "gate/planned.py": {"add_normal", "draw_normal_ahead"},
    "gate/adaptive.py": {"add_normal", "exponential_choice"},
    "gate/choices.py": {"exponential_choice"},
    "gate/row_selection.py": {"noise.exact_bernoulli"},
    "noise/gaussian.py": None,
    "noise/exponential_mechanism.py": None,
    "noise/exact_bernoulli.py": None,
    "noise/on_device.py": None,
    "noise/kernels.py": None,
    "training/refusals.py": {"noise.on_device"},  # asks whether a device would draw rightly
    "noise/ziggurat.py": None,
    "noise/stream.py": None,
    "noise/__init__.py": None,
    "noise/correlated/strategy.py": {"standard_normal"},  # started by the gate alone, see below
    "noise/correlated/redrawn.py": {"standard_normal", "add_normal"},
    "gradients/graphed_pass.py": {"random."},  # has what is drawn be drawn once more
    "reproduce/fang_synthetic.py": {"randn"},  # made-up problems
    "reproduce/srgd_problem.py": {"np.random", "default_rng"},  # made-up problems
    "reproduce/srgd_rates.py": {"np.random", "default_rng"},  # bootstrap
    "reproduce/one_pass.py": {"np.random", "default_rng"},  # shuffles public data
    "files.py": {"secrets."},  # names of temporary files
    "data/large_arrays.py": {"secrets."},  # the name of a temporary file
    "runs/predict.py": {"secrets."},  # the name of a temporary file
    "training/checkpoints/checkpoint.py": {"urandom"},  # nonces of sealed checkpoints
    "training/batches/slot_places.py": {"random."},  # fork_rng, around a trial of collating
    "training/trials/made_up_records.py": {"randn", "randint"},  # made-up records
    "training/trials/made_up_batches.py": {"randn", "randint"},
    "training/batches/records.py": {"randn", "randint"},  # made-up records for testing the loss
    "training/trials/isolation_trials.py": {"randn"},  # weights of made-up records
    # names of operators whose results it fixes
    "training/randomness/drawing_collates.py": {"random."},
    "training/trials/fixed_noise.py": {"bernoulli", "randperm", "random."},
    "runtime/dispatch_internals.py": {"bernoulli", "multinomial"},
    # what not to draw from, in a message
    "training/trials/loss_refusals.py": {"torch.rand(", "random.", "np.random"},
    "training/trials/deterministic_runs.py": {
        "random."
    },  # torch.random.fork_rng: leaves the user's generator alone
    "runtime/torch_features.py": {
        "random.",
        "bernoulli",
        "torch.rand(",
        "rand_like",
    },  # the same, where layers
    # are made to be tried; and what random operators return is replaced
    "training/randomness/secret_randomness.py": {"random."},  # dropout and augmentation
    "training/randomness/generators.py": {
        "random.",
        "np.random",
    },  # states, which nothing is drawn from
    "evaluation/intervals.py": {
        "default_rng",
        "np.random",
        "standard_normal",
        "multinomial",
    },  # a bootstrap of released numbers
    # looks at what they would be given
    "audit/statistics.py": {"add_normal", "exponential_choice"},
    "audit/replay.py": {"np.random", "random."},  # seeds the global generators and restores them
    # coins of the canaries; restores the global generators
    "audit/one_run.py": {"default_rng", "np.random", "random."},
    "audit/two_worlds.py": {"default_rng", "np.random"},  # coins of the canaries
    "audit/min_separation.py": {
        "default_rng",
        "np.random",
        "standard_normal",
    },  # simulates the claim
    "audit/banded.py": {
        "default_rng",
        "np.random",
        "standard_normal",
    },  # simulates the claim; parts of canaries that are not there
    # Monte Carlo of an event's cost, from a public seed
    "accounting/monte_carlo.py": {"default_rng", "np.random"},
    "accounting/balls_in_bins.py": {"standard_normal"},
    "accounting/replicas.py": {"np.random"},
    "accounting/min_separation.py": {"standard_normal"},
    "audit/sensitivity.py": {"randn"},  # adversarial records
    # made-up lookups, and a model's first weights
    "audit/selected_rows.py": {"randint", "random."},
    "audit/detectors.py": {"randn", "random."},  # made-up data
    "audit/raw_data.py": {"default_rng", "np.random"},  # made-up images
    # seeds as a program would, and restores the generators
    "audit/isolation.py": {"random.", "uniform_"},
    "audit/refused_loops.py": {"uniform_", "torch.rand("},  # what is to be refused draws noise
    # looks at the draws; restores the global generators
    "audit/noise.py": {"standard_normal", "random."},
    "data/views.py": {"randint"},  # by how much an image is moved
    "data/dataset.py": {"np.random", "default_rng", "random."},  # the split of public data
    "reproduce/kl_losses.py": {"randn", "random."},  # made-up data, and a network's first weights
    "reproduce/dice_cases.py": {"random."},  # a network's first weights
    "reproduce/das_networks.py": {"random."},  # a network's first weights
    "reproduce/das_baselines.py": {"randperm"},  # shuffles public data, without privacy
    "reproduce/user_data.py": {"randperm"},  # shuffles public data
    "reproduce/dice_pretrained.py": {"random."},  # a new head's first weights
    # a network's first weights; shuffles public data
    "reproduce/fang.py": {"random.", "randperm"},
    # first weights; shuffles public data, which a model learns without privacy beforehand
    "reproduce/dice_texts.py": {"random.", "randperm"},
    "reproduce/dice_vit.py": {"random.", "randperm"},
    "audit/method_detectors.py": {"randn"},  # made-up weights
    "estimators/network_fit.py": {"random.", "randint"},  # a network's first weights
    "training/trials/memory.py": {"random."},  # fork_rng, so that trial passes leave no trace
    "runs/train_without_privacy.py": {
        "randperm"
    },  # shuffles public data for the comparison without privacy
}
# Only the checkpoint of a run asks for secrets, and only what has some answers.
HOLD_SECRETS = {
    "audit/banded.py",  # an attacker who is told the parts
    "audit/refunds.py",  # an attacker who kills runs and takes them up
    "audit/resumed_runs.py",  # takes runs up by another strategy
    "methods/sensitive_state.py",
    "methods/error_feedback.py",
    "training/batches/microbatches.py",
    "training/private_training.py",
    "training/steps.py",
}


EXAMPLE = re.compile(r"^ +(>>>|\.\.\.) .*\n", re.MULTILINE)  # a user's program, in a docstring


def sources() -> dict[str, str]:
    return {
        str(path.relative_to(SOURCE)): EXAMPLE.sub("", path.read_text())
        for path in SOURCE.rglob("*.py")
    }


def test_random_draws_have_one_home() -> None:
    for name, text in sources().items():
        allowed = ALLOWED.get(name, set())
        found = set() if allowed is None else set(DRAWS.findall(text)) - allowed
        assert not found, f"{name} draws random numbers: {sorted(found)}"


def test_only_the_gate_charges() -> None:
    for name, text in sources().items():
        if not name.startswith("accounting/ledger"):
            assert not re.search(r"ledger\.(reserve|commit|resume|end)\(", text), name
            assert name.startswith("gate/") or not re.search(r"\bCharge\(", text), name


def test_only_what_charges_for_all_ranks_works_as_if_there_were_no_others() -> None:
    """A search reserves for the trials of all ranks before the first, a pipeline is fitted on rank
    0, a run's hold-out is scored in the process that keeps its ledger: anywhere else each rank
    would release, and charge, anew.
    """
    asks = {
        name for name, text in sources().items() if re.search(r"\balone\(\):|_alone\.set", text)
    }
    assert asks == {
        "distributed/ledger_of_ranks.py",
        "gate/one_process.py",
        "preprocessing/pipeline.py",
        "tuning/search.py",
    }


def test_only_the_gate_starts_correlated_noise() -> None:
    for name, text in sources().items():
        if not name.startswith("noise/correlated/") and name != "gate/planned.py":
            assert not re.search(
                r"\.start\([^)]|[A-Z]\w*(?<!Sensitive)State\(|_correlated", text
            ), name
            if name not in HOLD_SECRETS:
                assert "secret_state" not in text, name
    assert "strategy.start(" in sources()["gate/planned.py"]


def test_the_gate_itself_is_found_by_these_searches() -> None:
    """A search that can find nothing proves nothing."""
    for name in ("gate/planned.py", "gate/adaptive.py"):
        assert "add_normal" in DRAWS.findall(sources()[name])
        assert re.search(r"\bCharge\(", sources()[name])
    assert re.search(r"ledger\.(reserve|commit)\(", sources()["accounting/ledger_charge.py"])
