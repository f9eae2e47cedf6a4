"""`Learner`: the policy, its reference and its optimizer, one optimizer step at a time (loop.py has its lines).

The cut into micro-batches changes memory and nothing else. Either every rank makes a step or none does: metrics and
gradient norm, which decide it, are known to all ranks before the optimizer moves.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fused_grpo.errors import InputError
from fused_grpo.integrations.model_modes import (
    checkpoint_activations,
    disable_dropout,
    modes_of,
    set_modes,
    warn_of_rounding,
)
from fused_grpo.loss import GRPOLossOutput
from fused_grpo.trainer.batching.micro_batch_metrics import (
    correction_weights,
    evidence,
    per_sequence,
    step_metrics,
    threshold_of_uncertain,
    with_covariance_selection,
)
from fused_grpo.trainer.batching.micro_batches import Packing, can_skip, micro_batches
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed.failures import NonFiniteSteps, all_ranks_succeed, any_rank, gather_objects
from fused_grpo.trainer.distributed.sharding import (
    check_reduced,
    frozen_copy,
    prepare,
    prepare_sharding,
    reduced_parameters,
    same_weights,
    shard_frozen,
    warn_of_other_replicas,
)
from fused_grpo.trainer.models.adapters import (
    adapter_stream,
    as_reference,
    base_model,
    check_adapter,
    checkpoint_weights,
    is_adapted,
    trained_state,
    with_virtual_places,
)
from fused_grpo.trainer.models.attention import attention_cost
from fused_grpo.trainer.models.loading import SELF, check_teacher_model
from fused_grpo.trainer.models.optimizer import EntropyController, make_optimizer, make_schedule
from fused_grpo.trainer.models.router_replay import RouterReplay
from fused_grpo.trainer.models.weight_stream import WeightStream
from fused_grpo.trainer.policy import Output, PolicyLoss, Teacher, evaluating, router_loss_coefficient
from fused_grpo.trainer.self_check import Measured, check_options, self_check, shared_layout
from fused_grpo.trainer.types import MicroBatch, Sample, with_fields

Context = AbstractContextManager[Any] | None
Optimizers = tuple[torch.optim.Optimizer | None, Any]
Rounding = Callable[[torch.dtype], float]
Check = Callable[[dict[str, float], Rounding], None]
Event = Callable[[str], object]


class _Made(NamedTuple):
    """A weight when the trainer was made."""

    weight: Tensor
    form: tuple[torch.dtype, torch.Size]
    is_trained: bool


class Learner:
    """The policy, its reference, its optimizer and schedule.

    Args:
        model: the causal LM that is trained, in place; or a PeftModel.
        optimizers: an optimizer over the model's parameters and a schedule, instead of those of `args`.
        corrected: whether another engine than the trainer's own model samples, so that the loss corrects for it.
        teacher: the model to distil from, or "self": the reference.

    InputError for a teacher with a smaller vocabulary, UnsupportedError for one beside virtual tokens.
    """

    _checked: Set[Any] = frozenset()  # the forms of the weights when they were last checked

    def __init__(
        self,
        model: PreTrainedModel,
        args: GRPOConfig,
        accelerator: Accelerator,
        *,
        max_steps: int,
        optimizers: Optimizers = (None, None),
        corrected: bool = True,
        teacher: PreTrainedModel | str | None = None,
    ) -> None:
        if teacher is not None:
            check_teacher_model(teacher, model)
        prepare_sharding(accelerator)
        self.args, self.accelerator, self.step, self.max_steps = args, accelerator, 0, max_steps
        self.loss_config = args.loss_config(corrected=corrected)
        self.entropy = EntropyController(args)
        output_dir, rank = Path(args.output_dir).absolute(), accelerator.process_index
        self.nonfinite = NonFiniteSteps(output_dir, rank, limit=args.max_skipped_steps)
        warn_of_rounding(model, args.learning_rate)
        if args.disable_dropout:
            disable_dropout(model)
        self.vocab_size = base_model(model).config.get_text_config().vocab_size  # token ids are below it
        routing = RouterReplay(base_model(model), replaces=args.router_replay)
        self.routing = routing if routing.layers or args.router_replay else None
        # The number of layers, and of experts in those that have some.
        self.routers = None if self.routing is None else (routing.num_layers, routing.layers)
        policy = PolicyLoss(
            model,
            self.loss_config,
            temperature=args.temperature,
            chunk_bytes=args.chunk_bytes,
            router_aux_loss_coef=router_loss_coefficient(base_model(model), args),
            routing=self.routing,
        )
        teacher_policy = None
        if isinstance(teacher, torch.nn.Module):
            teacher_policy = PolicyLoss(teacher, self.loss_config, temperature=args.temperature)
        head_rows, hidden_size = base_model(model).get_output_embeddings().weight.shape
        layout, self.is_random = self._self_check([policy] if teacher_policy is None else [policy, teacher_policy])
        self.can_skip = can_skip(args, router_coefficient=self.router_coefficient)
        self.packing = dataclasses.replace(
            layout,
            attention=attention_cost(hidden_size),
            sequences=args.sequences_per_micro_batch,
            max_tokens=args.max_tokens_per_micro_batch,
            replays=args.router_replay,
        )
        self._given_modes = modes_of(model)
        if args.gradient_checkpointing:
            checkpoint_activations(model, args.gradient_checkpointing_kwargs or {})
        self._run_modes = modes_of(model)
        # A copy, because the model changes.
        needs_copy = (args.beta > 0 or teacher == SELF) and not is_adapted(model)
        # What no checkpoint has, and a resumed run reads again: a reference that stays, or the base of an adapter.
        is_read_again = is_adapted(model) or (needs_copy and not args.sync_ref_model)
        # DDP alone sends rank 0's weights to all ranks.
        keeps_own = needs_copy or is_adapted(model) or accelerator.is_fsdp2
        weights = same_weights(accelerator, "the model", model) if keeps_own else None
        self.frozen_weights = weights if is_read_again else None
        frozen = frozen_copy(accelerator, policy) if needs_copy else None
        optimizer = optimizers[0] or make_optimizer(model, args)
        self.policy, self.optimizer = prepare(accelerator, policy, optimizer)
        self._unwrapped: PolicyLoss = accelerator.unwrap_model(self.policy)
        self._reduced = reduced_parameters(self.policy, args)
        self.reference = None if frozen is None else shard_frozen(accelerator, frozen, self.policy)
        self.teacher = None if teacher is None else self._make_teacher(teacher_policy, vocab_size=head_rows)
        self.scheduler = optimizers[1] or make_schedule(optimizer, args, max_steps)
        self.beginning = self._beginning(optimizer)
        named = self._unwrapped.named_parameters()
        self._made = {name: _Made(one, (one.dtype, one.shape), one.requires_grad) for name, one in named}

    def _self_check(self, policies: Sequence[PolicyLoss]) -> tuple[Packing, bool]:
        """How rows may be shared, and whether the policy in training mode is random."""
        checks = list[Measured]()
        # Under FSDP2 rank 0 may be the only one that has read the weights.
        with all_ranks_succeed(self.accelerator, doing := "checking the model"):
            checks += [self_check(policy) for policy in policies if self.accelerator.is_main_process]
        measured = gather_objects(doing, checks)[0]
        check_options(measured[0], policies[0], self.args)
        self.router_coefficient = policies[0].router_aux_loss_coef
        # The routers' loss counts the tokens of a prompt once for each of its completions, as in TRL.
        may_share = not (self.router_coefficient or self.args.batch_invariant)
        layout = shared_layout(measured, share_prompts=self.args.share_prompts, may_share=may_share)
        return layout, measured[0].is_random

    def _make_teacher(self, teacher_policy: PolicyLoss | None, *, vocab_size: int) -> Teacher:
        lend: Any = self._reference_policy
        weights, args = SELF, self.args
        if teacher_policy is not None:
            weights = same_weights(self.accelerator, "the teacher", teacher_policy.model)
            lend = functools.partial(nullcontext, shard_frozen(self.accelerator, teacher_policy.eval()))
        options = {"coef": args.distillation_coef, "kind": args.distillation_kind, "beta": args.distillation_beta}
        return Teacher(lend=lend, vocab_size=vocab_size, options=options, identity=options | {"model": weights})

    def _beginning(self, optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The groups of the optimizer, with states in the place of their parameters, and the state of the schedule."""
        groups = [{**group, "params": [*map(optimizer.state.get, group["params"])]} for group in optimizer.param_groups]
        return copy.deepcopy((groups, self.scheduler.state_dict()))

    def restart(self) -> None:
        """Begin again with the weights as they are now: step, optimizer and schedule are those of a new run."""
        groups, schedule = copy.deepcopy(self.beginning)
        self.step, self.entropy = 0, EntropyController(self.args)
        self.nonfinite.load_state({"in_a_row": 0, "total": 0})
        self.optimizer.optimizer.state.clear()
        for group, first in zip(self.optimizer.param_groups, groups, strict=True):
            states = zip(group["params"], first.pop("params"), strict=True)
            self.optimizer.optimizer.state.update((weight, state) for weight, state in states if state)  # as Adagrad's
            group.update(first)
        self.scheduler.load_state_dict(schedule)

    def load_state(
        self, *, step: int, scheduler: dict[str, Any], skipped: dict[str, int], entropy: dict[str, float | None]
    ) -> None:
        """Go on from a checkpoint: its step, and the states of its schedule and counters."""
        self.scheduler.load_state_dict(scheduler)
        self.nonfinite.load_state(skipped)
        if self.args.use_adaptive_entropy:
            self.entropy.load_state(entropy)
        self.step = step

    @contextmanager
    def run_modes(self) -> Iterator[None]:
        """Around a run: afterwards every layer has the modes with which the model was given.

        In training mode, layers that recompute their activations read no cache: `generate` would give another text.
        InputError where the weights are not those that the optimizer was made for.
        """
        self._check_weights()
        set_modes(self._run_modes)
        try:
            yield
        finally:
            set_modes(self._given_modes)

    def _check_weights(self) -> None:
        """What is trained has been so since the trainer was made, whose optimizer has nothing else; some of it is."""
        if is_adapted(self._unwrapped.model):
            check_adapter(self._unwrapped.model)
        parameters = dict(self._unwrapped.named_parameters())
        optimized = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        # FSDP2 puts other objects into the place of its shards.
        changed = parameters.keys() ^ self._made.keys()
        self._checked, groups = self._forms(), len(self.optimizer.param_groups)
        for name in parameters.keys() & self._made.keys():
            made, one = self._made[name], parameters[name]
            is_same = one is made.weight or self.accelerator.is_fsdp2
            # PEFT's DoRA makes a new object around the codes of 4 bits, in each pass on a CPU.
            is_same = is_same or (not one.requires_grad and one.data_ptr() == made.weight.data_ptr())
            is_new = one.requires_grad and not made.is_trained and id(one) not in optimized
            if not is_same or is_new or made.form != (one.dtype, one.shape):
                changed.add(name)
        if changed or groups != len(self.beginning[0]) or not any(one.requires_grad for one in parameters.values()):
            got = f"{groups} groups of the optimizer" if groups != len(self.beginning[0]) else "weights, none trained,"
            got = f"{len(changed)} weights, such as {min(changed)}," if changed else got
            raise InputError(
                f"got {got} that are not as they were when the trainer was made (another tensor, shape or dtype, or "
                "trained since), want what its optimizer was made for; fix: change the model before GRPOTrainer(...)"
            )

    def check_unchanged(self) -> None:
        """As `run_modes`, before a step: a callback may have changed weights, or of an adapter what none shows."""
        if not self.accelerator.is_fsdp2 and (self._unwrapped.is_adapted or self._forms() != self._checked):
            self._check_weights()

    def _forms(self) -> Set[Any]:
        weights = {(id(one), one.dtype, one.shape, one.requires_grad) for one in self._unwrapped.parameters()}
        return weights | {len(self.optimizer.param_groups)}

    def learn(
        self, batch: list[Sample], *, check: Check | None = None, event: Event = lambda name: None, again: bool = True
    ) -> tuple[list[Sample], dict[str, float]]:
        """One update. Returns the batch, and the metrics of all ranks.

        The batch that comes `again` has its old log-probs then, and its reference's.
        `check` is called with the metrics and `rounding` before the optimizer moves; it raises where it must not.
        `event` is called with the names of the events of callbacks inside a step.

        NonFiniteError where the loss or the gradient norm is not finite, after `max_skipped_steps` such steps in a row;
        nothing has been updated.
        """
        batch, packed, options, uncertain_entropy = self._prepared(batch)
        self.policy.zero_grad()  # of gradients that a reward or a callback has left
        try:
            outputs: list[GRPOLossOutput] = []
            for part in packed:
                if outputs:
                    event("on_substep_end")
                outputs.append(self._backward(part, options, last=part is packed[-1]))
            for _ in range(len(packed), self.args.gradient_accumulation_steps):  # what is skipped fills fewer
                event("on_substep_end")
            if self._reduced:
                check_reduced(self._reduced)
            # Those of all ranks, so that either every rank goes on from here or none does.
            metrics = step_metrics(batch, packed, outputs, self.loss_config)
            norm: Any = self.accelerator.clip_grad_norm_(self.policy.parameters(), self.args.max_grad_norm or math.inf)
            metrics["grad_norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            may_update = self.nonfinite.may_update(metrics, self.step + 1, lambda: evidence(batch, packed, outputs))
            if check is not None and may_update:
                check(metrics, functools.partial(self.rounding, packed))
            metrics["learning_rate"] = float(self.scheduler.get_last_lr()[0])
            if may_update:
                event("on_pre_optimizer_step")
                self.optimizer.step()
                event("on_optimizer_step")
        finally:
            self.policy.zero_grad()  # those that the optimizer leaves alone have gradients, too
        if may_update:
            self.scheduler.step()
        self.step += 1
        if self.accelerator.num_processes > 1 and not self.accelerator.is_fsdp2 and not self.step & (self.step - 1):
            warn_of_other_replicas(self.accelerator, self._unwrapped, self.step)  # after steps 1, 2, 4, 8, ...
        if self.args.torch_empty_cache_steps and self.step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()
        metrics |= {"skipped_steps": float(self.nonfinite.total)} if self.nonfinite.limit else {}
        # The mean entropy of the tokens that the bonus is about.
        entropy = metrics.get("entropy", 0.0) if uncertain_entropy is None else uncertain_entropy
        router_term = self.router_coefficient * metrics.get("aux_loss", 0.0)
        metrics["loss_without_bonus"] = metrics["loss"] + options["config"].entropy_coef * entropy - router_term
        if self.args.use_adaptive_entropy:
            metrics |= self.entropy.update(entropy if metrics["loss_tokens"] and may_update else None)
        elif self.args.entropy_coef:
            metrics["entropy_coef"] = self.args.entropy_coef
        if self.args.sync_ref_model and self.step % self.args.ref_model_sync_steps == 0:
            self._follow_with_reference()
        if again and any(sample.old_logprobs is None for sample in batch):
            old = per_sequence(packed, [output.logprobs for output in outputs], len(batch))
            batch = with_fields(batch, {"old_logprobs": old})
        return batch, metrics

    def evaluate(self, batch: list[Sample]) -> float:
        """The loss of a step with this batch, without gradients and without dropout. A collective."""
        batch, packed, options, _ = self._prepared(batch)
        # Completions of an evaluation come without the log-probs that it needs.
        options["config"] = dataclasses.replace(options["config"], score_centering="off")
        outputs = self._measured(self._unwrapped, "loss", packed, **options)
        return step_metrics(batch, packed, outputs, self.loss_config)["loss"]

    def _prepared(self, batch: list[Sample]) -> tuple[list[Sample], list[MicroBatch], dict[str, Any], float | None]:
        """The batch with its reference, its micro-batches, the loss's arguments, the mean of `_entropy_threshold`."""
        if self.args.beta > 0:
            batch = self._with_reference(batch)
        packed = self._pack(batch)
        if self.args.beta > 0 and not batch:  # of a rank without samples the loss wants a tensor, too
            packed = [dataclasses.replace(part, ref_logprobs=part.advantages.new_zeros(0)) for part in packed]
        options, uncertain_entropy = dict[str, Any](config=self.loss_config), None
        if self.args.use_adaptive_entropy:
            options["config"] = dataclasses.replace(self.loss_config, entropy_coef=self.entropy.applied)
        if self.loss_config.top_entropy_quantile < 1.0:
            threshold_options, uncertain_entropy = self._entropy_threshold(packed)
            options |= threshold_options
        if self.loss_config.selects_by_covariance:
            measured = self._measured(self._unwrapped, "logprobs", packed)
            packed = with_covariance_selection(packed, measured, self.loss_config, self.accelerator)
        return batch, packed, options | self._counts(packed, batch) | {"teacher": self.teacher}, uncertain_entropy

    def score_norms(self, batch: list[Sample]) -> list[Tensor]:
        """For each sample the squared norms of the sampling correction's weight times d log p / d logits, on the CPU.

        [n] of its own tokens; [0] of one that does not go through the model.
        """
        packed, norms = self._pack(batch), list[Tensor]()
        for part, (logprobs, own) in zip(packed, self._measured(self._unwrapped, "scores", packed), strict=True):
            norms.append(own * correction_weights(logprobs, part, self.loss_config).square())
        return per_sequence(packed, norms, len(batch))

    def with_old_logprobs(self, batch: list[Sample]) -> list[Sample]:
        """The batch with the log-probs of the current policy, for a step that is made after the policy has moved.

        As in TRL, a reference that moves too is the one of now for all that was generated now.
        """
        if self.args.sync_ref_model:
            batch = self._with_reference(batch)
        return with_fields(batch, {"old_logprobs": self._logprobs(batch, self._unwrapped)})

    def _with_reference(self, batch: list[Sample]) -> list[Sample]:
        """The batch with the reference's log-probs, where they have not been computed yet: there is a KL term."""
        is_missing = any(sample.ref_logprobs is None for sample in batch)
        # A rank may have no samples: all ranks compute them, or none does.
        if not any_rank(self.accelerator, is_missing, "looking for the reference"):
            return batch
        own_experts = with_fields(batch, {"routed_experts": [None] * len(batch)})
        with self._reference_policy() as reference:
            return with_fields(batch, {"ref_logprobs": self._logprobs(own_experts, reference)})

    def _logprobs(self, batch: list[Sample], policy: PolicyLoss) -> list[Tensor]:
        """Those of a policy for each sample. The reference packs without virtual tokens."""
        packed = self._pack(batch)
        return per_sequence(packed, self._measured(policy, "logprobs", packed), len(batch))

    def weights(self) -> dict[str, Tensor]:
        """What is saved: the causal LM's full state dict, or the adapter's part of it. A collective.

        The main process alone needs it. A tied weight has its first name alone: gathered, its names are two tensors.
        """
        model = self._unwrapped.model
        gather_objects("gathering the weights", None)  # a shard is no other rank's answer
        if is_adapted(model):
            state = trained_state(model)
            trained = {name.removeprefix("model.") for name, made in self._made.items() if made.is_trained}
            if lost := trained - state.keys():
                raise InputError(
                    f"got an active adapter without {len(lost)} of the {len(trained)} trained weights, such as "
                    f"{min(lost)}, want all in its file; fix: set_adapter(<its name>) or enable_adapter_layers(); "
                    "save before merge_and_unload() or unload()"
                )
            return state
        state = self.accelerator.get_state_dict(self.policy)
        tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
        named = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in named.items() if name not in tied}

    def served_weights(self, engine: Any = None) -> WeightStream:
        """The weights for an engine, in its dtype: full tensors under the names of a checkpoint, adapters merged.

        The adapter alone, under the names of PEFT's file, for an engine that takes that.
        """
        make = adapter_stream if getattr(engine, "takes_adapter", False) else checkpoint_weights
        return make(self._unwrapped.model, getattr(engine, "weight_dtype", None))

    @contextmanager
    def _reference_policy(self) -> Iterator[PolicyLoss]:
        """The frozen copy; where only an adapter is trained, the policy without its adapter."""
        with nullcontext() if self.reference is not None else as_reference(self._unwrapped.model):
            yield self.reference or self._unwrapped

    def _pack(self, batch: list[Sample]) -> list[MicroBatch]:
        if self._unwrapped.is_adapted:
            prompts = with_virtual_places([sample.prompt_ids for sample in batch], self._unwrapped.model)
            batch = with_fields(batch, {"prompt_ids": prompts})

        def largest(number: int) -> int:
            return max(gather_objects("cutting micro-batches", number))

        agree = largest if self.accelerator.num_processes > 1 else int
        return micro_batches(batch, self.packing, device=self.accelerator.device, agree=agree)

    def rounding(self, packed: Sequence[MicroBatch], dtype: torch.dtype) -> float:
        """How far a 16-bit `dtype` moves the policy's log-probs: mean over all ranks' tokens, nats. A collective."""
        contexts = (torch.autocast(self.accelerator.device.type, dtype, enabled=rounds) for rounds in (False, True))
        measured = (self._measured(self._unwrapped, "logprobs", packed, within=context) for context in contexts)
        exact, rounded = (torch.cat(logprobs).double() for logprobs in measured)
        total = torch.stack([(rounded - exact).abs().sum(), rounded.new_tensor(float(len(rounded)))])
        distance, tokens = self.accelerator.reduce(total, reduction="sum").tolist()
        return float(distance / max(tokens, 1.0))

    def _measured(
        self, policy: PolicyLoss, output: Output, packed: Sequence[MicroBatch], *, within: Context = None, **step: Any
    ) -> list[Any]:
        """`policy.measure` of each micro-batch, without dropout, and with the run's precision or `within` another."""
        # FSDP2 has a mixed precision of its own.
        precision = within or (nullcontext() if self.accelerator.is_fsdp2 else self.accelerator.autocast())
        with evaluating(policy), precision:
            return [policy.measure(part, output, **step) for part in packed]

    def _counts(self, packed: Sequence[MicroBatch], batch: list[Sample]) -> dict[str, Any]:
        """The normalisers of the whole step, over all ranks: of all micro-batches, and of what is in none of them."""
        filled = sum(len(part.sequence_index) > 0 for part in packed)
        tokens = sum(len(part.targets) for part in packed) + sum(sample.num_own for sample in batch if sample.skipped)
        ranks = torch.tensor(gather_objects("counting tokens", [tokens, len(batch), filled]), dtype=torch.float64)
        # A step may have no token in its loss: every completion truncated and masked.
        counts = ranks.sum(0).clamp_min(1.0).to(self.accelerator.device).unbind()
        return dict(zip(("num_tokens", "num_sequences", "num_micro_batches"), counts, strict=True))

    def _entropy_threshold(self, packed: Sequence[MicroBatch]) -> tuple[dict[str, Any], float]:
        """The loss's arguments for `top_entropy_quantile`: its threshold; and the mean entropy above that.

        It takes a forward pass of its own, because the threshold depends on all tokens of the step.
        """
        own_entropies = torch.cat(self._measured(self._unwrapped, "entropies", packed)).cpu()
        entropies = torch.cat(gather_objects("joining entropies", own_entropies))
        threshold = threshold_of_uncertain(entropies, self.loss_config.top_entropy_quantile)
        uncertain = entropies[entropies >= threshold]
        options: dict[str, Any] = {"entropy_threshold": threshold.to(self.accelerator.device)}
        options["num_entropy_tokens"] = max(1.0, float(len(uncertain)))
        return options, uncertain.mean().item() if len(uncertain) else 0.0

    def _backward(self, part: MicroBatch, options: dict[str, Any], *, last: bool) -> GRPOLossOutput:
        self.policy.train()  # who samples, or evaluates behind the last part, has it without dropout
        # DDP and FSDP average over ranks what has to be a sum. DDP needs to reduce only once; FSDP would have to keep
        # full gradients until then, which costs the memory that it is used to save; a static graph may not change.
        always = last or self.accelerator.is_fsdp2 or self.args.ddp_static_graph
        reduced = nullcontext() if always else self.accelerator.no_sync(self.policy)
        with reduced, nullcontext() if self.routing is None else self.routing:
            output: GRPOLossOutput = self.policy(part, **options, squares=self.args.variance_report)
            self.accelerator.backward(output.loss * self.accelerator.num_processes)
        return output

    def _follow_with_reference(self) -> None:
        """Move the reference towards the policy (TR-DPO)."""
        assert self.reference is not None  # there is a KL term, and no adapter
        share, policy = self.args.ref_model_mixup_alpha, self._unwrapped
        with torch.no_grad():
            # A tied tensor once; where parameters are sharded, each rank updates its shard.
            for frozen, trained in zip(self.reference.parameters(), policy.parameters(), strict=True):
                frozen.lerp_(trained.to(frozen), share)
