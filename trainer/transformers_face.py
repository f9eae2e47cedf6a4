"""`TransformersFace`: what a script of TRL's or of transformers' expects of a trainer, beside `train` and `evaluate`.

The loop needs none of it but `log`, which a subclass may override. Names, arguments and results are transformers'. The
loop makes the parts and passes them to the constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from copy import deepcopy
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, distributed
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer, TrainerControl, TrainerState, trainer_pt_utils

from fused_grpo.config import has_type
from fused_grpo.errors import DataError, InputError, UnsupportedError, quoted
from fused_grpo.trainer.batching.micro_batch_metrics import quantile
from fused_grpo.trainer.checkpoint.checkpoint import changing, remove_old_checkpoints, save_checkpoint, weights_stay
from fused_grpo.trainer.checkpoint.training_state import TrainingFiles
from fused_grpo.trainer.collect.scoring import Scored
from fused_grpo.trainer.collect.start_checks import Start
from fused_grpo.trainer.common.formatting import whole_repr
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.trl_names import absent, check_not_given
from fused_grpo.trainer.data.datasets import Row, all_rows, chosen_eval_sets, is_stream
from fused_grpo.trainer.data.prompt_sampler import PromptSampler, prompt_sampler
from fused_grpo.trainer.data.prompts import as_completion
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, barrier, report_failure, reported
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.learner import Learner
from fused_grpo.trainer.logging.callbacks import Events
from fused_grpo.trainer.logging.console import without_bars
from fused_grpo.trainer.logging.model_card import CardFacts, push_to_hub, write_model_card
from fused_grpo.trainer.logging.run_output import Results, RunOutput
from fused_grpo.trainer.models.adapters import base_model, is_adapted, saver_of
from fused_grpo.trainer.models.quantized import codes_identity


class _Part(property):
    """An attribute of one of the trainer's parts, or what it was made from, for good."""

    def __init__(self, path: str) -> None:
        super().__init__(attrgetter(path))

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, trainer: Any, value: object) -> None:
        raise InputError(
            f"got another value for {self.name} of a trainer that is made, which not all of it would follow, want the "
            "one that it was made with; fix: a new GRPOTrainer, or another name for what is your own"
        )


_part: Any = _Part  # whose attributes have the types of what is in their place


class TransformersFace:
    """Callbacks, log, saving, data loaders and copied options, under transformers' and TRL's names."""

    eval_dataset: Any  # as the user gave it
    engine: RolloutEngine
    _training_state: Callable[[], TrainingFiles]  # of the loop, as a checkpoint has it
    _written: frozenset[str] = frozenset()  # names of the entry that the run is making

    def __init__(self, start: Start, model: Any, learner: Learner) -> None:
        start.options = start.args.to_dict()
        self._options_text = whole_repr(vars(start.args))  # while it is the same, no option has changed
        self._spelled = repr if repr(vars(start.args)) == self._options_text else whole_repr  # of arrays
        self.start, self.learner, self.accelerator = start, learner, learner.accelerator
        self._model, self.model_path, self.dataset = model, start.model_path, start.train_dataset
        self.rewards, self.sampler = start.rewards, make_sampler(start)
        self.processing_class = start.tokenizer  # is saved beside the model
        self.events = Events(
            self.args,
            self.accelerator,
            start.callbacks,
            max_steps=start.max_steps,
            shown=(model, start.tokenizer, learner.optimizer, learner.scheduler),
            log=self._log,
        )
        self.scored: Scored | None = None  # the newest generated batch
        self.use_vllm, self.aux_loss_enabled = start.engine_name != "transformers", bool(learner.router_coefficient)
        reference = learner.reference  # None, too, where it is the policy without its adapter
        self.ref_model: Any = None if reference is None else self.accelerator.unwrap_model(reference).model
        self.reward_processing_classes = [getattr(function, "tokenizer", None) for function in self.rewards.functions]
        rules, environments = start.rules, getattr(start.rules, "environments", None)
        self.environment_factories = None if environments is None else environments.factories  # a single one by None
        environment_tools = [] if environments is None else environments.tools_of.values()
        self.tools = [] if rules is None else list(dict.fromkeys(chain(rules.tools, *environment_tools)))
        self.output_dir, self.results = start.output_dir, Results()
        self.hub_model_id: str | None = None  # of the last upload
        self.output = RunOutput(self.args, 0, is_main=False, facts={})  # before a run begins nothing is shown

    if not TYPE_CHECKING:  # for which every name would be one
        __getattr__ = absent

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Make an entry of `state.log_history` and show it to the callbacks.

        Trackers and metrics.jsonl get what they do not have yet. They have every step and every evaluation already.

        Args:
            logs: numbers by name; the epoch is added.
            start_time: not used, as in TRL.
        """
        written, self._written = self._written, frozenset()
        if added := {name: value for name, value in logs.items() if name not in written}:
            self.output.write(added | {"step": self.state.global_step})
        self.events.add_entry(logs)

    def _log(self, entry: dict[str, Any], *start: float) -> None:
        """`log` numbers that are in metrics.jsonl already; what a subclass adds to them, or to a copy, is not."""
        self._written = frozenset(entry)
        try:
            self.log(entry, *start)
        finally:
            self._written = frozenset()

    def end(self) -> None:
        """End the trackers, the engine and the process group: the last call of a script. Harmless a second time."""
        with ExitStack() as ending:  # one after the other, whatever one of them raises
            ending.callback(self._leave_process_group)
            ending.callback(self.output.close)
            self.engine.close()

    def _leave_process_group(self) -> None:
        if distributed.is_initialized():  # vLLM in process ends that of one process with its own
            with report_failure(self.accelerator):
                barrier(self.accelerator, "in end()")
            distributed.destroy_process_group()

    # As in transformers' own Trainer.
    metrics_format = staticmethod(trainer_pt_utils.metrics_format)
    add_callback: Any = Trainer.add_callback
    pop_callback: Any = Trainer.pop_callback
    remove_callback: Any = Trainer.remove_callback
    get_num_trainable_parameters: Any = Trainer.get_num_trainable_parameters
    get_decay_parameter_names: Any = Trainer.get_decay_parameter_names
    get_optimizer_group: Any = Trainer.get_optimizer_group
    get_learning_rates, num_examples = Trainer.get_learning_rates, Trainer.num_examples
    is_deepspeed_enabled, deepspeed = False, None

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print them on the first process, as transformers does, and None, the mean of nothing, as a word."""
        shown = {name: value if isinstance(value, int | float | str) else str(value) for name, value in metrics.items()}
        trainer_pt_utils.log_metrics(self, split, shown)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write them to `<split>_results.json`, and with those of other splits to `all_results.json`."""
        trainer_pt_utils.save_metrics(self._in_output_dir(), split, metrics, combined)

    def save_state(self) -> None:
        """Write `state` to `trainer_state.json`."""
        trainer_pt_utils.save_state(self._in_output_dir())

    def _in_output_dir(self) -> Any:
        """What transformers' functions write for: `args.output_dir` is where it was when the trainer was made."""
        is_set = self.args.output_dir != self.start.options["output_dir"]  # by a script, for metrics of its own
        folder = Path(self.args.output_dir) if is_set else self.output_dir
        if self.is_world_process_zero():
            with changing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        args = SimpleNamespace(output_dir=str(folder))
        return SimpleNamespace(args=args, state=self.state, is_world_process_zero=self.is_world_process_zero)

    @reported
    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> Path:
        """Write weights (safetensors) and tokenizer, as transformers and vLLM load them. None: to `args.output_dir`.

        Only the files of the model are written. Nothing is uploaded.
        """
        directory = Path(output_dir or self._in_output_dir().args.output_dir)
        weights, saver = self.learner.weights(), saver_of(self.model)
        with all_ranks_succeed(self.accelerator, "saving the model"), without_bars():
            if self.accelerator.is_main_process:
                with changing(directory):
                    directory.mkdir(parents=True, exist_ok=True)
                    with weights_stay(directory, saver, weights):
                        saver.save_pretrained(str(directory), state_dict=weights)
                        self.processing_class.save_pretrained(str(directory))
        return directory

    @reported
    def save_checkpoint(self) -> Path:
        """Write everything that `resume_from_checkpoint` needs to `<output_dir>/checkpoint-<step>`.

        With `save_only_model`, the model alone. InputError inside of a step, or behind one that has failed: of some of
        its parts.
        """
        if event := self.events.in_step:
            raise InputError(
                f"got save_checkpoint() in step {self.step + 1}, which has begun and not ended ({event}): no run "
                "goes on from there, want whole steps; fix: control.should_save = True, which saves when the step is "
                "made, or save_model() for the weights alone"
            )
        return self._save_checkpoint(resumable=not self.args.save_only_model)

    @reported
    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Upload the model as it is now, with its card, in one commit: `<output_dir>/final`, and nothing beside it.

        Args:
            commit_message, revision: of the commit.
            blocking: wait until it is uploaded.
            token: of the account. None: the one that is logged in.
            private: of a repository that is not there yet. None: `args.hub_private_repo`.
            card: arguments of `create_model_card`.

        Returns:
            What `huggingface_hub.HfApi.upload_folder` returns, on the first process; None on the others.

        UnavailableError for no network, no login, or no right to write there.
        """
        facts = self._card(**card)
        self.events("on_push_begin")
        final = self._save_final(facts)
        options = {"commit_message": commit_message, "revision": revision, "run_as_future": not blocking}
        return self._upload(final, private=private, token=token, **options)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
        **others: Any,
    ) -> None:
        """Write README.md into `args.output_dir`. `others` of transformers' arguments are refused, unless None."""
        card = self._card(model_name, dataset_name, tags, **others)
        if self.is_world_process_zero():
            with changing(self.output_dir):
                self.output_dir.mkdir(parents=True, exist_ok=True)
                write_model_card(self.output_dir, card, self.args)

    def _save(self, directory: Path, write_more: Callable[[Path], object] | None = None) -> Path:
        """A directory of the run: with a manifest, and replaced as a whole. `write_more` adds to its files."""
        weights = self.learner.weights()
        with all_ranks_succeed(self.accelerator, f"saving {directory.name}"), without_bars():
            if self.accelerator.is_main_process:
                save_checkpoint(
                    directory,
                    model=saver_of(self.model),
                    tokenizer=self.processing_class,
                    trainer_state=self.events.saved_state(),
                    state_dict=weights,
                    write_more=write_more,
                )
        return directory

    def _save_checkpoint(self, *, resumable: bool) -> Path:
        """The checkpoint of this step; one that is not `resumable` has the model alone."""
        step, state = self.step, self.events.state
        directory = self.output_dir / f"checkpoint-{step}"
        # Of an evaluation behind the save of its step it is an older one.
        best = self.output_dir / f"checkpoint-{state.best_global_step}"
        if best == directory or best.is_dir():
            state.best_model_checkpoint = str(best)
        self._save(directory, self._training_state() if resumable else None)
        with all_ranks_succeed(self.accelerator, "removing old checkpoints"):
            if self.accelerator.is_main_process:
                keep, named = self.args.save_total_limit, state.best_model_checkpoint
                remove_old_checkpoints(self.output_dir, keep, step=step, best=named)
        return directory

    def _save_final(self, card: CardFacts) -> Path:
        """The model as it is now, with its card."""
        return self._save(self.output_dir / "final", lambda folder: write_model_card(folder, card, self.args))

    def _upload(self, directory: Path, *, private: bool | None = None, **options: Any) -> Any:
        """Upload a directory in one commit. Returns the commit, on the main process."""
        commit = None
        with all_ranks_succeed(self.accelerator, f"uploading {directory.name}"):
            if self.accelerator.is_main_process:
                private = self.args.hub_private_repo if private is None else private
                options |= {"private": private}
                self.hub_model_id, commit = push_to_hub(directory, self.args.hub_model_id, **options)
        return commit

    def _card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
        **others: Any,
    ) -> CardFacts:
        check_not_given("create_model_card", others, want="model_name, dataset_name and tags alone, as TRL's has")
        listed: Any = [tags] if isinstance(tags, str | None) else tags
        if not isinstance(listed, Sequence | Set) or not has_type(
            [model_name, dataset_name, *listed], list[str | None]
        ):
            raise InputError(
                f"got model_name={quoted(model_name)}, dataset_name={quoted(dataset_name)}, tags={quoted(tags)}, want "
                "text, or several texts as tags alone; fix: the name of one dataset"
            )
        return CardFacts(
            name=model_name or self.args.hub_model_id or self.output_dir.name,
            rewards=self.rewards.names,
            steps=self.learner.step,
            results=self.results,
            base_model=self.model_path,
            dataset=dataset_name,
            adapter=is_adapted(self.model),
            quantization=codes_identity(base_model(self.model).config),
            tags=[tag for tag in listed if tag],
        )

    # The data. A batch is a list of rows, as in TRL: what one process samples completions for at a time, each prompt as
    # often as it has completions there, and a copy. The loop does not use these: an engine repeats prompts itself, and
    # the position in the data is the sampler's.

    def get_train_dataloader(self) -> DataLoader[list[Row]]:
        """The rows of this process in the first pass over the data, in the order in which a new run draws them.

        As in TRL, a batch has `per_device_train_batch_size * steps_per_generation` rows and comes once for each
        micro-batch and iteration that uses its completions, so that the length is that of the pass in micro-batches.
        Prompts that fill no batch are left out. Reading it does not move the run's own position.

        UnsupportedError for a stream, whose position a second reader would move.
        """
        if is_stream(self.dataset):
            raise UnsupportedError(
                "got a stream as train_dataset, whose position a second reader would move; want a dataset with a "
                "length; fix: iterate over your own copy of the stream"
            )
        processes = self.accelerator.num_processes
        times = self.args.micro_batches_per_generation(processes) * self.args.num_iterations
        batches = repeated_rows(self.sampler, self.args.group_part(processes), times)
        workers: int = vars(self.args)["dataloader_num_workers"]
        return DataLoader(self.dataset, batch_sampler=batches, collate_fn=deepcopy, num_workers=workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[list[Row]]:
        """The rows of an eval set that this process has, `per_device_eval_batch_size` at a time; none is left out.

        Args:
            eval_dataset: a set, or the name of one of the trainer's. None: the trainer's. A stream is read to its end.

        DataError for none, several, or one that cannot be used.
        """
        sets = chosen_eval_sets(eval_dataset, self.eval_dataset)
        if len(sets) > 1:
            raise DataError(f"got the eval sets {list(sets)}, want one; fix: get_eval_dataloader(name)")
        (rows,) = sets.values()
        workers: int = vars(self.args)["dataloader_num_workers"]
        if is_stream(rows):
            rows, workers = all_rows(rows, name="eval_dataset"), 0
        size, repeats = self.args.per_device_eval_batch_size, self.args.num_generations_eval or 1
        numbers = [number for number in range(len(rows)) for _ in range(repeats)]
        batches = list(BatchSampler(numbers, size, drop_last=False))
        own_batches = batches[self.accelerator.process_index :: self.accelerator.num_processes]
        return DataLoader(rows, batch_sampler=own_batches, collate_fn=deepcopy, num_workers=workers)

    # Parts of TRL's loss, whose place `fused_grpo.loss` takes, and its log.

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Which tokens have at least the entropy that a share of `threshold` of all tokens is below: [B, T] bool.

        Args:
            entropies: [B, T], of this process; the quantile is that of the tokens of all processes.
            mask: [B, T], 1 for tokens and 0 for padding.
            threshold: from 0 (all tokens) to 1 (those of the greatest entropy).
        """
        is_token = mask.bool()
        padded = self.accelerator.pad_across_processes(entropies[is_token].float(), dim=0, pad_index=-1)
        values: Any = self.accelerator.gather(padded)
        return is_token & (entropies >= quantile(values[values >= 0], threshold))  # no entropy is below 0

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """[B, 1] of the mask's dtype: 0 for sequences that the loss leaves out (DeepSeek-V3.2), else 1.

        Those have a negative `advantages` [B, 1] and a mean of log p_sampling - log p over their tokens, of [B, T]
        each, beyond the threshold. A token without a log-prob of the sampler (NaN) counts as one without a difference.
        """
        drift = torch.where(mask.bool(), sampling_per_token_logps - per_token_logps.detach(), 0.0).nan_to_num(nan=0.0)
        means = drift.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return ((advantages >= 0) | (means <= off_policy_threshold)).to(mask.dtype)

    @property
    def _logs(self) -> dict[str, Any]:
        """The completions of this process in the newest generated batch: what TRL's table of completions has."""
        samples = [] if self.scored is None else self.scored.samples
        columns = dict.fromkeys(name for sample in samples for name in sample.logged)
        return {
            "prompt": [sample.row["prompt"] for sample in samples],
            "completion": [as_completion(sample.row, sample.text) for sample in samples],
            "rewards": {
                name: [sample.rewards[place] for sample in samples] for place, name in enumerate(self.rewards.names)
            },
            "advantages": [sample.advantage for sample in samples],
            "extra": {name: [sample.logged.get(name) for sample in samples] for name in columns},
        }

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return bool(self.accelerator.is_main_process)

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether the model is sharded by FSDP2."""
        return bool(self.accelerator.distributed_type == DistributedType.FSDP)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return bool(self.accelerator.is_local_main_process)

    @property
    def epsilon_high(self) -> float:
        """Upper clip of the ratio."""
        return self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    @property
    def environments(self) -> list[Any] | None:
        """Those of the newest batch that was generated for training, one for each completion; None before it, and
        without any. An evaluation resets them."""
        if self.environment_factories is None or self.scored is None:
            return None
        return [sample.episode.environment for sample in self.scored.samples if sample.episode is not None]

    _env_tools: Any = _part("start.rules.environments.tools_of")
    _environment_pool: Any = _part("start.rules.environments.pool")

    args: GRPOConfig = _part("start.args")
    model, model_wrapped = _part("_model"), _part("_model")
    train_dataset: Any = _part("_train_dataset")  # as the user gave it
    state: TrainerState = _part("events.state")
    control: TrainerControl = _part("events.control")  # what callbacks have decided
    step: int = _part("learner.step")  # optimizer steps made so far
    entropy_coef: float = _part("learner.entropy.coefficient")  # now: with `use_adaptive_entropy` it moves
    callback_handler: Any = _part("events.handler")
    optimizer: Any = _part("learner.optimizer")
    lr_scheduler: Any = _part("learner.scheduler")
    reward_funcs: Any = _part("rewards.functions")
    reward_func_names: Any = _part("rewards.names")
    reward_weights: Any = _part("rewards.weights")
    epsilon_low: Any = _part("args.epsilon")
    num_generations, num_iterations = _part("args.num_generations"), _part("args.num_iterations")
    max_completion_length, shuffle_dataset = _part("args.max_completion_length"), _part("args.shuffle_dataset")
    beta, loss_type, scale_rewards = _part("args.beta"), _part("args.loss_type"), _part("args.scale_rewards")
    temperature, repetition_penalty = _part("args.temperature"), _part("args.repetition_penalty")
    top_p, top_k, min_p = _part("args.top_p"), _part("args.top_k"), _part("args.min_p")


def make_sampler(start: Start) -> PromptSampler:
    """The sampler of the prompts; of a stream, without those that are too long."""
    args, processes = start.args, start.processes
    return prompt_sampler(
        start.train_dataset,
        curriculum=args.curriculum,
        prompts_per_batch=args.prompts_per_process(processes),
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=args.shuffle_dataset,
        rank=0 if start.accelerator is None else start.accelerator.process_index,
        world_size=processes,
        repeats=args.num_generations // args.group_part(processes),
        keep=None if start.limit.tokens is None else start.limit.fits,
    )


def repeated_rows(sampler: PromptSampler, each: int, times: int) -> list[list[int]]:
    """Each batch of a first pass `times` times, with each of its row numbers `each` times."""
    batches = ([number for number in numbers for _ in range(each)] for numbers in sampler.first_pass())
    return [batch for batch in batches for _ in range(times)]
