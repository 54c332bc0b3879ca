"""What the methods' guarantees rest on alike."""

from dpoptim.plan import Basis

NOISE = Basis("enforced", "the noise comes from a cryptographic stream, right to 8 standard deviations")


def bounded(norm: float) -> Basis:
    return Basis("enforced", f"each record adds at most {norm:g} to the sum, rounding included")
