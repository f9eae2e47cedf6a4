"""`WithCheckpoints`: what a trainer saves and uploads, under transformers' names where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.batching.rollout_buffer import RolloutBuffer
from fused_grpo.trainer.checkpoint.checkpoint import (
    STATE_FILE,
    refuse_unusable,
    remove_old_checkpoints,
    save_checkpoint,
    weights_stay,
)
from fused_grpo.trainer.checkpoint.resume import restore, training_state
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, any_rank
from fused_grpo.trainer.distributed.stopping import StopOnSignal
from fused_grpo.trainer.logging.callbacks import WithCallbacks
from fused_grpo.trainer.logging.model_card import CardFacts, push_to_hub, write_model_card
from fused_grpo.trainer.logging.run_log import rewind_logs
from fused_grpo.trainer.models.adapters import is_adapted, saver_of


class WithCheckpoints(WithCallbacks):
    """The part of a trainer that writes its model, its checkpoints and its model card, and begins a run again."""

    model: Any
    model_path: str | None
    processing_class: Any
    collector: Any
    buffer: RolloutBuffer | None
    stop: StopOnSignal
    output_dir: Path
    hub_model_id: str | None = None
    eval_before: dict[str, float] | None = None
    eval_after: dict[str, float] | None = None  # the last evaluation's
    last_metrics: dict[str, Any]
    sampler: Any
    epochs: Any
    _in_epoch = False
    _is_stale = False  # the engine has the weights of another run's step of that number
    _beginning: dict[str, Any] | None = None  # where the first `train` began in the data

    @property
    def step(self) -> int:
        """Optimizer steps made so far."""
        return int(self.learner.step)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> Path:
        """Write weights (safetensors) and tokenizer, as transformers and vLLM load them. None: `<output_dir>/final`.

        In a directory that you name, only the files of the model are written. Nothing is uploaded.
        """
        if output_dir is None:
            return self._save(self.output_dir / "final")
        weights = self.learner.weights()
        with all_ranks_succeed(self.accelerator, f"saving {output_dir}"):
            if self.accelerator.is_main_process:
                Path(output_dir).mkdir(parents=True, exist_ok=True)
                saver = saver_of(self.model)
                with weights_stay(Path(output_dir), saver, weights):
                    saver.save_pretrained(str(output_dir), state_dict=weights)
                    self.processing_class.save_pretrained(str(output_dir))
        return Path(output_dir)

    def save_checkpoint(self) -> Path:
        """Write everything that `resume_from_checkpoint` needs to `<output_dir>/checkpoint-<step>`.

        With `save_only_model`, the model alone.
        """
        return self._save_checkpoint(resumable=not self.args.save_only_model)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Upload the model as it is now, with its card, in one commit: `<output_dir>/final`, and nothing beside it.

        Args:
            commit_message, revision: of the commit.
            blocking: wait until it is uploaded.
            token: of the account. None: the one that is logged in.
            card: arguments of `create_model_card`.

        Returns:
            What `huggingface_hub.HfApi.upload_folder` returns, on the first process; None on the others.

        Raises:
            UnavailableError: no network, no login, or no right to write there.
        """
        self.event("on_push_begin")
        final = self._save_final(self._card(**card))
        options = {"commit_message": commit_message, "revision": revision, "run_as_future": not blocking}
        return self._upload(final, token=token, **options)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | Sequence[str] | None = None
    ) -> None:
        """Write README.md into `args.output_dir`."""
        if self.is_world_process_zero():
            self.output_dir.mkdir(parents=True, exist_ok=True)
            write_model_card(self.output_dir, self._card(model_name, dataset_name, tags), self.args)

    def _card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | Sequence[str] | None = None
    ) -> CardFacts:
        return CardFacts(
            name=model_name or self.args.hub_model_id or self.output_dir.name,
            rewards=self.rewards.names,
            steps=self.step,
            metrics=self.last_metrics,
            base_model=self.model_path,
            dataset=dataset_name,
            eval_before=self.eval_before,
            eval_after=self.eval_after,
            adapter=is_adapted(self.model),
            tags=[tags] if isinstance(tags, str) else tags or [],
        )

    def _save_final(self, card: CardFacts) -> Path:
        return self._save(
            self.output_dir / "final", write_more=lambda directory: write_model_card(directory, card, self.args)
        )

    def _upload(self, directory: Path, **options: Any) -> Any:
        commit = None
        with all_ranks_succeed(self.accelerator, f"uploading {directory}"):
            if self.is_world_process_zero():
                name, private = self.args.hub_model_id, self.args.hub_private_repo
                self.hub_model_id, commit = push_to_hub(directory, name, private=private, **options)
        return commit

    def _save_checkpoint(self, *, resumable: bool) -> Path:
        directory = self.output_dir / f"checkpoint-{self.step}"
        if self.state.best_global_step == self.step:
            self.state.best_model_checkpoint = str(directory)
        self._save(directory, write_more=self._training_state() if resumable else None)
        with all_ranks_succeed(self.accelerator, "removing old checkpoints"):
            if self.accelerator.is_main_process:
                keep, best = self.args.save_total_limit, self.state.best_model_checkpoint
                remove_old_checkpoints(self.output_dir, keep, step=self.step, best=best)
        return directory

    def _begin_again(self) -> None:
        """In a further `train`: a new run from the weights as they are now, as in TRL."""
        position, self._beginning = self._beginning, self._beginning or self.sampler.position()
        if position is None:
            return
        self.learner.restart()
        self.collector.prefetched, self.buffer, self._in_epoch = None, None, False
        start = {"sampler": self.sampler.state_dict(position), "generate_calls": 0, "num_tokens": 0}
        self.collector.load_state(start, {})
        self.epochs.resume(0, 0.0)
        self._is_stale, self.eval_before, self.eval_after = True, None, None

    def _restore(self, checkpoint: Path) -> None:
        """Everything as it was when `checkpoint` was saved, the logs included."""
        self.buffer, self.eval_before, unlogged, state = restore(checkpoint, self.learner, self.collector)
        if self.step > self.max_steps:
            raise CheckpointError(
                f"got {checkpoint} of step {self.step}, want one of max_steps={self.max_steps} at most; fix: a larger "
                "max_steps, or an earlier checkpoint"
            )
        with refuse_unusable(checkpoint, STATE_FILE):
            self.epochs.resume(self.step, state.epoch)
            self._prepare_state(state, self.epochs.total)
        self.step_metrics.unlogged = unlogged
        self.step_metrics.generation = {} if self.buffer is None else self.buffer.metrics
        with all_ranks_succeed(self.accelerator, "cutting back the logs"):
            if self.accelerator.is_main_process:
                rewind_logs(self.output_dir, self.step)

    def _training_state(self) -> Any:
        # A run that has to stop does not wait for its engine.
        wait = not any_rank(self.accelerator, self.stop.requested)
        logs: dict[str, Any] = {"eval_before": self.eval_before, "unlogged": self.step_metrics.unlogged}
        return training_state(self.learner, self.collector, self.buffer, **logs, wait=wait)

    def _save(self, directory: Path, write_more: Any = None) -> Path:
        weights = self.learner.weights()
        with all_ranks_succeed(self.accelerator, f"saving {directory.name}"):
            if self.accelerator.is_main_process:
                save_checkpoint(
                    directory,
                    model=saver_of(self.model),
                    tokenizer=self.processing_class,
                    trainer_state=self._saved_state(),
                    state_dict=weights,
                    write_more=write_more,
                )
        return directory
