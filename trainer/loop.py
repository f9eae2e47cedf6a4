"""The GRPO loop: sync, generate, score, learn, log. One step, with P prompts, G completions each, B = P * G sequences:

    engine.load_weights(policy)                          # only where the engine serves older ones
    rollouts = engine.generate(prompts, n=G)             # once per effective batch: B completions, their log-probs
    rewards = reward_funcs(completions)                  # [B]
    advantages = normalised within groups                # [B]
    batches = balanced across ranks, one for each optimizer step, old log-probs for all but the first
    for micro_batch in packed(batch):                    # [R, L] token ids, N completion tokens
        hidden = backbone(micro_batch)                   # [N, D], no logits
        loss = fused_linear_grpo_loss(hidden, lm_head)   # 0-d, normalised by the whole step's tokens
        loss.backward()
    clip, check against the engine's log-probs, optimizer.step()
    log, evaluate, save                                  # when callbacks say so: transformers' own, and yours

docs/trainer.md goes through a step. A checkpoint holds all that the next one depends on, unfinished rollouts included.

It is not a subclass of transformers.Trainer; what else a script expects of one is in `transformers_face.py`. Devices,
DDP, FSDP2, mixed precision, schedulers, trackers, callbacks and files of weights are Accelerate's and transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fused_grpo.errors import causes_shown
from fused_grpo.trainer.batching.micro_batch_metrics import MISMATCH
from fused_grpo.trainer.batching.rollout_buffer import RolloutBuffer
from fused_grpo.trainer.checkpoint.checkpoint import STATE_FILE, refuse_unusable
from fused_grpo.trainer.checkpoint.output_dir import RunLock, prepare_output_dir
from fused_grpo.trainer.checkpoint.resume import agreed_checkpoint, load_model_of, restore, training_state
from fused_grpo.trainer.checkpoint.training_state import TrainingFiles
from fused_grpo.trainer.collect.best_metric import check_best_metric
from fused_grpo.trainer.collect.collector import Collector
from fused_grpo.trainer.collect.plan import Plan
from fused_grpo.trainer.collect.rank_checks import check_ranks
from fused_grpo.trainer.collect.scoring import LOSS_METRICS, Scored
from fused_grpo.trainer.collect.start_checks import Start, check_given, check_given_sets, make_learner
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.trl_fields import refusing_others
from fused_grpo.trainer.config.trl_names import NO_ARGUMENTS, check_not_given, check_replaced, made_from, replaces
from fused_grpo.trainer.data.datasets import chosen_eval_sets
from fused_grpo.trainer.distributed.failures import (
    StopOnSignal,
    agree,
    all_ranks_succeed,
    any_rank,
    barrier,
    compare_ranks,
    report_failure,
    reported,
)
from fused_grpo.trainer.distributed.sharding import before_ranks_connect, make_accelerator
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.checked_engine import WeightCheck, checked_load_weights
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.episodes.environments import with_prompts
from fused_grpo.trainer.learner import Optimizers
from fused_grpo.trainer.logging.console import Phases, progress
from fused_grpo.trainer.logging.run_log import rewind_logs
from fused_grpo.trainer.logging.run_output import Results, RunOutput, TrainResult
from fused_grpo.trainer.models.loading import uncompiled
from fused_grpo.trainer.transformers_face import TransformersFace

# Attributes that a run goes on from, or that a script may set at any time.
_MOVES: dict[str, Any] = {
    **{"buffer": RolloutBuffer | None, "scored": Scored | None, "results": Results, "output": RunOutput},
    **{"engine": object, "engine_is_open": bool, "eval_dataset": object, "hub_model_id": str | None},
    **{"_is_stale": bool, "_in_epoch": bool, "_beginning": dict | None, "_made": dict},
}


@refusing_others(NO_ARGUMENTS, "help(GRPOTrainer)")
class GRPOTrainer(TransformersFace):
    """Trains a causal language model with GRPO. TRL's constructor, argument by argument.

    Args:
        model: a path or hub id, a causal LM of transformers, or a PeftModel around one (trained in place).
        reward_funcs: a function or several, each `f(prompts, completions, completion_ids, **columns) ->
            list[float | None]`; names of functions; reward models, or their paths or hub ids (docs/rewards.md).
        args: the options of the run. None: `GRPOConfig()`.
        train_dataset: a `datasets.Dataset`, an `IterableDataset` or a list of dicts, with a "prompt" column of strings
            or of conversations.
        eval_dataset: the same, or several by name (a dict, `DatasetDict` or `IterableDatasetDict`), for the evaluation
            before, during and after training. Streams are read to their end each time.
        processing_class: the tokenizer. None: the one that lies beside `model`.
        reward_processing_classes: tokenizers of reward models. None: those beside them.
        callbacks: classes or instances of `transformers.TrainerCallback`. Every rank calls them; what one of them
            decides on any rank (to stop, log, evaluate or save) holds on all ranks.
        optimizers: an optimizer over the model's parameters, and a schedule of it; None for what `args` asks for.
        rollout_func: `f(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", ...}` in place of an engine.
        rollout_engine: anything that satisfies `RolloutEngine`, in place of the one that `args` asks for.
        teacher_model: a path, a hub id, a causal LM, or "self" for the reference model, with `args.distillation_coef`:
            on-policy distillation. `reward_funcs` may be left out then (docs/divergence.md).
        peft_config: a `peft.LoraConfig` or `PromptTuningConfig`: train that, and nothing else (docs/lora.md).
        tools: functions that the model may call (docs/agents.md).
        environment_factory: makes objects with tools, or several by name. One with `get_reward` needs no
            `reward_funcs`; a single one and `max_steps` need no `train_dataset`.
        quantization_config: for `from_pretrained` of a model given by path or hub id, with LoRA (docs/lora.md).
            All but `rollout_engine` and `teacher_model` are in TRL's order, and may be passed by position.

    Raises:
        InputError: options that do not go together.
        UnsupportedError: a model, adapter or engine that cannot do what the options ask for.
        DataError: a dataset that cannot be used.
        CheckpointError: `args.output_dir` holds a run that is alive, or no checkpoint to resume from.
        UnavailableError: an engine that is not installed.
    """

    @causes_shown()
    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        rollout_engine: RolloutEngine | None = None,
        teacher_model: str | Path | PreTrainedModel | None = None,
    ) -> None:
        args = GRPOConfig() if args is None else args
        with before_ranks_connect(args):
            start = Start(
                args=args,
                model=uncompiled(model),
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                reward_funcs=reward_funcs,
                reward_processing_classes=reward_processing_classes,
                processing_class=processing_class,
                quantization_config=quantization_config,
                peft_config=peft_config,
                callbacks=callbacks or (),
                rollout_engine=rollout_engine,
                rollout_func=rollout_func,
                teacher_model=teacher_model,
                tools=tools,
                environment_factory=environment_factory,
            )
        # Everything is checked before anything is loaded, started or written.
        check_replaced(self, {}, {})
        self._made = dict(vars(self))
        start.adds_metrics = replaces(self, "evaluate", "log")
        start.accelerator = accelerator = make_accelerator(start.args)
        with report_failure(accelerator):  # checks, models and engines may fail on one rank alone
            with all_ranks_succeed(accelerator, "checking the arguments"):
                check_given(start)
            self._train_dataset, self.eval_dataset = start.train_dataset, start.eval_dataset
            check_ranks(start, optimizers)
            self.facts = Plan(start).print()
            # As in TRL, a `rollout_func` is taken for vLLM's with `use_vllm` alone.
            own_weights = rollout_engine is not None or start.engine_name != "transformers"
            policy, learner = make_learner(start, optimizers, corrected=own_weights)
            super().__init__(start, policy, learner)
            self.max_steps, self.epochs = start.max_steps, start.epochs
            self.collector = Collector(start, self.sampler, learner, self.events)
            is_mixture, device = learner.routers is not None, accelerator.device
            self.weight_check = WeightCheck(self.args, policy, device, own_weights=own_weights, is_mixture=is_mixture)
            self.buffer: RolloutBuffer | None = None
            self.stop, self.lock, self._undo = StopOnSignal(answers=accelerator.is_main_process), RunLock(), ExitStack()
            self._versions = [one._version for one in policy.parameters()]  # which count changes in place
            self._in_epoch = self._is_stale = False  # stale: the engine has other weights of its step
            self._beginning: dict[str, Any] | None = None  # where the first `train` began in the data
            # Last: no rank is in `train` before all have an engine.
            with all_ranks_succeed(accelerator, "starting the engine"):
                self.engine, self.engine_is_open = self._make_engine(), True
            with ExitStack() as stack:
                stack.callback(self.engine.close)  # a script that has no trainer cannot close its engine
                self.events("on_init_end")
                self._made = made_from(self._made, vars(self))
                stack.pop_all()

    @reported
    def train(
        self,
        resume_from_checkpoint: bool | str | Path | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainResult:
        """Run all steps. Metrics, rollouts, the report and a checkpoint are in `args.output_dir` afterwards.

        Args:
            resume_from_checkpoint: replaces the option of that name, which None leaves. False: another run there is
                moved aside, that of an earlier `train` too, and this one begins with step 1 and the present weights.
            trial: as in transformers, None: there is no search of hyperparameters.
            ignore_keys_for_eval: as `ignore_keys` of `evaluate`.

        Raises:
            RewardError: a reward function raised, or returned something unusable.
            WeightSyncError: the engine does not serve the trainer's weights.
            NonFiniteError: the loss or a gradient is not finite.
            PeerError: another rank failed; the message has its reason.
                In all four cases the step that failed has updated nothing.
            CheckpointError: the checkpoint to resume from is damaged or of another run, or a run is alive there.
            SystemExit: with status 143, after SIGTERM, SIGHUP or SIGUSR1: the step was finished and a checkpoint saved.
        """
        check_not_given("train", {"trial": trial}, want="trial=None: there is no search of hyperparameters")
        self.stop.refuse_inner(self.output_dir)
        with ExitStack() as ending:  # one after the other, whatever one of them raises
            for close in (self.lock.release, self._undo.close, lambda: self.output.close(), self._close_engine):
                ending.callback(close)
            ending.enter_context(self.stop)
            ending.enter_context(self.learner.run_modes())
            self._start(self.start.resume if resume_from_checkpoint is None else resume_from_checkpoint)
            while not self._is_over():
                phases = Phases(first=not self.events.steps.steps)
                if not self._in_epoch:
                    self._in_epoch = True
                    self.events("on_epoch_begin")
                self.events("on_step_begin")
                if self._spelled(vars(self.args)) != self._options_text:
                    self.start.check_unchanged()
                self.learner.check_unchanged()
                if self.buffer is None or self.buffer.is_exhausted:
                    self.buffer = self._collect(phases)
                with phases("train"):
                    metrics = self._learn(self.buffer)
                must_stop = any_rank(self.accelerator, self.stop.requested, "ending a step")
                self._record(metrics, phases)
                self.events("on_step_end")
                if must_stop:
                    self._stop()
                self._log_evaluate_save()
                self._end_epoch()
            return self._finish()

    @reported
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Complete and score an eval set, or each of several; logged as `eval/...`, with names as `eval/<set>_...`.

        Args:
            eval_dataset: an eval set, several by name, or the name of one of the trainer's. None: the trainer's.
            ignore_keys: as in transformers; there are no model outputs to ignore.
            metric_key_prefix: of the result's keys.

        Returns:
            `<prefix>_reward`, `<prefix>_rewards/<function>/mean`, `<prefix>_completions/mean_length`, ..., as TRL names
            them; after the prefix `<set>_` where sets have names. `<prefix>_loss` says little (collect/scoring.py).

        DataError for no eval set, or one that cannot be used.
        """
        results, means = dict[str, float](), dict[str, float]()
        with all_ranks_succeed(self.accelerator, "checking the eval sets"):
            sets = chosen_eval_sets(with_prompts(eval_dataset, self.environment_factories), self.eval_dataset)
            if eval_dataset is not None:
                check_given_sets(self.start, sets)
        compare_ranks("comparing the eval sets", {"metric_key_prefix": metric_key_prefix, "eval sets": ", ".join(sets)})
        for name, dataset in sets.items():
            self._open_engine()
            self.collector.queue.wait()
            self._sync_engine()
            result = self.collector.evaluate(self.engine, dataset)
            with all_ranks_succeed(self.accelerator, "putting the engine to sleep"):
                self.engine.sleep()
            result.metrics["loss"] = self.learner.evaluate(result.batch)
            entry = result.named(f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
            rewards = result.rewards(self.rewards.names, set_name=name)
            with all_ranks_succeed(self.accelerator, "logging the evaluation"):
                self.output.evaluation(self.step, entry, rewards, result.num_prompts, prefix=metric_key_prefix)
            self.events.evaluated(entry, result.num_prompts * (self.args.num_generations_eval or 1))
            results, means = results | entry, means | rewards
        if eval_dataset is None and metric_key_prefix == "eval":
            self.results.eval_after = means
        return results

    def _evaluate(self) -> dict[str, float] | None:
        if self.eval_dataset is None:
            return None
        with progress("evaluating"):
            check_best_metric(self.args.metric_for_best_model, metrics := self.evaluate())
        return metrics

    def _is_unevaluated(self) -> bool:
        return bool(self.args.eval_at_ends and self.eval_dataset is not None and self.results.eval_after is None)

    def _start(self, resume: bool | str | Path | None) -> None:
        """Make the output directory and the log; evaluate the model, or restore a checkpoint."""
        self.start.check_again(self.model, self.eval_dataset)
        check_replaced(self, self._made, _MOVES)
        is_main, start, overwrite = self.accelerator.is_main_process, self.start, self.args.overwrite_output_dir
        with all_ranks_succeed(self.accelerator, "locking the output directory"):
            if is_main:  # keeps other runs out, before anything there is cut, moved or removed
                self.lock.acquire(self.output_dir)
        checkpoint = agreed_checkpoint(self.accelerator, self.output_dir, resume) if resume else None
        self.learner.policy.zero_grad()  # of gradients that a model brings along torch makes a state of the optimizer
        self._begin_again()
        with all_ranks_succeed(self.accelerator, "making the output directory"):
            if is_main:
                undo = prepare_output_dir(
                    self.output_dir, resume=checkpoint, overwrite=overwrite, keep=start.models, is_saved=start.is_saved
                )
                self._undo.callback(undo)  # where a run fails early
        self.events.begin(None, self.epochs.total)
        if checkpoint is not None:
            self._restore(checkpoint)
        facts = self.facts | {"engine": self.engine.name}
        with all_ranks_succeed(self.accelerator, "beginning the log"):
            options: Any = {"accelerator": self.accelerator, "output_dir": self.output_dir, "resumed_from": checkpoint}
            self._undo.callback(setattr, self, "output", self.output)  # for `evaluate` behind it: the log is not there
            self.output = RunOutput(self.args, self.max_steps, is_main=is_main, facts=facts, **options)
        self.events("on_train_begin")
        wanted = self.args.eval_on_start or (checkpoint is None and self.args.eval_at_ends)
        if wanted and self._evaluate() and checkpoint is None:
            self.results.eval_before = self.results.eval_after

    def _begin_again(self) -> None:
        """In a further `train`: a new run from the weights as they are now, as in TRL."""
        position, self._beginning = self._beginning, self._beginning or self.sampler.position()
        if position is None:
            return
        self.output.close()  # what a script has logged since may have begun trackers again
        self.learner.restart()
        self.collector.load_state({"sampler": self.sampler.state_dict(position), "generate_calls": 0, "num_tokens": 0})
        self.epochs.resume(0, 0.0, of=self.max_steps)
        self.buffer, self._in_epoch, self._is_stale, self.results = None, False, True, Results()

    def _restore(self, checkpoint: Path) -> None:
        self.buffer, evaluations, windows, state = restore(checkpoint, self.learner, self.collector)
        with refuse_unusable(checkpoint, STATE_FILE):
            self.epochs.resume(self.step, state.epoch, of=state.max_steps)
            self.events.begin(state, self.epochs.total, windows)
        self.results, self._is_stale = Results(**evaluations), True  # engines have others, maybe
        self.events.steps.generation = {} if self.buffer is None else self.buffer.metrics
        repeats = self._is_over() and self._is_unevaluated()
        with all_ranks_succeed(self.accelerator, "cutting back the logs"):
            if self.accelerator.is_main_process:
                rewind_logs(self.output_dir, self.step, evaluation=not repeats)

    def _training_state(self) -> TrainingFiles:
        # A run that has to stop does not wait for its engine.
        wait = not any_rank(self.accelerator, self.stop.requested, "saving the state")
        ends, windows = self.results.evaluations, self.events.steps.windows
        return training_state(self.learner, self.collector, self.buffer, evaluations=ends, windows=windows, wait=wait)

    def _is_over(self) -> bool:
        """Whether all steps are made, or a callback has ended the run, which has a step at least."""
        agree(self.accelerator, self.control)
        # All epochs may end before `max_steps`, where a callback has left out the rest of one.
        is_last = self.step >= self.max_steps or self.epochs.at(self.step) >= self.epochs.total
        return is_last or (self.step > 0 and self.control.should_training_stop)  # as in transformers

    def _collect(self, phases: Phases) -> RolloutBuffer:
        """The next generated batch, scored: one `generate` call, and more where `dynamic_sampling` replaces groups."""
        can_sleep = getattr(self.engine, "can_sleep", True)
        if can_sleep or not self.engine_is_open:
            self._open_engine()
        scored = self.scored = self.collector.collect(self.engine, phases, sync=partial(self._sync_engine, phases))
        with all_ranks_succeed(self.accelerator, "writing the rollouts"):
            if can_sleep and not self.collector.queue:
                self.engine.sleep()
            self._undo.pop_all()  # the run has made something
            self.output.rollouts(self.step + 1, scored.records)
        return self.collector.buffer(scored, phases)

    def _learn(self, buffer: RolloutBuffer) -> dict[str, Any]:
        is_plain = self.weight_check.is_plain_within_support if buffer.has_support else self.weight_check.is_plain
        # Dropout moves log-probs more than stale weights do.
        is_comparable = is_plain and buffer.weight_version == self.step and not self.learner.is_random
        check = partial(self.weight_check.check_step, engine=self.engine) if is_comparable else None
        again = self.args.num_iterations > 1
        batch, metrics = self.learner.learn(buffer.current, check=check, event=self.events, again=again)
        reports = {"weight_version": buffer.weight_version, "off_policy_steps": self.step - 1 - buffer.weight_version}
        buffer.advance(batch)
        if buffer.is_exhausted and self.args.generate_ahead:
            self.collector.pace.learned_from(reports["off_policy_steps"], metrics.get(MISMATCH))
        named = {LOSS_METRICS.get(name, name): value for name, value in metrics.items()}
        return {"step": self.step, **{name: named[name] for name in named if name}, **buffer.metrics, **reports}

    def _record(self, metrics: dict[str, Any], phases: Phases) -> None:
        metrics |= {
            "epoch": float(self.epochs.at(self.step)),
            "generate_calls": self.collector.generate_calls,
            "rollout_engine": self.engine.name,
            "step_time": phases.so_far(),
            **{f"time/{name}": seconds for name, seconds in phases.seconds.items()},
        }
        self.state.global_step, self.state.epoch = self.step, metrics["epoch"]
        self.state.num_input_tokens_seen = self.collector.num_tokens
        self.results.metrics, self.results.eval_after = metrics, None
        self.events.steps.add(metrics, {} if self.buffer is None else self.buffer.metrics)
        with all_ranks_succeed(self.accelerator, "writing the metrics"):
            self.output.step(metrics, self.events.steps)

    def _log_evaluate_save(self) -> None:
        """What callbacks have decided after a step or an epoch; transformers' `DefaultFlowCallback` follows `args`."""
        agree(self.accelerator, self.control)
        self.events.log_steps()
        if self.control.should_evaluate and (metrics := self._evaluate()):
            is_best = self.events.is_best(metrics)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        agree(self.accelerator, self.control)
        if self.control.should_save:
            self._leave_epoch()
            self.save_checkpoint()
            self.events("on_save")

    def _leave_epoch(self) -> None:
        """Leave the rest of an epoch out, if a callback has said so: before a checkpoint, which goes on behind it."""
        if self.control.should_epoch_stop:  # until the next epoch begins; a second call changes nothing
            passes = int(self.epochs.skip(self.step))
            self.state.epoch = float(passes)
            self.collector.next_pass(passes)
            self.buffer = None

    def _end_epoch(self) -> None:
        """After the last step of an epoch or of the run, or where a callback leaves the rest of the epoch out."""
        agree(self.accelerator, self.control)
        if self.epochs.ends_with(self.step) or self.control.should_epoch_stop or self.control.should_training_stop:
            self._leave_epoch()
            self._in_epoch = False
            self.events("on_epoch_end")
            self._log_evaluate_save()

    def _stop(self) -> None:
        """Save a resumable checkpoint, even with `save_only_model`, and exit: some rank has received a signal."""
        agree(self.accelerator, self.control)
        self.events.log_steps()
        agree(self.accelerator, self.control)
        self._leave_epoch()
        where = self._save_checkpoint(resumable=True)
        self.events("on_save")
        self.output.console.note(
            f"stopped by {self.stop.reason} after step {self.step}; resume_from_checkpoint=True (--resume) goes on "
            f"from {where}; fused-grpo report {self.args.output_dir} shows what there is so far"
        )
        barrier(self.accelerator, "stopping the run")
        raise SystemExit(self.stop.exit_status)

    def _finish(self) -> TrainResult:
        if self._is_unevaluated():
            self._evaluate()
        closing = self.events.log_closing(self.output)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            load_model_of(Path(self.state.best_model_checkpoint), self.learner)
            self._is_stale = True  # for an evaluation in `on_train_end`
        final = self._save_final(self._card())
        with all_ranks_succeed(self.accelerator, "finishing the run"):
            report = self.output.report(final)
        if self.args.push_to_hub:
            self._upload(final)  # where that fails, the rest is there
        self.events("on_train_end")
        barrier(self.accelerator, "ending the run")
        loss, metrics, ends = closing["train_loss"], self.results.metrics | closing, self.results.evaluations
        return TrainResult(
            steps=self.step, training_loss=loss, metrics=metrics, **ends, checkpoint=final, report=report
        )

    def _make_engine(self) -> RolloutEngine:
        """The user's own; or the one that the options ask for, where there is a `rollout_func` around it."""
        start, args = self.start, copy(self.args)
        if start.rollout_engine is not None:
            return start.rollout_engine
        args.vllm_max_model_length, args.output_dir = start.longest_sequence, str(self.output_dir)
        options: Any = {"rollout_func": start.rollout_func, "trainer": self}
        return choose_engine(start.engine_name, args, self.model, start.tokenizer, **options)

    def _open_engine(self) -> None:
        """Wake the engine; a new one where the last `train` has closed it, which a user's own engine never is."""
        with all_ranks_succeed(self.accelerator, "waking the engine"):
            if not self.engine_is_open:
                self.engine, self.engine_is_open, self._is_stale = self._make_engine(), True, True
            self.engine.wake()

    def _close_engine(self) -> None:
        self.collector.queue.is_closed, self.engine_is_open = bool(self.collector.queue), False  # empty: it goes on
        self.engine.close()

    def _sync_engine(self, phases: Phases | None = None) -> None:
        """Send the current weights to the engines, if any of them serves older ones."""
        with nullcontext() if phases is None else phases("sync"):
            self._is_stale |= self.events.in_step.endswith("optimizer_step")
            self._is_stale |= not self.step and self._versions != [one._version for one in self.model.parameters()]
            # Behind this no rank samples: they may share a server.
            if any_rank(self.accelerator, self._is_stale or self.engine.weight_version != self.step, "syncing"):
                is_sent = getattr(self.engine, "has_own_weights", True)
                weights = self.learner.served_weights(self.engine) if is_sent else ()
                with all_ranks_succeed(self.accelerator, "sending weights to the engine"):
                    checked_load_weights(self.engine, weights, version=self.step, model=self.model)
                self._is_stale = False
