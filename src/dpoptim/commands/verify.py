"""``dpoptim verify`` and ``dpoptim sign``: certificates, for whoever answers for privacy."""

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
        Path | None, typer.Option(help="Also look for the run's charge in this ledger.")
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(help="Also check the certificate's signature by this key (PEM, Ed25519)."),
    ] = None,
) -> None:
    """Is a run's certificate what its plan gives? Computes again whatever the plan determines.

    Ends with an error that names each entry that is not as it should be. No data is needed.

    Example: [bold]dpoptim verify runs/demo --ledger patients.sqlite[/]
    """
    with clear_errors():
        from dpoptim.runs.signature import check_signature
        from dpoptim.runs.verify import verify_run

        found = verify_run(run, ledger=ledger)
        lines = [f"checked     {line}" for line in found.checked]
        if public_key is not None:
            check_signature(run, public_key)
            lines.append("checked     the certificate is signed by this key")
            unchecked = [line for line in found.open if "dpoptim sign" not in line]
        else:
            unchecked = list(found.open)
        say(found.certificate["guarantee"]["text"])
        say(found.certificate["verdict"]["text"])
        for line in [*lines, *(f"unchecked   {line}" for line in unchecked)]:
            say(line)


def sign(
    run: RunArgument,
    key: Annotated[
        Path, typer.Option(help="Private Ed25519 key, PEM (openssl genpkey -algorithm ed25519).")
    ],
) -> None:
    """Sign a run's certificate with a key of your organisation; it is verified first.

    Example: [bold]dpoptim sign runs/demo --key officer.pem[/]
    """
    with clear_errors():
        from dpoptim.runs import signature
        from dpoptim.runs.verify import verify_run

        verify_run(run)
        say(f"signed in {signature.sign(run, key)}")
