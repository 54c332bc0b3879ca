"""TRL's SFT and DPO trainers, made private: a record is a conversation, or a pair of answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import trl
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.integrations.language import beside_virtual_tokens, next_token_log_probs
from dpoptim.integrations.preferences import DIVERGENCES, LOSSES, Pairs, Settings
from dpoptim.integrations.transformers import PrivateTrainerMixin

Rows = dict[str, Tensor]


class PrivateTRLMixin(PrivateTrainerMixin):
    """Base of TRL's trainers: refusals, and nothing of training batches in ``log``."""

    def _fit_to_plan(self, args: Any) -> None:
        super()._fit_to_plan(args)
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                "the load-balancing loss of a mixture of experts is a mean over the tokens of the "
                "whole batch, in which records weigh each other. Fix: "
                "args.router_aux_loss_coef=0.0."
            )
        if args.activation_offloading:
            raise ValueError(
                "args.activation_offloading copies what each record's gradient is made of. Fix: "
                "leave it out; per_device_train_batch_size is only what memory holds."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what is public; TRL's own figures of training batches are dropped."""
        if not self.debug_private:
            self._metrics["train"].clear()  # type: ignore[attr-defined]
        super().log(logs, start_time)


class PrivateSFTMixin(PrivateTRLMixin):
    """Private supervised fine-tuning, before `trl.SFTTrainer` (or a subclass of it).

    A record is one conversation, or one text.

    Arguments and guarantee: as for `PrivateTrainerMixin`. Losses are averaged over each record's
    own tokens, not over those of the whole batch, by which one record would weigh the others.

    Raises:
        ValueError: options under which records share a row (``packing``, ``padding_free``), or
            weigh each other.
    """

    def _fit_to_plan(self, args: Any) -> None:
        super()._fit_to_plan(args)
        if args.packing or self.padding_free:  # type: ignore[attr-defined]
            option = "packing" if args.packing else "padding_free"
            raise ValueError(
                f"args.{option}=True puts several records in one row, where they cannot be told "
                f"apart. Fix: {option}=False; collators that pad are safe."
            )

    def per_sample_losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """One loss a conversation, as ``args.loss_type`` says."""
        if self._losses is not None or self.args.loss_type == "nll":  # type: ignore[attr-defined]
            return super().per_sample_losses(model, inputs)
        given = {key: value for key, value in inputs.items() if key != "labels"}
        labels = beside_virtual_tokens(model, inputs["labels"])
        found, counted = next_token_log_probs(model(**given).logits, labels)
        # Each token weighed by its own probability: https://huggingface.co/papers/2508.05629
        return -(found * found.exp().detach()).sum(1) / counted.clamp(min=1)


class PrivateDPOMixin(PrivateTRLMixin):
    """Private preference optimization, before `trl.DPOTrainer` (or a subclass of it).

    A record is one pair of completions, with its prompt.

    A pair is two rows of a batch, whose gradients are clipped as one.
    ``per_device_train_batch_size`` counts pairs.

    Arguments and guarantee: as for `PrivateTrainerMixin`. The reference model must be public, or
    released: made of other data, or under a guarantee of its own.

    Raises:
        ValueError: losses in which pairs weigh each other (``aot``), or that are not served.
    """

    rows_per_record = 2

    def _fit_to_plan(self, args: Any) -> None:
        super()._fit_to_plan(args)
        if unserved := [name for name in args.loss_type if name not in LOSSES]:
            raise ValueError(
                f"args.loss_type={unserved[0]!r} is not one loss a pair that depends on that pair "
                f"alone. Fix: one of {', '.join(LOSSES)}; or losses=fn(model, inputs)."
            )
        if args.f_divergence_type not in DIVERGENCES:
            raise ValueError(
                f"args.f_divergence_type={args.f_divergence_type!r} is not served privately. Fix: "
                f"one of {', '.join(DIVERGENCES)}; or losses=fn(model, inputs)."
            )
        for option, served in (("ld_alpha", None), ("use_weighting", False)):
            if getattr(args, option) != served:
                raise ValueError(
                    f"args.{option} is not served privately. Fix: {option}={served}; or "
                    "losses=fn(model, inputs)."
                )
        if args.precompute_ref_log_probs and args.precompute_ref_batch_size != 1:
            raise ValueError(
                "args.precompute_ref_log_probs pads pairs to each other's length, which rounds "
                "what they are compared with. Fix: precompute_ref_batch_size=1."
            )

    def _records(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Each pair as two rows, the chosen one first, as TRL's collator makes them of it alone."""
        dataset, collate = super()._records()
        padding = getattr(self.data_collator, "pad_token_id", None)  # type: ignore[attr-defined]
        return PairRows(dataset, collate), PadRows(padding or 0)

    def per_sample_losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """One loss a pair of rows, chosen and rejected, by ``loss_type`` and ``loss_weights``."""
        if self._losses is not None:
            return self._losses(model, inputs)
        args, mask = self.args, inputs["completion_mask"]  # type: ignore[attr-defined]
        labels = beside_virtual_tokens(model, inputs["input_ids"].masked_fill(mask == 0, -100))
        given = {k: v for k, v in inputs.items() if k not in ("completion_mask", "ref_logps")}
        each, counted = next_token_log_probs(model(**given, use_cache=False).logits, labels)
        log_probs = each.sum(1)
        ratios = log_probs - self._reference(inputs).to(log_probs)
        scores = DIVERGENCES[args.f_divergence_type](ratios)
        lengths = mask.sum(1).clamp(min=1)
        pairs = Pairs(
            chosen=ratios[::2],
            rejected=ratios[1::2],
            chosen_score=scores[::2],
            rejected_score=scores[1::2],
            chosen_length=lengths[::2],
            rejected_length=lengths[1::2],
            likelihood=(log_probs / counted.clamp(min=1))[::2],
        )
        settings = Settings(args.beta, args.label_smoothing, args.discopop_tau)
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        terms = [
            weight * LOSSES[name](pairs, settings)
            for name, weight in zip(args.loss_type, weights, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def _reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The reference's log-probability of each completion, shape (rows,)."""
        if "ref_logps" in inputs:
            return inputs["ref_logps"]
        reference = self.ref_model or self.model  # type: ignore[attr-defined]
        with torch.no_grad(), checkpointing_off(self.model):  # type: ignore[attr-defined]
            return torch.cat(self.compute_ref_log_probs(reference, inputs))  # type: ignore[attr-defined]

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """TRL's own, for scores on public pairs."""
        with checkpointing_off(self.model):  # type: ignore[attr-defined]
            return super().compute_loss(*args, **options)  # type: ignore[misc]


@contextmanager
def checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Without activation checkpointing, which TRL would switch off and on again by new hooks."""
    on = [module for module in model.modules() if vars(module).get("gradient_checkpointing")]
    for module in on:
        vars(module)["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for module in on:
            vars(module)["gradient_checkpointing"] = True


@dataclass(frozen=True)
class PairRows(Dataset[Rows]):
    """Pairs as items of two rows: what ``collate`` makes of each pair alone.

    Args:
        pairs: a map-style data set.
        collate: TRL's, for pairs.
    """

    pairs: Any
    collate: Callable[[list[Any]], Any]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Rows:
        rows = dict(self.collate([self.pairs[index]]))
        if "ref_chosen_logps" in rows:
            both = (rows.pop("ref_chosen_logps"), rows.pop("ref_rejected_logps"))
            rows["ref_logps"] = torch.cat(both)
        return rows


@dataclass(frozen=True)
class PadRows:
    """Collates rows of tokens and masks, padded on the right to the longest.

    Args:
        token: that fills up; masks tell it apart.
    """

    token: int

    def __call__(self, rows: Sequence[Rows]) -> Rows:
        def of(key: str) -> Tensor:
            found = [row[key] for row in rows]
            if found[0].dim() == 0:
                return torch.stack(found)
            value = self.token if key == "input_ids" else 0
            return nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=value)

        return {key: of(key) for key in rows[0]}


class PrivateSFTTrainer(PrivateSFTMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with differential privacy: the same arguments, and a ``plan``.

    See `PrivateSFTMixin`.

    Example::

        trainer = PrivateSFTTrainer(model, args, train_dataset=conversations, plan=plan)
        trainer.train()
        print(trainer.private.spent())
    """


class PrivateDPOTrainer(PrivateDPOMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with differential privacy: the same arguments, and a ``plan``.

    See `PrivateDPOMixin`.

    Example::

        trainer = PrivateDPOTrainer(model, reference, args, train_dataset=pairs, plan=plan)
        trainer.train()
        print(trainer.private.spent())
    """
