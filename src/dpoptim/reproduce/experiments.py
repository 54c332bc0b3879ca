"""The experiments by name, and the data that each needs."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dpoptim.reproduce.request import Request

if TYPE_CHECKING:
    from dpoptim.reproduce.real_cases import Case


def kl_rates(request: Request) -> None:
    from dpoptim.reproduce.kl_rates import kl_rates as experiment

    experiment(request.out, request.quick)


def kl_real(request: Request) -> None:
    from dpoptim.reproduce.kl_real import kl_real as experiment

    experiment(request.out, request.quick, request.fashion, request.tweets)


def srgd_rates(request: Request) -> None:
    from dpoptim.reproduce.srgd_rates import srgd_rates as experiment

    experiment(request.out, quick=request.quick)


def one_pass(request: Request) -> None:
    from dpoptim.reproduce.one_pass import one_pass as experiment

    experiment(request.out, data_directory=request.fashion, seeds=request.seeds)


def dice_bias(request: Request) -> None:
    from dpoptim.reproduce.dice_bias import bias_of_clipping

    bias_of_clipping(request.out, passes=40 if request.quick else 400)


def dice_ablations(panel: str) -> Callable[[Request], None]:
    def run(request: Request) -> None:
        from dpoptim.reproduce.dice_ablations import dice_ablations as experiment
        from dpoptim.reproduce.dice_cases import fashion_softmax

        experiment(
            request.out, fashion_softmax(request.fashion), seeds=request.seeds, panels=(panel,)
        )

    return run


def dice_table(request: Request) -> None:
    from dpoptim.reproduce import dice_cases
    from dpoptim.reproduce.dice_table import dice_table as experiment

    cases = [dice_cases.fashion_softmax(request.fashion)]
    if not request.quick:
        cases.append(dice_cases.fashion_cnn(request.fashion))
    if request.tweets is None:
        request.say("without emotion features: give --tweets, a folder of TweetEval")
    else:
        cases.append(dice_cases.emotion_softmax(request.tweets, request.out / "cache"))
    if request.e2e is None:
        request.say("without the small GPT: give --e2e, the folder of the E2E challenge's data")
    elif not request.quick:
        cases.append(dice_cases.restaurant_gpt(request.e2e))
    experiment(request.out, cases, seeds=request.seeds)


def dice_fig5(request: Request) -> None:
    from dpoptim.reproduce.dice_gpt import RATES, loss_by_settings, small_case

    case = small_case(request.needed("e2e", "dice-fig5"))
    loss_by_settings(request.out, case, rates=RATES[:1] if request.quick else RATES)


def dice_table3(request: Request) -> None:
    from dpoptim.reproduce.dice_texts import dice_texts, load_texts

    e2e = request.needed("e2e", "dice-table3")
    if request.model is None:
        dice_texts(request.out, load_texts(e2e), seeds=request.seeds)
        return
    from dpoptim.reproduce.dice_pretrained import gpt2_texts, in_table_3

    texts = gpt2_texts(e2e, request.needed("model", "dice-table3"), request.device)
    dice_texts(request.out, texts, seeds=request.seeds, suffix="_gpt2", paper=in_table_3)


def dice_vit(request: Request) -> None:
    from dpoptim.reproduce.dice_vit import dice_vit as experiment
    from dpoptim.reproduce.dice_vit import vit_case

    if request.cifar is None and request.model is None:
        experiment(request.out, vit_case(request.fashion), seeds=request.seeds)
        return
    from dpoptim.reproduce import dice_pretrained
    from dpoptim.reproduce.user_data import cifar

    folder, model = (request.needed(option, "dice-vit") for option in ("cifar", "model"))
    images = cifar(folder)
    experiment(
        request.out,
        dice_pretrained.vit_case(images, model, request.device),
        seeds=request.seeds,
        stem=f"dice_vit_{images.name.lower().replace('-', '_')}",
        paper=dice_pretrained.in_table_2,
    )


def das_table4(request: Request) -> None:
    from dpoptim.reproduce.das_tables import table4
    from dpoptim.reproduce.user_data import feature_sets

    cases = feature_sets(request.needed("features", "das-table4"))
    table4(request.out, cases, seeds=request.seeds)


def das_table6(request: Request) -> None:
    from dpoptim.reproduce.das_tables import BELOW_OF_EMNIST, table6
    from dpoptim.reproduce.real_cases import fashion
    from dpoptim.reproduce.user_data import emnist

    if request.emnist is None:
        table6(request.out, fashion(request.fashion), seeds=request.seeds)
    else:
        case = emnist(request.needed("emnist", "das-table6"))
        table6(request.out, case, seeds=request.seeds, below=BELOW_OF_EMNIST)


def das_table5(request: Request) -> None:
    from dpoptim.reproduce.das_tables import table4, table5
    from dpoptim.reproduce.user_data import feature_sets

    if request.features is not None:
        cases = feature_sets(request.needed("features", "das-table5"), "CIFAR-10")
        table4(request.out, cases, seeds=request.seeds)
    if request.tweets is not None or request.features is None:
        table5(request.out, request.needed("tweets", "das-table5"), seeds=request.seeds)


def own_cases(request: Request, by: str) -> "list[Case]":
    """The data sets of --features and --emnist; they stand in for Fashion-MNIST."""
    from dpoptim.reproduce.user_data import emnist, feature_sets

    cases = [] if request.features is None else feature_sets(request.needed("features", by))
    return cases if request.emnist is None else [*cases, emnist(request.needed("emnist", by))]


def das_baselines(request: Request) -> None:
    from dpoptim.reproduce import das_tables
    from dpoptim.reproduce.das_baselines import RATES
    from dpoptim.reproduce.das_baselines import das_baselines as experiment
    from dpoptim.reproduce.real_cases import fashion, tasks_in

    cases = own_cases(request, "das-baselines") or [fashion(request.fashion)]
    if request.tweets is None:
        request.say("without Table 5: give --tweets, a folder of a TweetEval task, or of several")
    else:
        cases += [
            das_tables.tweets_of_norm_10(request.out, task) for task in tasks_in(request.tweets)
        ]
    rates = RATES[2:3] if request.quick else RATES
    experiment(request.out, cases, seeds=request.seeds, rates=rates)


def das_table7(request: Request) -> None:
    from dpoptim.reproduce import das_networks as networks

    norms = networks.CLIP_NORMS[1::3] if request.quick else networks.CLIP_NORMS
    table7 = partial(networks.table7, request.out, seeds=request.seeds, norms=norms)
    cases = own_cases(request, "das-table7")
    for case in cases:
        table7(
            networks.parts_of(case),
            data=case.name,
            steps=networks.MORE_STEPS,
            without_privacy=networks.MORE_RATES,
        )
    if not cases:
        table7(networks.fashion_parts(request.fashion))


def fang_fig1(request: Request) -> None:
    from dpoptim.reproduce.fang import clipping_frequency

    clipping_frequency(request.out, request.fashion, epochs=3 if request.quick else 10)


def fang_fig2(request: Request) -> None:
    from dpoptim.reproduce.fang import accuracies

    accuracies(request.out, request.fashion, seeds=request.seeds)


def fang_fig4(request: Request) -> None:
    from dpoptim.reproduce.fang_synthetic import evolution

    evolution(request.out, seeds=request.seeds)


def fang_fig5(request: Request) -> None:
    from dpoptim.reproduce.fang_budgets import BUDGETS, budgets
    from dpoptim.reproduce.one_pass import load_split

    pairs = BUDGETS[1:3] if request.quick else BUDGETS
    budgets(request.out, load_split(request.fashion), seeds=request.seeds, pairs=pairs)


def fang_theorem(request: Request) -> None:
    from dpoptim.reproduce.fang_synthetic import EPSILONS, theorem

    theorem(request.out, seeds=request.seeds, epsilons=EPSILONS[: 2 if request.quick else None])


def fang_table2(request: Request) -> None:
    from dpoptim.reproduce.fang import epoch_times

    epoch_times(request.out, request.fashion, repeats=2 if request.quick else 5, say=request.say)


EXPERIMENTS: dict[str, Callable[[Request], None]] = {
    "das-baselines": das_baselines,
    "das-table4": das_table4,
    "das-table5": das_table5,
    "das-table6": das_table6,
    "das-table7": das_table7,
    "dice-bias": dice_bias,
    "dice-fig2": dice_ablations("fig2"),
    "dice-fig3": dice_ablations("fig3"),
    "dice-fig5": dice_fig5,
    "dice-residual": dice_ablations("residual"),
    "dice-table2": dice_table,
    "dice-table3": dice_table3,
    "dice-vit": dice_vit,
    "fang-fig1": fang_fig1,
    "fang-fig2": fang_fig2,
    "fang-fig4": fang_fig4,
    "fang-fig5": fang_fig5,
    "fang-table2": fang_table2,
    "fang-theorem": fang_theorem,
    "kl-rates": kl_rates,
    "kl-real": kl_real,
    "one-pass": one_pass,
    "srgd-rates": srgd_rates,
}
