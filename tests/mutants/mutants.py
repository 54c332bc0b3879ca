"""Seeded privacy bugs and the detector that catches each: an audit that finds nothing must be able
to find something.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpoptim.audit.detectors import DETECTORS
from mutants import (
    faults,
    faults_of_attributes,
    faults_of_columns,
    faults_of_features,
    faults_of_isolation,
    faults_of_iterates,
    faults_of_later_batches,
    faults_of_methods,
    faults_of_persons,
    faults_of_prices,
    faults_of_refunds,
    faults_of_rows,
    faults_of_statistics,
    faults_of_sums,
    faults_of_turns,
)
from mutants.one_check import alone

__all__ = ["MUTANTS", "Catch", "Mutant", "catch", "mutant_table"]


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        name: what is wrong.
        where: the function of the library that is patched.
        apply: makes a context manager under which the library has the bug. For tests; promises
            nothing.
        detector: a name in `dpoptim.audit.detectors.DETECTORS`.
        check: the one of the detector's that is for this bug, which runs alone; "": all run.
    """

    name: str
    where: str
    apply: Callable[[], AbstractContextManager[Any]]
    detector: str
    check: str = ""


@dataclass(frozen=True)
class Catch:
    """What the detector said of a mutant: ``evidence`` is empty if it got away."""

    mutant: Mutant
    evidence: str
    seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.evidence)


def catch(mutant: Mutant) -> Catch:
    """Run the mutant's detector under the mutant. An exception is no catch: it is passed on."""
    start = time.perf_counter()
    quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
    with mutant.apply(), alone(mutant.detector, mutant.check), quiet:
        evidence = DETECTORS[mutant.detector]()
    return Catch(mutant, evidence, time.perf_counter() - start)


def mutant_table() -> list[dict[str, str]]:
    """Name, place and detector of every mutant, for documentation and the command line."""
    return [{"mutant": m.name, "where": m.where, "detector": m.detector} for m in MUTANTS]


_f, _s, _m, _t, _c = (
    faults,
    faults_of_sums,
    faults_of_methods,
    faults_of_statistics,
    faults_of_turns,
)
_i, _r, _rows, _p = faults_of_isolation, faults_of_refunds, faults_of_rows, faults_of_iterates
_l, _columns = faults_of_later_batches, faults_of_columns
TURNS = "sampling.CyclicPoissonSampling"
APART = "sampling.MinSeparationSampling"
DICE, CORRELATED = "error feedback", "correlated noise"
FULL, SAMPLED, REPLACE = "two worlds, full batch", "two worlds, sampled", "two worlds, replace-one"
ADD_NORMAL, FACTORS, DRAW = (
    "gate.add_normal",
    "clipping.Clipping.factors",
    "sampling.PoissonSampling.draw",
)
LARGEST = "sampling.TruncatedPoissonSampling.draw"
EVENT, QUERY = "sampling.PoissonSampling.event", "mechanisms.IndependentNoise.query"

MUTANTS: tuple[Mutant, ...] = (
    # noise
    Mutant("noise times 0.9", ADD_NORMAL, _f.noisy_by(_f.scaled_noise), FULL),
    Mutant("noise multiplier halved after accounting", QUERY, _f.query_of(_f.halved_noise), FULL),
    Mutant("clip norm left out of the noise", QUERY, _f.query_of(_f.ignored_clip_norm), FULL),
    Mutant(
        "no noise in one tensor",
        ADD_NORMAL,
        _f.noisy_by(_f.noise_for_most_entries),
        "noise",
        "noise_pvalues",
    ),
    Mutant(
        "noise only where the gradient is not zero",
        ADD_NORMAL,
        _f.noisy_by(_f.noise_for_nonzero_entries),
        "noise",
        "untouched_rows_pvalue",
    ),
    Mutant(
        "noise reused between steps",
        ADD_NORMAL,
        _f.noisy_by(_f.same_noise_each_step),
        "noise",
        "noise_pvalues",
    ),
    Mutant(
        "noise drawn ahead is used twice",
        "noise.prefetch.DrawnAhead.take",
        _f.draws_ahead_used_twice,
        "noise",
        "noise_pvalues",
    ),
    Mutant(
        "noise reused between tensors",
        ADD_NORMAL,
        _f.noisy_by(_f.same_noise_in_both_halves),
        "noise",
        "noise_pvalues",
    ),
    Mutant(
        "redrawn noise alike in all steps",
        "noise.RedrawnState",
        _c.draws_of_all_steps_alike,
        "redrawn noise",
    ),
    Mutant(
        "noise drawn in float32",
        ADD_NORMAL,
        _f.noisy_by(_f.float32_noise),
        "noise",
        "noise_pvalues",
    ),
    Mutant(
        "tail of the noise cut at 5.77 sigma",
        "noise.ziggurat.settle",
        _f.cut_tail,
        "noise",
        "tail_pvalues",
    ),
    Mutant(
        "throws outside their layers not settled",
        "noise.gaussian.settle",
        _f.unsettled_throws,
        "noise",
        "edge_pvalues",
    ),
    Mutant(
        "no noise where a throw is settled",
        "noise.gaussian.settle",
        _f.settled_throws_left_out,
        "noise",
        "edge_pvalues",
    ),
    Mutant(
        "places above the curve kept",
        "noise.gaussian.settle",
        _f.places_above_the_curve_kept,
        "noise",
        "edge_pvalues",
    ),
    Mutant(
        "noise seeded by a global generator",
        "distributed.ranks.key_stream",
        _f.global_seed,
        "noise",
        "freshness_pvalue",
    ),
    # accounting and ledger
    Mutant(
        "replace-one accounted as add-or-remove",
        "accounting.choose_profile.gaussian_mu",
        _f.replace_one_as_add_or_remove,
        REPLACE,
    ),
    Mutant("sample rate accounted lower than sampled", EVENT, _f.event_of(rate=0.5), SAMPLED),
    Mutant(
        "fewer steps accounted than planned",
        EVENT,
        _f.event_of(steps=lambda count: max(1, count // 2)),
        FULL,
    ),
    Mutant(
        "one step fewer charged than executed",
        EVENT,
        _f.event_of(steps=lambda count: count - 1),
        "charging",
    ),
    Mutant(
        "more steps executed than reserved",
        "gate.Gate, BatchQueue",
        _f.more_steps_than_reserved,
        "charging",
    ),
    Mutant("nothing charged", "gate.Gate.open", _f.no_charge, "charging"),
    Mutant("charged after the noise", "gate.Gate.release_sum", _f.charge_after_noise, "charging"),
    Mutant("a forked ledger spends", "LedgerStore._forked", _r.forks_unseen, "charging"),
    Mutant(
        "one charge for all who take up a run saved before it",
        "Ledger.reserve",
        _r.charged_once_for_two,
        "charging",
    ),
    # giving back
    Mutant(
        "refunds steps that were released",
        "ledger_charge.Charge.end",
        _r.released_steps_returned,
        "refunds",
    ),
    Mutant(
        "refunds what a killed process released",
        "ledger_charge.Charge.end",
        _r.killed_part_returned,
        "refunds",
    ),
    Mutant("an ended run goes on", "gate.Gate.close", _r.ended_runs_go_on, "refunds"),
    Mutant(
        "an adaptive run gives back half of its releases",
        "gate.FilteredGate.finish",
        _r.half_of_adaptive_releases_returned,
        "refunds, adaptive",
    ),
    Mutant(
        "an ended adaptive run goes on",
        "gate.FilteredGate.finish",
        _r.ended_adaptive_runs_go_on,
        "refunds, adaptive",
    ),
    Mutant(
        "two processes go on with one run",
        "Ledger._open",
        _r.two_processes_on_one_run,
        "refunds",
    ),
    # going on
    Mutant(
        "a changed part of a checkpoint is taken up",
        "rank_files.RankFile.box",
        _r.changed_parts_taken_up,
        "checkpoint parts",
    ),
    Mutant(
        "a sealed part of an earlier save is taken up",
        "rank_files.RankFile.box",
        _r.parts_of_other_saves_taken_up,
        "checkpoint parts",
    ),
    Mutant(
        "noise fitted otherwise takes back what was released",
        "gate.planned.refuse_other_noise",
        _r.other_noise_taken_up,
        "resumed noise",
    ),
    Mutant(
        "a run goes on with records that lie elsewhere",
        "privacy_units.Units.places_in",
        _r.records_elsewhere_taken_up,
        "places",
    ),
    Mutant(
        "a record at several places counts at each",
        "privacy_units.refuse_repeated_records",
        _r.repeated_records_served,
        "repeated records",
    ),
    Mutant(
        "a record at several places is scored at each",
        "hold_out_scores.refuse_repeated_records",
        _r.repeated_records_scored,
        "repeated records",
    ),
    # clipping
    Mutant(
        "one layer not clipped",
        "gradients.Engine._add_clipped",
        _s.one_layer_not_clipped,
        "sensitivity",
        "groups",
    ),
    Mutant(
        "biases left out of the norm",
        "gradients.Dense.squared_norms",
        _s.bias_left_out,
        "sensitivity",
        "groups",
    ),
    Mutant(
        "inputs left out of linear layers' norms",
        "gradients.arithmetic.norms.squared_norms_together",
        _s.inputs_left_out,
        "sensitivity",
        "in microbatches",
    ),
    Mutant(
        "compiled norms of rows without the inputs",
        "gradients.SingleRows.measure",
        _s.inputs_of_rows_left_out,
        "sensitivity",
        "usual",
    ),
    Mutant(
        "a part of the work done by no thread",
        "gradients/per_sample/parts.c",
        _s.last_part_unmeasured,
        "sensitivity",
        "usual",
    ),
    Mutant(
        "products of rows in the next row's place",
        "gradients/arithmetic/row_products.c",
        _s.rows_in_the_next_place,
        "sensitivity",
        "usual",
    ),
    Mutant(
        "positions of the record before added up",
        "gradients/arithmetic/position_sums.c",
        _s.positions_of_the_record_before,
        "sensitivity",
        "usual",
    ),
    Mutant(
        "outputs of convolutions in the next record's place",
        "gradients/layers/convolutions.c",
        _s.images_in_the_next_place,
        "sensitivity",
        "strided",
    ),
    Mutant(
        "compiled factors for a larger bound",
        "clipping.Clipping.in_c",
        _s.bound_in_c_too_large,
        "sensitivity",
        "groups",
    ),
    Mutant(
        "a record's factor taken from its neighbour",
        "record_by_record.add_few",
        _s.factors_of_neighbours,
        "isolation",
        "formed_a_few_at_once",
    ),
    Mutant(
        "the last of a few left out of the norms",
        "record_by_record.measured",
        _s.last_of_a_few_unmeasured,
        "isolation",
        "formed_a_few_at_once",
    ),
    Mutant(
        "compiled functions measure less than they form",
        "gradients.per_sample.native.form",
        _s.compiled_norms_of_the_first_outputs,
        "sensitivity",
        "images",
    ),
    Mutant(
        "what is longer than its ghost norm is not shortened",
        "gradients.per_sample.ghost_norms.shortening",
        _s.longer_than_claimed,
        "sensitivity",
        "cancelling",
    ),
    Mutant(
        "tied weight without cross terms",
        "gradients.engine.merge",
        _s.cross_terms_left_out,
        "sensitivity",
        "tied",
    ),
    Mutant(
        "norm formula by batch size",
        "gradients.layers.linear.positions",
        _s.gram_norms_in_large_batches,
        "sensitivity",
        "cancelling",
    ),
    Mutant(
        "rounding margin dropped",
        "gradients.engine.margin",
        _s.no_rounding_margin,
        "sensitivity",
        "roundings",
    ),
    Mutant(
        "a NaN record poisons the sum",
        FACTORS,
        partial(_s.factors_by, _s.nan_factors),
        "sensitivity",
        "images",
    ),
    Mutant(
        "batch clipped as a whole",
        FACTORS,
        partial(_s.factors_by, _s.batch_clipped_as_a_whole),
        "sensitivity",
        "tied",
    ),
    Mutant(
        "functional use of a weight unseen",
        "HookManager._reached, _before_step",
        _s.functional_use_unseen,
        "refusals",
    ),
    Mutant(
        "roundings under a mean unseen",
        "gradients.backward_pass.narrow_operation",
        _s.roundings_unseen,
        "refusals",
    ),
    Mutant(
        "writes through .data unseen",
        "values.Values.changed",
        _i.values_unseen,
        "isolation",
        "writes_through_data",
    ),
    Mutant(
        "words of tensors left out",
        "gradients/watch/values.c",
        _i.values_unread,
        "isolation",
        "writes_through_data",
    ),
    Mutant(
        "padding with others unseen",
        "training.trials.loss_check",
        _i.padding_unseen,
        "isolation",
        "pads_by_the_longest",
    ),
    Mutant(
        "a sum by a constant taken for a mean",
        "training.losses.handed_over.HandedOver",
        _i.factors_unseen,
        "isolation",
        "divides_by_the_planned_batch",
    ),
    Mutant(
        "a sum by each batch's length taken for a sum",
        "training.losses.handed_over.HandedOver",
        _i.changes_of_factors_unseen,
        "isolation",
        "divides_by_each_batch",
    ),
    Mutant(
        "a loop's own scalar taken for a mean",
        "training.losses.bare_losses.BareLosses",
        _i.own_scalars_unread,
        "isolation",
        "compares_each_with_all",
    ),
    Mutant(
        "means over all labels of a batch",
        "training.losses.handed_over.HandedOver",
        _i.means_over_all_labels,
        "isolation",
        "counts_of_others_labels",
    ),
    Mutant(
        "outputs of another record in a record's own loss",
        "training.losses.parts_of_models.Noted",
        _i.others_rows_in_losses,
        "isolation",
        "labels_of_others_in_own_losses",
    ),
    Mutant(
        "weights of a loss learn unprotected",
        "training.losses.other_parameters",
        _i.other_parameters_unseen,
        "isolation",
        "trains_weights_of_the_loss",
    ),
    Mutant(
        "losses of the first batch asked alone",
        "training.losses.handed_over.HandedOver",
        _l.first_losses_asked_alone,
        "later batches",
    ),
    Mutant(
        "states handed on between records alone",
        "training.trials.isolation.refuse_memory",
        _l.memories_unseen,
        "later batches",
    ),
    Mutant(
        "states that only training hands on",
        "training.trials.deterministic_runs",
        _l.memories_of_evaluation_looked_for,
        "later batches",
    ),
    Mutant(
        "parameters moved to another group within a step",
        "training.optimizer_hooks.settings_of",
        _l.parameters_of_groups_not_compared,
        "later batches",
    ),
    Mutant(
        "settings changed within a step",
        "training.OptimizerHooks",
        _l.settings_of_microbatches,
        "later batches",
    ),
    Mutant(
        "no setting but rates compared within a step",
        "training.OptimizerHooks",
        _l.rates_compared_alone,
        "later batches",
    ),
    Mutant(
        "a failed update done again from what lies in .grad",
        "ReleasedGradients.take",
        _l.redone_from_what_lies_there,
        "later batches",
    ),
    Mutant(
        "range of a model's noise unseen",
        "training.trials.fixed_noise.scale_of",
        _i.scale_of_noise_unseen,
        "isolation",
        "draws_by_the_longest",
    ),
    Mutant(
        "random numbers of records unseen",
        "training.trials.fixed_noise.FixedNoise",
        _i.alike_in_what_is_drawn,
        "isolation",
        "mixes_by_a_rare_coin",
    ),
    Mutant(
        "coins of a loss tried once",
        "training.trials.program.compare_held",
        _i.one_draw_of_coins,
        "isolation",
        "mixes_by_a_rare_coin",
    ),
    Mutant(
        "mixing by chance unseen",
        "training.trials.first_passes",
        _i.chances_of_models_untried,
        "isolation",
        "mixes_inside_by_a_rare_coin",
    ),
    Mutant(
        "curvatures of scalars unseen",
        "training.losses.coupled_losses.curvatures_of_one",
        _i.curvatures_unseen,
        "isolation",
        "takes_the_root",
    ),
    Mutant(
        "kinks of scalars unseen",
        "training.losses.coupled_losses.under_kinks",
        _i.kinks_unseen,
        "isolation",
        "floods",
    ),
    Mutant(
        "spectral norms at each microbatch",
        "ModelWatch.begin",
        _i.norms_at_each_microbatch,
        "isolation",
        "norms_that_count_microbatches",
    ),
    Mutant(
        "large numbers untried",
        "training.trials.neighbours.mixed_beside_large",
        _i.large_numbers_untried,
        "isolation",
        "rounds_beside_outliers",
    ),
    Mutant(
        "other ranges untried",
        "training.trials.variations.with_ranges",
        _i.other_ranges_untried,
        "isolation",
        "scales_beside_a_number_above_one",
    ),
    Mutant(
        "targets that meet all outputs unseen",
        "training.losses.meeting_places.refuse_broadcast",
        _i.broadcast_unseen,
        "isolation",
        "compares_each_with_all",
    ),
    Mutant(
        "numbers of a batch as they are",
        "training.trials.numbers_of_batches.Change",
        _i.numbers_as_they_are,
        "isolation",
        "limits_beside_a_large_loss",
    ),
    Mutant(
        "flags untried as False",
        "training.trials.missing_numbers.missing_flags",
        _i.false_flags_untried,
        "isolation",
        "counts_flags_of_the_batch",
    ),
    Mutant(
        "no whole records beside those of no numbers",
        "training.trials.missing_numbers.Missing",
        _i.whole_records_missing,
        "isolation",
        "stops_at_no_number",
    ),
    Mutant(
        "compared in bfloat16 alone",
        "training.trials.deterministic_runs.autocast_seen",
        _i.compared_in_bfloat16_alone,
        "isolation",
        "mixes_a_little_under_autocast",
    ),
    Mutant(
        "states of a recurrent layer are a neighbour's",
        "layers.recurrent.Steps.previous",
        _i.states_of_neighbours,
        "sensitivity",
        "states",
    ),
    Mutant(
        "a group norm's gradients added to the next record's",
        "layers.normalisation.backward_in_groups",
        _i.channels_of_neighbours,
        "sensitivity",
        "groups",
    ),
    Mutant(
        "gradients of made weights added to the next record's",
        "layers.made.by_record",
        _i.made_weights_of_neighbours,
        "sensitivity",
        "made weights",
    ),
    Mutant(
        "modes of batch normalisations unwatched",
        "hooks.model_hooks.ModeHook",
        _i.modes_unwatched,
        "isolation",
        "turns_on_batch_statistics",
    ),
    Mutant(
        "stale rows of an earlier pass",
        "HookManager.see_output",
        _i.stale_rows,
        "isolation",
        "rows_of_an_earlier_pass",
    ),
    Mutant(
        "empty slots counted as records",
        "RowsOfRecords.shares",
        _i.empty_slots_counted,
        "isolation",
        "empty_slots",
    ),
    Mutant(
        "records moved into empty slots by collating",
        "slot_places.refuse_moving",
        _i.moving_collates_taken,
        "isolation",
        "sorted_into_empty_slots",
    ),
    Mutant(
        "one record's flags taken for all",
        "LoopedLayer._same_for_all",
        _i.flags_of_the_last,
        "isolation",
        "flags_of_one_record",
    ),
    Mutant(
        "a slower way said and not taken",
        "Prepared._by_another_way",
        _i.slower_way_not_taken,
        "isolation",
        "sorted_for_one_layer",
    ),
    Mutant(
        "secret seeds lost",
        "training.randomness.secret_randomness",
        _i.seeds_of_the_program,
        "isolation",
        "dropout_by_a_public_seed",
    ),
    Mutant(
        "losses made of two records",
        "training.losses.coupled_losses",
        _i.coupled_losses_taken,
        "isolation",
        "multiplies_losses",
    ),
    Mutant(
        "a model's own seeds kept",
        "training.randomness.generators.generators_in",
        _i.own_seeds_of_the_program,
        "isolation",
        "dropout_by_a_public_seed",
    ),
    Mutant(
        "second backward pass counts again",
        "gradients.Engine._close",
        _s.second_backward_counts,
        "refusals",
    ),
    Mutant(
        "two rows of a person clipped apart",
        "gradients.Engine.begin_microbatch",
        _s.rows_clipped_apart,
        "persons",
    ),
    Mutant(
        "a person's rows in two microbatches",
        "MicrobatchSampler.microbatches",
        _s.person_in_two_microbatches,
        "persons",
    ),
    Mutant(
        "rows that are not there count",
        "gradients.RowsOfRecords",
        _s.absent_rows_counted,
        "persons",
    ),
    Mutant(
        "persons divided by public coins",
        "tuning.search.DPSearchCV._coins",
        faults_of_persons.parts_by_public_coins,
        "orders of persons",
    ),
    Mutant(
        "single passes in the order of persons' rows",
        "estimators.linear_fit.of_persons",
        faults_of_persons.single_passes_in_the_tables_order,
        "orders of persons",
    ),
    Mutant(
        "the given order of persons who may be replaced served",
        "training.prepared.refuse_places_of_persons",
        faults_of_persons.given_order_of_persons_served,
        "orders of persons",
    ),
    Mutant(
        "a person's rows count in full",
        "estimators.persons.of_persons",
        _t.rows_of_a_person_in_full,
        "shares",
    ),
    Mutant(
        "class weights above 1",
        "estimators.table.public_weights",
        _t.weights_above_one,
        "shares",
    ),
    Mutant(
        "weights of rows after clipping",
        "solvers.LinearModel.clipped_sum",
        _t.weights_after_clipping,
        "shares",
    ),
    Mutant(
        "rows read low by the compiled sum of linear models",
        "solvers.linear_sums.clipped_sum",
        _t.compiled_rows_read_low,
        "shares",
    ),
    Mutant(
        "weights of rows in sums not cut",
        "estimators.weights.weights_of_rows",
        _t.weights_in_sums_not_cut,
        "shares",
    ),
    Mutant(
        "pieces of a sparse entry measured apart",
        "data.sparse_rows.canonical",
        _t.pieces_measured_apart,
        "shares",
    ),
    # sampling
    Mutant(
        "shuffled batches accounted as Poisson",
        DRAW,
        partial(_s.drawn_by, _s.shuffled),
        "participation",
        "hundreds",
    ),
    Mutant(
        "batches of a fixed size",
        DRAW,
        partial(_s.drawn_by, _s.fixed_size),
        "participation",
        "hundreds",
    ),
    Mutant(
        "the last of a large batch left out",
        LARGEST,
        _s.last_left_out,
        "participation",
        "no more than expected",
    ),
    Mutant(
        "small batches filled up", LARGEST, _s.filled_up, "participation", "no more than expected"
    ),
    Mutant(
        "the same batch each step",
        DRAW,
        partial(_s.drawn_by, _s.same_batch_each_step),
        "participation",
        "hundreds",
    ),
    Mutant(
        "one coin for the whole batch",
        DRAW,
        partial(_s.drawn_by, _s.one_coin_for_all),
        "participation",
        "hundreds",
    ),
    Mutant(
        "empty batches drawn again",
        DRAW,
        partial(_s.drawn_by, _s.empty_redrawn),
        "participation",
        "one or none",
    ),
    Mutant(
        "records sampled more often than accounted",
        DRAW,
        partial(_s.drawn_by, _s.too_often),
        SAMPLED,
    ),
    Mutant(
        "empty batches skipped",
        "training.MicrobatchSampler.microbatches",
        _s.empty_skipped,
        "participation",
        "one or none",
    ),
    Mutant(
        "placeholder of an empty batch counted",
        "gradients.Engine.begin_microbatch",
        _s.placeholder_counted,
        "participation",
        "one or none",
    ),
    # what is seen besides
    Mutant(
        "realised batch size in the denominator",
        "gradients.Engine.take_sums",
        _s.realised_denominator,
        "replay",
    ),
    Mutant("batch size printed", "gradients.Engine.begin_microbatch", _s.rows_printed, "replay"),
    Mutant(
        "an error quotes a gradient's norm",
        FACTORS,
        partial(_s.factors_by, _s.norm_in_message),
        "replay",
    ),
    Mutant(
        "number of clipped records logged",
        FACTORS,
        partial(_s.factors_by, _s.clipped_share_logged),
        "replay",
    ),
    # methods beyond DP-SGD
    Mutant(
        "residual of error feedback not clipped",
        "clipping.SplitClipping.factors",
        _m.residual_not_clipped,
        DICE,
    ),
    Mutant(
        "error normalised instead of clipped",
        "methods.ErrorFeedback._share",
        _m.error_normalised,
        DICE,
    ),
    Mutant(
        "passes counted as one",
        "sampling.FixedBatches.participations",
        _m.passes_counted_as_one,
        DICE,
        "(4, 4, 6)",
    ),
    Mutant(
        "noise of a sum on the scale of a mean",
        "HiddenStateNoise.sensitivity",
        _m.noise_for_the_mean,
        DICE,
    ),
    Mutant(
        "error never reset",
        "methods.DiceSGD.sensitive_state",
        _m.error_never_reset,
        DICE,
        "(4, 4, 6)",
    ),
    Mutant(
        "tree sensitivity one level short",
        "noise.BinaryTree.sensitivity",
        _m.tree_one_level_short,
        CORRELATED,
    ),
    Mutant(
        "passes below one node charged apart",
        "noise.tree.regular_shift",
        _m.passes_of_a_tree_apart,
        CORRELATED,
        "dp-ftrl, Honaker, two passes",
    ),
    Mutant(
        "second pass not charged",
        "noise.ToeplitzSquareRoot.sensitivity",
        _m.first_participation_only,
        CORRELATED,
        "dp-ftrl, two passes",
    ),
    Mutant(
        "sensitivity of the strategy left out",
        "gate.CorrelatedSum",
        _m.independent_sensitivity,
        CORRELATED,
    ),
    Mutant(
        "banded sensitivity left out",
        "BandedToeplitz.sensitivity",
        _c.banded_sensitivity_left_out,
        "banded noise",
    ),
    Mutant(
        "later passes of buffered noise not charged",
        "noise.buffered.added_up",
        _c.passes_of_buffers_apart,
        "banded noise",
        "dp-ftrl, no vectors, two passes",
    ),
    Mutant(
        "small learning rates charged as small gradients",
        "BandedToeplitz.sensitivity",
        _c.rates_taken_for_clipping,
        "banded noise",
        "dp-ftrl, cosine decay, two passes",
    ),
    Mutant(
        "noise as small as the rates of a plan",
        "BandedToeplitz.start",
        _c.noise_by_planned_rates,
        "banded noise",
        "dp-ftrl, planned rates, two passes",
    ),
    Mutant(
        "records in neighbouring turns",
        f"{TURNS}.batches",
        _c.records_in_neighbouring_turns,
        "banded noise",
        "dp-ftrl, every turn",
    ),
    Mutant(
        "records in neighbouring bins",
        f"{TURNS}.batches",
        _c.records_in_neighbouring_turns,
        "balls in bins",
    ),
    Mutant(
        "more bins charged than dealt",
        "mechanisms.CorrelatedNoise.event",
        _c.more_bins_charged_than_dealt,
        "balls in bins",
    ),
    Mutant(
        "records back too soon",
        f"{APART}.batches",
        _c.records_back_too_soon,
        "b-min-sep",
    ),
    Mutant(
        "rate of coins divided by the gap twice",
        f"{APART}.event_of_strategy",
        _c.rate_of_coins_divided_by_the_gap_twice,
        "b-min-sep",
    ),
    Mutant(
        "copies of a pattern taken for orthogonal",
        "accounting.Replicas",
        _c.cross_terms_left_out,
        "b-min-sep accounting",
    ),
    Mutant(
        "a search that ends above its target",
        "accounting.calibration._descend",
        faults_of_prices.a_search_that_ends_above_its_target,
        "calibration",
    ),
    Mutant(
        "remembered noise not priced again",
        "accounting.calibrate_remembered",
        faults_of_prices.remembered_noise_believed,
        "calibration",
    ),
    Mutant(
        "one turn charged",
        f"{TURNS}.event",
        _c.one_turn_charged,
        "banded noise",
        "dp-ftrl, every turn",
    ),
    Mutant(
        "solvers' noise times 0.7",
        "gate.FilteredGate.deviation",
        _m.solver_noise_too_small,
        "solvers",
    ),
    Mutant(
        "solvers' norm bound halved",
        "gate.FilteredGate.release_sum",
        _m.norm_bound_of_half,
        "solvers",
    ),
    Mutant(
        "a norm's bound halved", "gate.FilteredGate.release_norm", _m.norm_of_half_a_record, "norms"
    ),
    Mutant(
        "odds of a choice not halved", "gate.SelectionGate.select", _m.odds_not_halved, "selection"
    ),
    Mutant(
        "biases left out of the value bound",
        "gradients.value_clipping.feed_forward",
        _m.biases_left_out,
        "value clipping",
    ),
    Mutant(
        "later layers left out of the value bound",
        "SpectralNorms",
        _m.later_weights_left_out,
        "value clipping",
    ),
    Mutant(
        "a record counts in two bins",
        "private_quantile.histogram",
        _m.counted_in_two_bins,
        "clip norm search",
    ),
    Mutant(
        "a count beside the whole gradient",
        "QuantileSearch.query",
        _m.count_beside_the_whole_gradient,
        "clip norm search",
    ),
    Mutant(
        "gradients clipped before they are scaled",
        "scaled_clipping.ScaledUnits",
        _m.clipped_before_scaled,
        "scaled gradients",
    ),
    Mutant(
        "scaled clip norms clipped as if unscaled",
        "clipping.Units.in_c",
        _m.scaled_rules_taken_for_plain,
        "scaled gradients",
    ),
    Mutant(
        "scales by the sum that they are for",
        "PrivateScales.scaled",
        _m.scales_read_before_the_noise,
        "scaled gradients",
    ),
    Mutant(
        "moments beside the whole gradient",
        "PrivateScales.query",
        _m.moments_beside_the_whole_gradient,
        "scaled gradients",
    ),
    # statistics beside training
    Mutant(
        "values beyond the public range not cut",
        "preprocessing.BoundedColumns",
        _t.values_not_cut,
        "statistics",
        "imputer",
    ),
    Mutant(
        "a mean read before it is charged",
        "preprocessing.DPImputer.fit",
        _t.mean_of_the_data,
        "statistics",
        "imputer",
    ),
    Mutant(
        "a range read off the data",
        "preprocessing.DPMinMaxScaler.fit",
        _t.range_of_the_data,
        "statistics",
        "public range",
    ),
    Mutant(
        "counts' noise for half a record",
        "statistics.histogram_bound",
        _t.half_a_record,
        "statistics",
        "class counts",
    ),
    Mutant(
        "a record counts in each group",
        "summaries.Groups.sums",
        _t.values_in_each_group,
        "statistics",
    ),
    Mutant(
        "scores released without noise",
        "evaluation.release_sum",
        _t.scores_without_noise,
        "statistics",
        "evaluation",
    ),
    Mutant(
        "scatter of errors released without noise",
        "evaluation.regressor.released_sum",
        _t.scatter_without_noise,
        "statistics",
        "evaluation of a regression",
    ),
    Mutant(
        "scatter of losses read off the records",
        "evaluation.variance_of_loss",
        _t.scatter_of_losses_of_the_data,
        "statistics",
        "evaluation",
    ),
    Mutant(
        "dates scaled by the first and the last",
        "data.encoding.scaled",
        _t.dates_between_the_first_and_the_last,
        "encoding",
    ),
    Mutant(
        "dates beyond the public bounds not cut",
        "data.encoding.scaled",
        _t.dates_not_cut,
        "encoding",
    ),
    Mutant(
        "records read up to the next quotation mark",
        "data.table_files.csv_rows",
        _columns.texts_up_to_the_next_quotation_mark,
        "encoding",
    ),
    Mutant(
        "colours brought to one deviation over all images",
        "data.preparation.OpponentColours",
        faults_of_features.colours_of_one_deviation,
        "image features",
    ),
    Mutant(
        "planes brought to one deviation over all images",
        "data.preparation.Scatter.fill",
        faults_of_features.planes_of_one_deviation,
        "image features",
    ),
    Mutant(
        "the mean of all images taken off",
        "data.preparation.Whiten",
        faults_of_features.mean_image_taken_off,
        "image features",
    ),
    Mutant(
        "both ends of a range for the price of one",
        "gate.FilteredGate.select",
        _t.ends_too_sharp,
        "statistics",
        "sharpest_choice",
    ),
    Mutant(
        "categories found by true counts",
        "preprocessing.private_step.release_sum",
        _t.categories_of_the_data,
        "statistics",
        "frequent categories",
    ),
    Mutant(
        "entries of a sparse table not cut",
        "statistics.sum_of_cells",
        _t.entries_not_cut,
        "statistics",
        "scaler of a sparse table",
    ),
    Mutant(
        "x y released on top of x x^T",
        "solvers.sufficient_statistics",
        _t.cross_products_for_free,
        "statistics",
        "regression sums",
    ),
    Mutant(
        "losing trials not charged",
        "tuning.search",
        _t.losing_trials_not_charged,
        "searches",
    ),
    Mutant(
        "trials as sharp as a search of one",
        "tuning.search_event",
        _t.trials_as_sharp_as_one,
        "searches",
    ),
    Mutant(
        "the order of scores is free",
        "accounting.selection",
        _t.order_of_scores_is_free,
        "best of trials",
    ),
    # raw columns
    Mutant(
        "values read as their column holds them",
        "preprocessing.one_hot.text_of",
        _columns.values_as_their_column_holds_them,
        "columns",
    ),
    Mutant(
        "labels read as their column holds them",
        "data.numbers.label_text",
        _columns.labels_as_their_column_holds_them,
        "columns",
    ),
    Mutant(
        "categories that occur added to the public ones",
        "preprocessing.DPOneHot.fit",
        _columns.categories_that_occur_added,
        "columns",
    ),
    Mutant(
        "unknown values in all categories",
        "preprocessing.DPOneHot.transform",
        _columns.unknown_values_in_all_categories,
        "columns",
    ),
    Mutant(
        "rows without an owner are one person's",
        "training.batches.privacy_units.Persons.of",
        _columns.nobodys_rows_taken,
        "owners",
    ),
    Mutant(
        "rows of a table without a person are one person's",
        "data.encoding.persons_of",
        _columns.nobodys_rows_of_tables_taken,
        "owners",
    ),
    Mutant(
        "rows of a hold-out without an owner are one person's",
        "training.hold_out_scores",
        _columns.nobodys_rows_of_hold_outs_taken,
        "owners",
    ),
    Mutant(
        "what a refused fit has read is kept",
        "estimators.atomic_fits.whole_fit",
        faults_of_attributes.what_a_refused_fit_read_kept,
        "attributes",
    ),
    Mutant(
        "a table is sparse by how many entries are 0",
        "preprocessing.steps_within.as_parts",
        faults_of_attributes.tables_sparse_by_their_entries,
        "attributes",
    ),
    Mutant(
        "steps of others learn in a pipeline",
        "preprocessing.steps_of_others.notes_on_others",
        faults_of_attributes.steps_of_others_that_learn_let_go,
        "attributes",
    ),
    # rows of tables
    Mutant("noise only in rows looked up", ADD_NORMAL, _rows.noise_only_in_rows_looked_up, "noise"),
    Mutant(
        "maps of touched rows not clipped",
        "gradients.accumulation.table_sums.weights_of",
        _rows.map_not_clipped,
        "selected rows",
    ),
    Mutant(
        "a row counts as often as a record looks it up",
        "distributed.table_totals.TableTotals",
        _rows.lookups_counted_as_often_as_made,
        "selected rows",
    ),
    Mutant(
        "rows selected without noise",
        "gate.SelectedRows.scores",
        _rows.rows_selected_without_noise,
        "selected rows",
    ),
    Mutant(
        "no false positives",
        "gate.row_selection.rare_heads",
        _rows.false_positives_left_out,
        "selected rows",
    ),
    Mutant(
        "no noise on false positives",
        ADD_NORMAL,
        _rows.no_noise_on_false_positives,
        "selected rows",
    ),
    Mutant(
        "counts not charged",
        "gate.SelectedRows.standard_deviation",
        _rows.counts_not_charged,
        "selected rows",
    ),
    # points that a run keeps or moves
    Mutant(
        "the point of the shortest gradient kept",
        "training.Iterates.leave",
        _p.shortest_gradient_kept,
        "iterates",
    ),
    Mutant(
        "the last point kept where a random one is promised",
        "training.Iterates.leave",
        _p.last_point_kept,
        "iterates",
    ),
    Mutant(
        "a ball around the step without noise",
        "training.Iterates.project",
        _p.projected_before_noise,
        "iterates",
    ),
    Mutant(
        "a ball for each tensor alone",
        "training.Iterates.project",
        _p.half_projected,
        "iterates",
    ),
)
