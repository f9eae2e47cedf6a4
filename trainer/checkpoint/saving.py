"""`ModelFiles`: the model of a run as files, with its card: in checkpoints, at its end, and on the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fused_grpo.trainer.checkpoint.checkpoint import remove_old_checkpoints, save_checkpoint, weights_stay
from fused_grpo.trainer.checkpoint.training_state import TrainingFiles
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed.failures import all_ranks_succeed
from fused_grpo.trainer.logging.callbacks import Events
from fused_grpo.trainer.logging.console import without_bars
from fused_grpo.trainer.logging.model_card import CardFacts, push_to_hub, write_model_card
from fused_grpo.trainer.models.adapters import saver_of


class ModelFiles:
    """Writes the model and its tokenizer, on the main process. Every method is a collective.

    Args:
        learner: has the weights.
        model, tokenizer: are saved by their own methods.
        events: has the state that a directory of transformers' contains.
        training_state: what a run needs to be resumed, beside the model.
    """

    def __init__(
        self,
        args: GRPOConfig,
        learner: Any,
        model: Any,
        tokenizer: Any,
        *,
        events: Events,
        training_state: Callable[[], TrainingFiles],
    ) -> None:
        self.args, self.learner, self.model, self.tokenizer = args, learner, model, tokenizer
        self.events, self.training_state = events, training_state
        self.accelerator, self.output_dir = learner.accelerator, Path(args.output_dir)
        self.hub_model_id: str | None = None  # of the last upload

    def save(self, directory: Path, write_more: Callable[[Path], None] | None = None) -> Path:
        """A directory of the run: with a manifest, and replaced as a whole. `write_more` adds to its files."""
        weights = self.learner.weights()
        with all_ranks_succeed(self.accelerator, f"saving {directory.name}"), without_bars():
            if self.accelerator.is_main_process:
                save_checkpoint(
                    directory,
                    model=saver_of(self.model),
                    tokenizer=self.tokenizer,
                    trainer_state=self.events.saved_state(),
                    state_dict=weights,
                    write_more=write_more,
                )
        return directory

    def save_elsewhere(self, directory: Path) -> Path:
        """Weights and tokenizer in a directory of the user's, among whatever is there."""
        weights = self.learner.weights()
        with all_ranks_succeed(self.accelerator, f"saving {directory}"), without_bars():
            if self.accelerator.is_main_process:
                directory.mkdir(parents=True, exist_ok=True)
                saver = saver_of(self.model)
                with weights_stay(directory, saver, weights):
                    saver.save_pretrained(str(directory), state_dict=weights)
                    self.tokenizer.save_pretrained(str(directory))
        return directory

    def save_checkpoint(self, *, resumable: bool) -> Path:
        """The checkpoint of this step; one that is not `resumable` has the model alone."""
        step, state = self.learner.step, self.events.state
        directory = self.output_dir / f"checkpoint-{step}"
        if state.best_global_step == step:
            state.best_model_checkpoint = str(directory)
        self.save(directory, self.training_state() if resumable else None)
        with all_ranks_succeed(self.accelerator, "removing old checkpoints"):
            if self.accelerator.is_main_process:
                keep, best = self.args.save_total_limit, state.best_model_checkpoint
                remove_old_checkpoints(self.output_dir, keep, step=step, best=best)
        return directory

    def save_final(self, card: CardFacts) -> Path:
        """The model as it is now, with its card."""

        def write_card(directory: Path) -> None:
            write_model_card(directory, card, self.args)

        return self.save(self.output_dir / "final", write_card)

    def upload(self, directory: Path, **options: Any) -> Any:
        """Upload a directory in one commit. Returns the commit, on the main process."""
        commit = None
        with all_ranks_succeed(self.accelerator, f"uploading {directory}"):
            if self.accelerator.is_main_process:
                name, private = self.args.hub_model_id, self.args.hub_private_repo
                self.hub_model_id, commit = push_to_hub(directory, name, private=private, **options)
        return commit
