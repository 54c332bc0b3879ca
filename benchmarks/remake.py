"""Make a table of `benchmarks/results` again: which command makes which.

    python benchmarks/remake.py                      # lists them
    python benchmarks/remake.py dice_bias.csv --out DIR

``{out}`` stands for the folder; ``{tweets}`` for a folder that holds TweetEval's ``emotion`` and
``emoji``, ``{e2e}`` for that of the E2E challenge, ``{peer}`` for an environment with diffprivlib
(benchmarks/tables.py says which). Times are of the machine they are taken on.
`tests/reproduce/test_results*.py` make a cheap slice of each table again.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

REPRODUCE = "dpoptim reproduce"
COMMANDS = {
    "private_search.csv": "python benchmarks/private_search.py --out {out}",
    "private_clip.csv": "python benchmarks/private_clip.py --out {out}",
    **{
        f"accuracy_{name}.csv": f"python benchmarks/accuracy.py {name} --out {{out}} "
        "--tweets {tweets}/emotion --e2e {e2e}"
        for name in ("cnn", "mechanisms", "optimizers", "rates", "scales", "scattering", "views")
    },
    "amplified_errors.csv": "python benchmarks/correlated_errors.py --out {out}",
    "audit_peers.csv": "python benchmarks/audit_peers.py --out {out}/audit_peers.csv",
    "averaging.csv": "python benchmarks/averaging.py --out {out}",
    "convolutions.csv": "python benchmarks/convolutions.py --out {out}",
    "by_optimizer.csv": "python benchmarks/by_optimizer.py --out {out}",
    "choose_cnn.csv": "python benchmarks/choose_cnn.py --out {out}",
    "choose_defaults.csv": "python benchmarks/choose_defaults.py --out {out}",
    "choose_length.csv": "python benchmarks/choose_length.py --out {out}",
    "choose_rates.csv": "python benchmarks/choose_rates.py --out {out}",
    "choose_scattering.csv": (
        "python benchmarks/choose_scattering.py --pictures {pictures} --font {font} --out {out}"
    ),
    "correlated_errors.csv": "python benchmarks/correlated_errors.py --out {out}",
    "das_baselines.csv": f"{REPRODUCE} das-baselines --tweets {{tweets}} --out {{out}}",
    "das_emoji.csv": f"{REPRODUCE} das-table5 --tweets {{tweets}}/emoji --out {{out}}",
    "das_emotion.csv": f"{REPRODUCE} das-table5 --tweets {{tweets}}/emotion --out {{out}}",
    "das_fashion_mnist.csv": f"{REPRODUCE} das-table6 --out {{out}}",
    "das_networks.csv": f"{REPRODUCE} das-table7 --out {{out}}",
    "dice_bias.csv": f"{REPRODUCE} dice-bias --out {{out}}",
    "dice_fig2.csv": f"{REPRODUCE} dice-fig2 --out {{out}}",
    "dice_fig3.csv": f"{REPRODUCE} dice-fig3 --out {{out}}",
    "dice_fig4.csv": f"{REPRODUCE} dice-table3 --e2e {{e2e}} --out {{out}}",
    "dice_fig5.csv": f"{REPRODUCE} dice-fig5 --e2e {{e2e}} --out {{out}}",
    "dice_residual.csv": f"{REPRODUCE} dice-residual --out {{out}}",
    "dice_table.csv": (
        f"{REPRODUCE} dice-table2 --tweets {{tweets}}/emotion --e2e {{e2e}} --out {{out}}"
    ),
    "dice_table3.csv": f"{REPRODUCE} dice-table3 --e2e {{e2e}} --out {{out}}",
    "dice_vit.csv": f"{REPRODUCE} dice-vit --out {{out}}",
    "decay_errors.csv": "python benchmarks/correlated_errors.py --out {out}",
    "distributed.csv": "python benchmarks/distributed.py --out {out}",
    "distributed_model.csv": "python benchmarks/distributed.py --out {out}",
    "error_feedback.csv": "python benchmarks/error_feedback.py --out {out}",
    "auc_intervals.csv": "python benchmarks/auc_intervals.py --out {out}",
    "evaluation_intervals.csv": "python benchmarks/evaluation_intervals.py --out {out}",
    "fang_fig1.csv": f"{REPRODUCE} fang-fig1 --out {{out}}",
    "fang_fig2.csv": f"{REPRODUCE} fang-fig2 --out {{out}}",
    "fang_fig4.csv": f"{REPRODUCE} fang-fig4 --out {{out}}",
    "fang_fig5.csv": f"{REPRODUCE} fang-fig5 --out {{out}}",
    "fang_theorem.csv": f"{REPRODUCE} fang-theorem --out {{out}}",
    "fang_table2.csv": f"{REPRODUCE} fang-table2 --out {{out}}",
    "growth.csv": "python benchmarks/growth.py --out {out}",
    "kl_rates.csv": f"{REPRODUCE} kl-rates --out {{out}}",
    "kl_real.csv": f"{REPRODUCE} kl-real --tweets {{tweets}}/emotion --out {{out}}",
    "kl_slopes.csv": f"{REPRODUCE} kl-rates --out {{out}}",
    "loader_speed.csv": "python benchmarks/loader_speed.py --out {out}",
    "min_separation.csv": "python benchmarks/min_separation.py --out {out}",
    "mixed_precision.csv": (
        "python benchmarks/mixed_precision.py --device cpu "
        "--workload GPT ViT 'ResNet, GroupNorm' --variant plain ours 'ours, noise' --out {out}"
    ),
    # on a GPU: docs/speed.md
    "mixed_precision_cuda.csv": "python benchmarks/mixed_precision.py --device cuda --out {out}",
    "multiplication.csv": "python benchmarks/multiplication.py --out {out}",
    "one_pass.csv": f"{REPRODUCE} one-pass --out {{out}}",
    "phases.csv": "python benchmarks/phases.py --threads 1 2 --out {out}",
    "plan_ranks.csv": "python benchmarks/plan_ranks.py --out {out}",
    "planning.csv": "python benchmarks/planning.py --out {out}",
    "search_shares.csv": "python benchmarks/search_shares.py --out {out}",
    "several_rows.csv": "python benchmarks/several_rows.py --out {out}",
    "sparse_clicks.csv": "python benchmarks/sparse_rows.py --out {out}",
    "sparse_rows.csv": "python benchmarks/sparse_rows.py --out {out}",
    "srgd_exponents.csv": f"{REPRODUCE} srgd-rates --out {{out}}",
    "srgd_rates.csv": f"{REPRODUCE} srgd-rates --out {{out}}",
    "step_time.csv": "python benchmarks/step_time.py --out {out}",
    "tables.csv": "python benchmarks/tables.py --out {out} --peer-python {peer}/bin/python",
    "whole_images.csv": "python benchmarks/whole_images.py --pictures {pictures} --out {out}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=sorted(COMMANDS))
    folders = {
        "--out": "runs/remade",
        "--tweets": "tweets",
        "--e2e": "e2e",
        "--peer": "peer",
        "--pictures": "pictures",
        "--font": "NotoColorEmoji.ttf",
    }
    for option, folder in folders.items():
        parser.add_argument(option, type=Path, default=Path(folder))
    asked = parser.parse_args()
    if asked.table is None:
        print("\n".join(f"{name}: {command}" for name, command in COMMANDS.items()))
        return
    named = {option[2:]: getattr(asked, option[2:]) for option in folders}
    words = shlex.split(COMMANDS[asked.table].format(**named))
    start = [sys.executable, "-m", "dpoptim"] if words[0] == "dpoptim" else [sys.executable]
    asked.out.mkdir(parents=True, exist_ok=True)
    sys.exit(subprocess.call([*start, *words[1:]]))


if __name__ == "__main__":
    main()
