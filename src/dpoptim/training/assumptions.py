"""Basis of a guarantee beside its plan: what is enforced, and what is taken on trust."""

from collections.abc import Iterable, Mapping

from dpoptim.assumptions import Assumption, enforced, trusted
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.isolation import Isolation
from dpoptim.training.trials.loss_check import LossCheck

WRITES = {  # by whether some constants are read in turn
    False: (
        enforced(
            "parameters, buffers, frozen parameters, extra state and hooks are compared by value "
            "before each release and at the end: no forward pass leaves anything in them",
        ),
    ),
    True: (
        enforced(
            "parameters, buffers, extra state and hooks are compared by value before each release, "
            "large frozen parameters in turn, and all at the end",
        ),
    ),
}
ESCAPES = enforced(
    "whatever would escape clipping is refused: other uses of a weight, batch statistics"
)
MEAN = (
    "nobody exploits how the factor of a mean, one over the batch, rounds gradients (a vector of "
    "losses has none)"
)
OTHERS = "vendor kernels are batch-invariant (batches(fixed_shape=True) needs no such trust)"
LEFT = (
    "between leaving the run and entering it again, nothing private changed its model, optimizers "
    "or data set"
)
NOT_CHECKED = (
    "loss not checked: each record's loss depends on that record alone (no mean over the tokens of "
    "a batch, no mixing or comparing of records)"
)

CHECKED = (
    "the loop computes the loss that was checked, and multiplies it by nothing that others decide: "
    "in it, no record's gradient depended on others (on {})"
)
ADDED = (
    "what the loop does to the loss that was checked, whose last operation is another one than of "
    "what it hands over, is public or of each record alone: no weights over a batch's mean, no "
    "choice of its hardest records, no sum over processes"
)
COLLATE = (
    "collate_fn not checked: what it makes of a record is the same beside any others (padding, "
    "order, mixing)"
)
SHAPE = trusted("the shape of a record is public")
LAYERS = "which layers run on a batch, and how often, is public"
ROWS = (
    "each record's rows stay together, in the order delivered: no collate_fn and no loss shuffles "
    "rows, sorts them by length, or puts first views first"
)
NOTHING_ELSE = "nothing trainable outside the model takes part in the loss"
LOOP = (
    "what loop and model keep or compute from batches (losses, accuracies, activations, "
    "prototypes, stored records, running numbers, counts of rows) enters the loss of no other "
    "record, and reaches no scheduler, stopping rule, parameter, sampler, log, or attribute of a "
    "module that is saved whole"
)
START = (
    "what the run starts from (weights, buffers, state of the optimizers) holds nothing of private "
    "records but what runs on the same ledger released"
)
# What stands for all of the lines about a program where it is this package's: tests/runs tries its
# models and loss as such a line says.
PACKAGE = trusted(
    "loop, loss and model are those of the dpoptim package that is installed, and it is the one "
    "whose version and SHA-256 are named under versions"
)
# Whoever knows the seed knows whose mask each record would have: one record more shifts those of
# all that follow.
RANDOM = (
    "random numbers of model, loss, data set and collate_fn (dropout, augmentation, masked tokens) "
    "come from torch's, numpy's or Python's own generator, or from one that model, loss, data set "
    "or collate_fn holds or names, seeded in secret while batches are delivered, torch's with 32 "
    "bits on CPUs: no torch.manual_seed inside the loop, and nobody tries all seeds"
)
ATTRIBUTES = (
    "what the model keeps in plain attributes (tensors, arrays, numbers, also in lists, "
    "dictionaries and objects; neither parameters nor buffers) changes while it sees records: none "
    "of it enters the loss of another record, or is published; and with what it has become (a "
    "count of epochs, a switch) records are treated independently, as when the model was tried"
)
PHASES = (
    "what loss and collate_fn read beside batch and model (globals, closures, objects: a schedule, "
    "a switch) changed after they were tried: with what it has become, each record's loss still "
    "depends on that record alone"
)
KEEPS = (
    "{} keeps numbers from call to call (in closures, globals or objects), which changed while it "
    "was tried: past losses, running means or counts of what records hold enter the loss of no "
    "other record, also not as weights or as chances by which time steps are drawn"
)


def basis_of_loss(
    checked: LossCheck | None,
    declared: Reduction | None,
    caveats: Mapping[str, bool],
    isolation: Isolation,
) -> tuple[Assumption, ...]:
    """Assumptions about the loss, as it was handed over so far.

    Args:
        checked: what `attach` found out about the loss that it was given, if it was.
        declared: what `attach` was told.
        caveats: ``"bare"`` (a loss was differentiated by itself), ``"scalar"`` (a mean or sum was
            handed over), ``"mean"``, ``"rows"`` (a record has several), ``"collate"`` (what
            collated was not checked), and ``"adds"`` (to the loss that was checked).
        isolation: records that pass alone have no other one in their loss.
    """
    kept = basis_of_kept(checked)
    if isolation.alone:
        return (SHAPE, *map(of_program, (LAYERS, NOTHING_ELSE, START, LOOP, RANDOM)), *kept)
    items = [*map(of_program, basis_of_check(checked, adds=caveats["adds"]))]
    if caveats["collate"]:
        items.append(of_program(COLLATE))
    if caveats["bare"]:
        usual = "" if declared else ", which nobody declared"
        stated = (
            f"the loss is the {declared or 'mean'} over the batch of one term per record{usual}, "
            "and which its graph does not show"
        )
        items.append(of_program(stated))
    elif caveats["scalar"]:
        scaled = "the same number in every batch" if checked is None else "what was checked"
        items.append(
            of_program(
                "what was summed or averaged to the loss is one term per record; what it was then "
                f"multiplied or divided by is {scaled}"
            )
        )
    if caveats["rows"] and checked is None:
        items.append(of_program(ROWS))
    others = (LAYERS, f"{NOTHING_ELSE}; records keep their order in it", START, LOOP, RANDOM)
    items += [SHAPE, *map(of_program, others)]
    if caveats["mean"] or declared == "mean":
        items.append(trusted(MEAN))
    return (*items, *kept)


def basis_of_check(checked: LossCheck | None, *, adds: bool) -> list[str]:
    """Whether the loss was checked, and whether the loop adds to it."""
    if checked is None:
        return [NOT_CHECKED]
    return [CHECKED.format(checked.text), *([ADDED] if adds else [])]


def basis_of_kept(checked: LossCheck | None) -> list[Assumption]:
    """Assumptions about what loss and collate function keep from call to call."""
    return [] if checked is None else [of_program(KEEPS.format(each)) for each in checked.keeps]


def of_program(text: str) -> Assumption:
    return trusted(text, of_program=True)


def of_own_program(basis: Iterable[Assumption]) -> tuple[Assumption, ...]:
    """The basis of a run whose loop, loss and model are this package's: one line stands for them.

    What code enforces stays, and so does every line about data, settings or who looks at what.
    """
    return in_order((*(item for item in basis if not item.of_program), PACKAGE))


def in_order(items: Iterable[Assumption]) -> tuple[Assumption, ...]:
    """Order assumptions: enforced, then taken on trust, then unproven; otherwise as given."""
    kinds = ("enforced", "trusted", "unproven")
    return tuple(sorted(items, key=lambda item: kinds.index(item.kind)))


def caveats_of(
    engine: Engine, *, seeded: bool, collate: bool, phases: bool = False
) -> dict[str, bool]:
    """Caveats of a run's guarantee so far: `basis_of_loss` and `basis_of_caveats`."""
    return {
        "phases": phases,
        "seeded": seeded,
        "attributes": engine.writes_attributes,
        "partial_backward": engine.partial_backward,
        "rounded": engine.recorder.rounded,
        "bare": any(how == "bare" for how, _ in engine.handed_over),
        "scalar": any(how == "scalar" for how, _ in engine.handed_over),
        "rows": engine.rows.per_record > 1,
        "mean": any(reduction == "mean" for _, reduction in engine.handed_over),
        "collate": collate,
    }


def basis_of_ledger(durable: bool, elsewhere: str = "") -> tuple[Assumption, ...]:
    """Assumptions about other runs on the same records.

    Args:
        elsewhere: what is known of those on other ledgers: `OtherRuns.words`.
    """
    on_disk = "the whole run was charged to a ledger on disk before its first noisy sum"
    unknown = "other runs on this data are added up elsewhere: the ledger was in memory"
    known = [trusted(f"this guarantee is of this run alone: {elsewhere}")] if elsewhere else []
    if durable:
        return (enforced(on_disk), *known)
    return (*known,) or (trusted(unknown),)


def basis_of_ranks(size: int, *, sharded: bool, by_person: bool) -> tuple[Assumption, ...]:
    """Assumptions of training in ``size`` processes."""
    if size == 1:
        return ()
    if sharded and by_person:
        sound = "the records of each process are its own"
    elif sharded:
        sound = "no record is in the data sets of two processes"
    else:
        sound = "all processes have the same data set"
    apart = enforced("no person has rows in the data sets of two processes")
    return (
        *((apart,) if sharded and by_person else ()),
        enforced(
            f"{size} processes release every number once, with its whole noise, on one reservation"
        ),
        trusted(f"{sound}; they, and the network between them, are on the side of the data"),
    )


def basis_of_caveats(caveats: Mapping[str, bool], *, resumed: bool) -> tuple[Assumption, ...]:
    """Assumptions that come with what the user allowed.

    Args:
        caveats: ``"attributes"`` (what the model keeps in plain attributes changed), ``"phases"``
            (what loss and collate function read from elsewhere did),
            ``"partial_backward"``, ``"rounded"`` (under torch.autocast), ``"varies"`` (physical
            batches do, with who is in them), ``"left"`` (and entered again) and ``"seeded"``, of
            all parts of the run.
        resumed: whether it was taken up from a checkpoint.
    """
    items = []
    if caveats["phases"]:
        items.append(of_program(PHASES))
    if caveats["attributes"]:
        items.append(trusted(ATTRIBUTES))
    if caveats["partial_backward"]:
        items.append(trusted("several backward passes over a batch cover disjoint records"))
    if caveats["rounded"]:
        shared = (
            "in bfloat16 or float16, records are rounded the same whatever others share their batch"
        )
        items.append(trusted(shared))
    if caveats["varies"]:
        items.append(trusted(OTHERS))
    if resumed:
        again = (
            "nothing that was released after the checkpoint had been looked at when the run was "
            "taken up again"
        )
        items.append(trusted(again))
    if caveats["left"]:
        items.append(trusted(LEFT))
    if caveats["seeded"]:
        items.append(
            Assumption(
                "unproven", "noise and sampling were seeded: whoever knows the seed sees the data"
            )
        )
    return tuple(items)
