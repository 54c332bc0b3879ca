"""One process releases what one reservation pays for."""

import os

from dpoptim.errors import PrivacyError


def refuse_fork(process: int) -> None:
    """Releases go on in the process that began them: a forked one would release more on the same
    charge.
    """
    if os.getpid() != process:
        raise PrivacyError(
            "a run was taken over by a forked process: both would release its sums, on one "
            "charge. Fix: start it in the "
            "process that trains."
        )
