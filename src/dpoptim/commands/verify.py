"""``dpoptim verify``, ``sign`` and ``certify``: certificates, for whoever answers for privacy."""

from pathlib import Path
from typing import Annotated

import typer

from dpoptim.terminal import clear_errors, say

RunArgument = Annotated[
    Path, typer.Argument(help="Run directory: what `dpoptim train --out` wrote.")
]


def verify(
    run: RunArgument,
    ledger: Annotated[
        list[Path] | None,
        typer.Option(
            help="Also look for the run's charge in this ledger, or for those of its evaluations; "
            "repeat for several."
        ),
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(help="Also check the signatures, by this key (PEM, Ed25519)."),
    ] = None,
) -> None:
    """Is a run's certificate what its plan gives? Computes again whatever the plan determines.

    Says first how many things were checked and how many were not, then lists each, and each file
    that it does not know. Ends with an error that names each entry and file that is not as it
    should be, or is missing. No data is needed.

    Example: [bold]dpoptim verify runs/demo --ledger patients.sqlite[/]
    """
    with clear_errors():
        from dpoptim.runs.signature import check_signatures, signature_of
        from dpoptim.runs.verify import verify_run

        found = verify_run(run, ledgers=ledger or ())
        lines = [f"checked     {line}" for line in found.checked]
        if public_key is not None:
            signed, unsigned = check_signatures(run, public_key)
            lines += [f"checked     {name} is signed by this key" for name in signed]
            answered = [f"{name}: " for name in (*signed, *(signature_of(n).name for n in signed))]
            unchecked = [line for line in found.open if not line.startswith(tuple(answered))]
            unchecked += [f"{name}: nobody signed it (dpoptim sign)" for name in unsigned]
        else:
            unchecked = list(found.open)
        counts = f"{len(lines)} checked, {len(unchecked)} unchecked, {len(found.unknown)} unknown"
        say(f"{counts}, none missing")
        say(found.certificate["guarantee"]["text"])
        say(found.certificate["verdict"]["text"])
        lines += [f"unchecked   {line}" for line in unchecked]
        for line in [*lines, *(f"unknown     {line}" for line in found.unknown)]:
            say(line)


def sign(
    run: RunArgument,
    key: Annotated[
        Path, typer.Option(help="Private Ed25519 key, PEM (openssl genpkey -algorithm ed25519).")
    ],
) -> None:
    """Sign a run's certificate and evaluations with a key of your organisation; verified first.

    Example: [bold]dpoptim sign runs/demo --key officer.pem[/]
    """
    with clear_errors():
        from dpoptim.runs import signature
        from dpoptim.runs.verify import verify_run

        verify_run(run)
        for path in signature.sign(run, key):
            say(f"signed in {path}")


def certify(
    given: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Say where certificates are made: nothing is unpickled here, which would run its code."""
    with clear_errors():
        raise ValueError(
            "certify is for Python, where the training or the fitted estimator is: `dpoptim train` "
            "writes its certificate by itself. Fix: in Python, dpoptim.certify(model, "
            "'runs/model', data='patients of 2025'); then dpoptim verify runs/model."
        )
