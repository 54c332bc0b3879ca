"""Parts of the five papers, and where each is here: the rows of the documentation's page."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dpoptim.optimizers import OPTIMIZERS
from dpoptim.registry import entry, method_names
from dpoptim.reproduce.experiments import EXPERIMENTS

NOTHING = "-"


@dataclass(frozen=True)
class Item:
    """One algorithm, theorem, table or figure.

    Attributes:
        paper: authors and year.
        name: such as "Algorithm 1".
        about: in a few words.
        method: its name in the registry, if it is an algorithm that is a method of its own.
        options: how the method is set to be this algorithm, beside its clip norm.
        optimizer: that it is trained by; None: any, SGD unless one is named.
        quantile: by which the clip norm is found privately; None: it is given.
        theory: the function that computes it, below ``dpoptim``.
        experiment: its name for `dpoptim reproduce`.
        folders: options that give it data.
        instead: where there is no experiment: what stands in its place, or why there is none.
        elsewhere: why neither estimators nor the command line have it, where ``attach`` does; or
            why nothing has it.

    Cells in backquotes are code and options as they are to be written, but for a budget and data.
    """

    paper: str
    name: str
    about: str
    method: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    quantile: float | None = None
    theory: str | None = None
    experiment: str | None = None
    folders: tuple[str, ...] = ()
    instead: str = ""
    elsewhere: str = ""

    def row(self) -> list[str]:
        """Return the cells of one line.

        Of a method: paper, item, through ``attach``, estimator, command line, reproduced. Else:
        paper, item, the function that computes it, reproduced.

        Raises:
            ValueError: an experiment or a method that is not there.
        """
        if self.experiment is not None and self.experiment not in EXPERIMENTS:
            raise ValueError(f"experiment={self.experiment!r} is none of dpoptim reproduce.")
        options = "".join(f" --{option} FOLDER" for option in self.folders)
        made = f"`dpoptim reproduce {self.experiment}{options}`" if self.experiment else ""
        reproduced = "; ".join(part for part in (made, self.instead) if part)
        head = [self.paper, f"{self.name}: {self.about}"]
        return [*head, *self._doors(), reproduced]

    @property
    def is_a_method(self) -> bool:
        """Whether anything is trained by it."""
        return self.method is not None or (self.theory or "").startswith("solvers.")

    def _doors(self) -> list[str]:
        if not self.is_a_method:
            return [f"`dpoptim.{self.theory}`" if self.theory else self.elsewhere or NOTHING]
        if self.method is None:
            made = f"a whole run: `dpoptim.{self.theory}`, also on modules"
            return [made, self.elsewhere, self.elsewhere]
        if self.method not in method_names():
            raise ValueError(f"method={self.method!r} is not in the registry.")
        made, trained, command = self._solver() if entry(self.method).solver else self._steps()
        return [made, *([self.elsewhere] * 2 if self.elsewhere else [trained, command])]

    def _solver(self) -> tuple[str, str, str]:
        name = str(self.method)
        return (
            f"a whole run: `dpoptim.solvers.{name.replace('-', '_')}`, also on modules",
            f'`DPLogisticRegression(solver="{name}")`',
            f"`--method {name}`",
        )

    def _steps(self) -> tuple[str, str, str]:
        """Return what trains step by step, as it is given to each."""
        name, made = str(self.method), entry(str(self.method)).make.__name__
        clip_norm = "1.0" if self.quantile is None else f"PrivateQuantile({self.quantile})"
        given = [f'{key}="{value}"' for key, value in self.options.items()]
        told = [f'"{key}": "{value}"' for key, value in self.options.items()]
        line = [f"--method {name}", *(f"--set {key}={word}" for key, word in self.options.items())]
        if self.quantile is not None:
            told.append(f'"clip_norm": {clip_norm}')
            line.append(f"--clip-quantile {self.quantile}")
        options = f", method_options={{{', '.join(told)}}}" if told else ""
        beside = ""
        if self.optimizer is not None:
            options += f', optimizer="{self.optimizer}"'
            line.append(f"--optimizer {self.optimizer}")
            beside = f", with `{OPTIMIZERS[self.optimizer].path.replace(':', '.')}`"
        return (
            f"`{made}({', '.join([f'clip_norm={clip_norm}', *given])})`{beside}",
            f'`DPSGDClassifier(method="{name}"{options})`',
            f"`{' '.join(line)}`",
        )


DAS, FANG, ZHANG = "Das et al. 2023", "Fang et al. 2023", "Zhang et al. 2024"
MENART, CHOQUETTE = "Menart et al. 2024", "Choquette-Choo et al. 2024"
UNMEASURED = "not measured here, as it is in no package"
ITEMS = (
    Item(DAS, "Algorithm 1", "DP-SGD", "dp-sgd", experiment="das-table6",
         instead="there the mean of the last iterates; a random one and the projection are "
         "`attach(random_iterate=True, projection=...)`, `iterate=` and `projection=` of "
         "estimators, `--iterate` and `--projection`"),
    Item(DAS, "Section 5", "a private low quantile as clip norm", "dp-sgd", quantile=0.05,
         experiment="das-table6",
         instead="there by the exponential mechanism, `dpoptim.private_low_quantile`"),
    Item(DAS, "Theorem 3.4", "moments accountant", instead="replaced by PLD, which is tighter"),
    Item(DAS, "Theorem 5.4, H.1", "risk by clip norm", theory="theory.clip_norm.risk_terms",
         experiment="das-table6"),
    Item(DAS, "Theorem I.1", "heavy tails, constrained",
         theory="theory.clip_norm.constrained_heavy_tailed", instead="computed"),
    Item(DAS, "Theorem I.3", "lower bound, constrained", theory="theory.clip_norm.optimal_orders",
         instead="its order, computed"),
    Item(DAS, "Theorem 6.2, J.1", "heavy tails, unconstrained",
         theory="theory.clip_norm.unconstrained_heavy_tailed", instead="computed"),
    Item(DAS, "Theorem 6.5, K.1", "heavy tails, Assumption 6.4",
         theory="theory.clip_norm.improved_heavy_tailed", instead="computed"),
    Item(DAS, "Theorem 6.6, L.1", "lower bound", theory="theory.clip_norm.optimal_orders",
         instead="its order, computed"),
    Item(DAS, "Corollary 6.7", "uniform Lipschitz constants",
         theory="theory.clip_norm.optimal_orders", instead="its order, computed: k infinite"),
    Item(DAS, "Theorem 6.8", "nonconvex losses", theory="theory.clip_norm.nonconvex_orders",
         instead="its orders, computed"),
    Item(DAS, "Table 1, 2", "summary of rates", theory="theory.clip_norm.optimal_orders",
         instead="computed"),
    Item(DAS, "Table 3", "with and without a private estimate", experiment="das-table4",
         folders=("features",),
         instead=f"{UNMEASURED}; Fashion-MNIST has such rows: `dpoptim reproduce das-table6`"),
    Item(DAS, "Table 4, Figure 1", "Caltech-256, Food-101, CIFAR-100", experiment="das-table4",
         folders=("features",), instead=UNMEASURED),
    Item(DAS, "Table 5", "CIFAR-10, TweetEval", experiment="das-table5",
         folders=("tweets", "features"), instead=f"CIFAR-10 {UNMEASURED}"),
    Item(DAS, "Table 6, Figure 2", "EMNIST, Fashion-MNIST", experiment="das-table6",
         instead=f"Fashion-MNIST; with `--emnist FOLDER` EMNIST, {UNMEASURED}"),
    Item(DAS, "Tables 4 to 6, last lines", "without privacy", experiment="das-baselines",
         folders=("tweets",),
         instead="TweetEval and Fashion-MNIST; with `--features FOLDER`, `--emnist FOLDER` the "
         f"others, {UNMEASURED}"),
    Item(DAS, "Table 7, Figure 3", "networks of two layers", experiment="das-table7",
         instead="on Fashion-MNIST; with `--features FOLDER`, `--emnist FOLDER` on CIFAR-100 and "
         f"EMNIST, {UNMEASURED}"),
    Item(FANG, "Algorithm 1", "clipped DP-SGD", "dp-sgd", experiment="fang-fig1"),
    Item(FANG, "Algorithm 3", "value clipping", "value-sgd", experiment="fang-fig2"),
    Item(FANG, "Algorithms 2, 4", "SGD without clipping", instead="in proofs alone",
         elsewhere="not private"),
    Item(FANG, "Theorem 3.4, Corollary 5.1", "moments accountant",
         instead="replaced by PLD, which is tighter"),
    Item(FANG, "Definition 3.1, Lemma 3.2", "weak growth condition",
         theory="theory.clip_norm.growth_bound", instead="computed"),
    Item(FANG, "Theorem 4.5", "rate for smooth convex losses", experiment="fang-theorem",
         theory="theory.clip_norm.smooth_settings", instead="on made-up data"),
    Item(FANG, "Propositions 4.2 to 4.4", "steps towards Theorem 4.5",
         theory="theory.clip_norm.smooth_settings", instead="their bound on gradients is its C"),
    Item(FANG, "Table 1", "comparison of rates", theory="theory.clip_norm.smooth_orders",
         instead="its own line, computed; the others are other papers'"),
    Item(FANG, "Figure 1", "how often gradients are clipped", experiment="fang-fig1"),
    Item(FANG, "Figure 2, 3", "value against gradient clipping", experiment="fang-fig2"),
    Item(FANG, "Table 2", "time of a step", experiment="fang-table2"),
    Item(FANG, "Figure 4", "made-up data", experiment="fang-fig4"),
    Item(FANG, "Figure 5", "other budgets", experiment="fang-fig5",
         instead="a linear model on 10,000 images of Fashion-MNIST"),
    Item(ZHANG, "Algorithm 1", "clipped DP-SGD", "dp-sgd", experiment="dice-table2"),
    Item(ZHANG, "Algorithm 2", "error feedback", "dice-sgd", experiment="dice-table2"),
    Item(ZHANG, "Algorithm 3", "with Adam", "dice-sgd", optimizer="adam",
         experiment="dice-table3", instead="by AdamW"),
    Item(ZHANG, "Algorithm 4", "automatic clipping", "dice-sgd", options={"clipping": "automatic"},
         instead="refuted as printed by the audits; ours passes them"),
    Item(ZHANG, "Theorem 2.3", "moments accountant", instead="replaced by PLD, which is tighter"),
    Item(ZHANG, "Theorem 3.6, A.2", "convergence", experiment="dice-bias",
         theory="theory.error_feedback.stationarity_bound", instead="its fixed point, seen"),
    Item(ZHANG, "Theorem 3.7, A.3", "its guarantee", "dice-sgd", options={"accounting": "paper"},
         instead="false: refuted by the audits, and printed as unproven"),
    Item(ZHANG, "Corollary 3.8", "utility", theory="theory.error_feedback.proven_stationarity",
         instead="computed with proven noise; as printed it rests on Theorem 3.7, which is false"),
    Item(ZHANG, "Table 1", "comparison of rates", theory="theory.error_feedback.published_rates",
         instead="computed as printed; rests on Theorem 3.7, which is false"),
    Item(ZHANG, "Figure 1, Table 4", "a diagram, and a list of symbols", instead="nothing to run",
         elsewhere="an explanation, not a method"),
    Item(ZHANG, "Table 2", "fine-tuning a ViT on CIFAR", experiment="dice-vit",
         instead="a small ViT that has learnt other classes of Fashion-MNIST; with `--cifar FOLDER "
         f"--model FOLDER` the paper's, {UNMEASURED}"),
    Item(ZHANG, "Table 3, Figure 4", "GPT-2 on E2E", experiment="dice-table3", folders=("e2e",),
         instead="a small GPT that has learnt a part of E2E; with `--model FOLDER` GPT-2, "
         f"{UNMEASURED}"),
    Item(ZHANG, "Figure 2", "C1 by C2", experiment="dice-fig2"),
    Item(ZHANG, "Figure 3", "C1 by step size", experiment="dice-fig3"),
    Item(ZHANG, "Figure 5", "C1 by step size on E2E", experiment="dice-fig5",
         folders=("e2e",), instead="a GPT of one narrow layer"),
    Item(MENART, "Algorithm 1, Theorem 1", "KL-Spider", "kl-spider", experiment="kl-rates"),
    Item(MENART, "Algorithm 2, Theorem 2", "proximal point", "proximal-point",
         experiment="kl-real", instead="on real data; its rate is not measured"),
    Item(MENART, "Algorithm 3, Theorem 3, 4", "adaptive gradient descent", "adaptive-gd",
         experiment="kl-rates"),
    Item(MENART, "Algorithm 4, Theorem 9", "noisy gradient descent", "noisy-gd",
         experiment="kl-real", instead="on real data; its rate is not measured"),
    Item(MENART, "Theorem 5", "stationary points", theory="solvers.select_stationary",
         experiment="kl-real",
         elsewhere="linear models' losses are convex: their one stationary point is the minimum"),
    Item(MENART, "Corollary 1", "lower bound, kappa up to 2",
         theory="theory.kl_condition.lower_bound_rate", instead="its order, computed"),
    Item(MENART, "Theorem 6", "lower bound under growth",
         theory="theory.kl_condition.growth_lower_bound", instead="its order, computed"),
    Item(MENART, "Theorem 7", "lower bound without constraints",
         theory="theory.kl_condition.convex_lower_bound", instead="its order, computed"),
    Item(MENART, "Theorem 8", "lower bound, kappa of 2 and more",
         theory="theory.kl_condition.steep_lower_bound", instead="computed, with its constant"),
    Item(CHOQUETTE, "Algorithm 1", "accelerated DP-SRGD", "accelerated-srgd",
         experiment="srgd-rates"),
    Item(CHOQUETTE, "Theorem 4.1, 5.1", "excess risk",
         theory="theory.accelerated_srgd.excess_risk_bound", instead="computed"),
    Item(CHOQUETTE, "Theorem 4.2, Table 1", "the optimal rate, and gradients needed for it",
         theory="theory.accelerated_srgd.optimal_rate", experiment="srgd-rates"),
    Item(CHOQUETTE, "Corollaries 5.7, 5.10, 5.11", "privacy by the tree mechanism",
         instead="replaced: differences are clipped, and one Gaussian is charged exactly"),
    Item(CHOQUETTE, "Theorem 5.8, Eq. 19", "settings inside the set",
         theory="theory.accelerated_srgd.minimiser_inside", instead="computed"),
    Item(CHOQUETTE, "Theorem 5.12", "settings anywhere",
         theory="theory.accelerated_srgd.minimiser_anywhere", instead="computed"),
    Item(CHOQUETTE, "Theorem 5.13", "independent gradients",
         theory="theory.accelerated_srgd.independent_excess_risk_bound", experiment="srgd-rates"),
    Item(CHOQUETTE, "Introduction", "one pass against DP-SGD and DP-FTRL", experiment="one-pass"),
)  # fmt: skip


def table() -> str:
    """Return the tables of the documentation, in Markdown: of what runs, and of the rest."""
    doors = ["`attach`", "estimator", "command line"]
    methods = [item.row() for item in ITEMS if item.is_a_method]
    others = [item.row() for item in ITEMS if not item.is_a_method]
    return "\n\n".join(
        [
            "## Methods",
            _lines(["paper", "item", *doors, "reproduced"], methods),
            "## Theorems, tables and figures",
            _lines(["paper", "item", "computed by", "reproduced"], others),
        ]
    )


def _lines(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
