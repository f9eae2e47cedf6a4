"""What can be known at the start is said at the start: the checks of a run before anything slow, and of its dry run.

The checks read options, names, small files, the tokenizer and the prompts; only the last one loads anything, the reward
models. What they find (tokenizer, configuration, longest prompt) the run uses.
"""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from transformers import GenerationConfig

from fused_grpo.errors import DataError, InputError, WrongTypeError
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints, newest_checkpoint, verify_checkpoint
from fused_grpo.trainer.checkpoint.optimizer_states import check_optimizer
from fused_grpo.trainer.checkpoint.output_dir import check_output_dir, check_space
from fused_grpo.trainer.checkpoint.training_state import read_numbers
from fused_grpo.trainer.collect.best_metric import check_best_name
from fused_grpo.trainer.config.checks import check_arguments, check_evaluates, warn_of_no_best
from fused_grpo.trainer.config.derived_options import fill_loader_options, whole_steps
from fused_grpo.trainer.config.grpo_config import GRPOConfig, check_options, own_fields
from fused_grpo.trainer.data.datasets import check_dataset, eval_sets, is_conversational, is_stream, read_rows, set_name
from fused_grpo.trainer.data.prompt_sampler import Epochs, planned_steps, prompt_sampler
from fused_grpo.trainer.data.prompts import PromptLimit
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.abandoned import remove_abandoned
from fused_grpo.trainer.engines.engine_choice import EngineName, check_routing, engine_name, sampling_dtype, server_urls
from fused_grpo.trainer.engines.sampling import prepared, stop_token_ids
from fused_grpo.trainer.engines.server.urls import checked_urls
from fused_grpo.trainer.engines.vllm.start_vllm import (
    check_dtype,
    check_installed,
    check_vllm_arguments,
    enable_batch_invariance,
)
from fused_grpo.trainer.engines.weight_files import temporary_folder
from fused_grpo.trainer.episodes.environments import rows_of_environments, with_prompts
from fused_grpo.trainer.episodes.play import Rules, rules_of
from fused_grpo.trainer.learner import Learner, Optimizers
from fused_grpo.trainer.logging.callbacks import EVENTS
from fused_grpo.trainer.logging.model_card import check_hub
from fused_grpo.trainer.logging.run_output import tracker_arguments
from fused_grpo.trainer.models.adapters import adapt, is_adapted
from fused_grpo.trainer.models.loading import (
    SELF,
    check_gradients,
    check_init_kwargs,
    check_source,
    generation_config,
    known_tokens,
    knows_text,
    load_config,
    load_model,
    load_teacher,
    loading,
    loading_options,
    positions,
    tokenizer_for,
    warn_of_added_rows,
    warn_of_other_weights,
)
from fused_grpo.trainer.models.memory_estimate import ModelShape, planned_shape
from fused_grpo.trainer.models.optimizer import try_schedule
from fused_grpo.trainer.models.quantized import QUANTIZATION, check_quantization, quantization_of
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.rewards.builtin_rewards import no_reward
from fused_grpo.trainer.rewards.reward_functions import is_reward_model, unloaded

# Options of what a run shows, evaluates and saves: the first parts of their names. All others are used at the start.
_LATER = re.compile("eval_|log_|logging_|save_|load_best|metric_for|greater_is|hub_|push_to_hub|overwrite|run_")
RESET_TOKENS = 1024  # tokens that an environment may add to a prompt, where no option says


@dataclass(kw_only=True)
class Start:
    """What a run begins with: arguments of the trainer, and below what the checks find."""

    args: GRPOConfig
    model: Any  # a path, a hub id, or a module
    train_dataset: Any  # after the checks without the prompts that are too long
    eval_dataset: Any = None  # one, or several by name
    reward_funcs: Any
    reward_processing_classes: Any = None
    processing_class: Any = None
    quantization_config: Any = None
    peft_config: Any = None
    callbacks: Any = ()
    rollout_engine: RolloutEngine | None = None
    rollout_func: Any = None
    teacher_model: Any = None
    tools: Any = None
    environment_factory: Any = None
    accelerator: Accelerator | None = field(default=None, init=False)  # None: of a dry run
    adds_metrics: bool = field(default=False, init=False)  # a subclass, to an evaluation
    # Paths, absolute, and hub ids of models: the policy, a teacher, rewards; of rewards also names of functions.
    models: set[str] = field(init=False)
    evals: Mapping[str, Any] = field(init=False)  # eval sets by name
    config: Any = field(init=False)  # of the model
    engine_name: EngineName = field(init=False)
    shape: ModelShape | None = field(init=False)  # None: of a model that cannot be built without weights
    tokenizer: Any = field(init=False)
    rules: Rules | None = field(default=None, init=False)  # of episodes
    limit: PromptLimit = field(init=False)
    max_steps: int = field(init=False)
    epochs: Epochs = field(init=False)
    replaced: list[Path] = field(default_factory=list, init=False)  # of another run in the output directory
    rewards: Rewards = field(init=False)
    options: dict[str, Any] = field(init=False)  # `args` as text and numbers, once they have been checked

    def __post_init__(self) -> None:
        check_options(self.args)
        # One, several, or a generator, which is read once.
        self.callbacks = list(self.callbacks) if isinstance(self.callbacks, Iterable) else [self.callbacks]
        self.engine = self.rollout_engine or self.rollout_func  # None: the one that `args` asks for
        self.output_dir, resume = Path(self.args.output_dir).absolute(), self.args.resume_from_checkpoint
        self.resume = Path(resume).absolute() if isinstance(resume, str) else resume  # callbacks may change folders
        rewards = self.reward_funcs if isinstance(self.reward_funcs, list | tuple) else [self.reward_funcs]
        named = [str(one) for one in (self.model, self.teacher_model, *rewards) if isinstance(one, str | Path)]
        places = {one: str(Path(one).absolute()) if Path(one).exists() else one for one in named}
        self.models = set(places.values())
        self.model_path = places.get(str(self.model)) if isinstance(self.model, str | Path) else None  # to be loaded

    def arguments(self) -> dict[str, Any]:
        """Those of `GRPOTrainer` that it was made from."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}

    @property
    def processes(self) -> int:
        return self.args.world_size if self.accelerator is None else self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    @property
    def has_streams(self) -> bool:
        """Whether a set cannot be read before the run."""
        return any(map(is_stream, self.sets.values()))

    @property
    def sets(self) -> dict[str, Any]:
        """All datasets, under the names that errors have."""
        return {"train_dataset": self.train_dataset} | {set_name(name): rows for name, rows in self.evals.items()}

    @property
    def longest_sequence(self) -> int | None:
        """Tokens of the longest prompt and completion; None where nothing says."""
        if self.args.vllm_max_model_length or self.has_streams:
            return self.args.vllm_max_model_length
        longest = self.limit.longest
        if self.rules is not None and self.rules.environments is not None:
            longest += RESET_TOKENS + self.rules.own_tokens
        return min(longest, self.limit.tokens or longest) + self.args.max_completion_length

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of it, with what an environment adds; None: no limit."""
        longest = self.longest_sequence
        has_cache = self.engine is None and self.engine_name != "transformers"  # of ours
        return longest - self.args.max_completion_length if longest is not None and has_cache else self.limit.tokens

    def check_again(self, model: Any, eval_dataset: Any) -> None:
        """In `train`: errors as at the start, and DataError for a row of an environment which there is not."""
        check_gradients(model)
        check_options(self.args)
        check_evaluates(self.args, eval_dataset)
        sets = eval_sets(eval_dataset, check=eval_dataset is not self.eval_dataset)
        if eval_dataset is not self.eval_dataset:  # a script has set it since
            check_given_sets(self, sets)
        check_best_name(self.args, self.rewards, sets, is_overridden=self.adds_metrics)
        check_hub(self.args)
        self.check_unchanged()
        if self.rules is not None and self.rules.environments is not None:
            for name, rows in self.sets.items():
                self.rules.environments.check_rows(rows, name=name)

    def check_unchanged(self) -> None:
        """InputError where options have changed since the start, by a script or in a callback."""
        now, made, names = self.args.to_dict(), self.options, (entry.name for entry in own_fields(GRPOConfig))
        changed = [name for name in names if now[name] != made[name] and not _LATER.match(name)]
        if changed:
            got, want = (", ".join(f"{name}={options[name]!r}" for name in changed) for options in (now, made))
            raise InputError(
                f"got args with {got}, want {want}, with which this trainer was made; "
                "fix: a new GRPOTrainer, with resume_from_checkpoint=True to go on"
            )

    def is_saved(self, step: int) -> bool:
        """Whether `save_strategy` makes a checkpoint of that step, or may make one."""
        args, last = self.args, self.max_steps
        by_steps = args.save_strategy == "steps" and step % whole_steps(args.save_steps, last) and step != last
        return step <= last and args.save_strategy != "no" and not by_steps


def check_given(start: Start) -> None:
    """The arguments go together, and the datasets can be used; environments write prompts where there are none."""
    args, factory = start.args, start.environment_factory
    check_gradients(start.model)
    check_arguments(
        args,
        rollout_func=start.rollout_func,
        rollout_engine=start.rollout_engine,
        eval_dataset=start.eval_dataset,
        teacher_model=start.teacher_model,
        tools=start.tools,
        environment_factory=factory,
        quantization_config=start.quantization_config,
    )
    train = rows_of_environments(start.train_dataset, factory, args)
    start.eval_dataset = with_prompts(start.eval_dataset, factory)
    start.train_dataset = check_dataset(train, name="train_dataset")
    fill_loader_options(args, stream=is_stream(start.train_dataset))
    start.evals = eval_sets(start.eval_dataset, check=True)


def check_start(start: Start) -> None:
    """Go through all other checks; the first one that fails raises a FusedGRPOError."""
    first = (check_processes, check_names, check_services, check_model, check_episodes, check_prompts)
    for check in (*first, check_places, check_saving, check_disk, check_rewards):
        check(start)


def check_processes(start: Start) -> None:
    """The batch divides, and the launcher has started what it was asked for: on a CPU `accelerate launch` does not."""
    start.args.prompts_per_process(start.processes)
    if start.accelerator is not None and start.processes != start.args.world_size:
        raise InputError(
            f"got {start.processes} process(es) where WORLD_SIZE={start.args.world_size}, want as many; fix: whatever "
            "makes Accelerate's state (a trainer, an Accelerator, args.device) inside of what is launched, not before"
        )
    alone = start.processes == 1 and "WORLD_SIZE" not in os.environ
    if alone and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        raise InputError(
            "got one process from an accelerate launch that was asked for several (it sets MASTER_ADDR), which it "
            "starts on GPUs alone, want all of them; fix: torchrun --nproc_per_node N, or --num_processes 1 without "
            "MASTER_ADDR in the environment"
        )


def check_names(start: Start) -> None:
    """Paths and hub ids of models, and names of rewards."""
    args, given, teacher = start.args, start.reward_funcs, start.teacher_model
    for name in ("model_init_kwargs", "teacher_model_init_kwargs"):
        check_init_kwargs(name, getattr(args, name))
    check_source("model", start.model, args.model_init_kwargs)
    if teacher is not None and teacher != SELF:
        check_source("teacher_model", teacher, args.teacher_model_init_kwargs)
    for name in given if isinstance(given, list | tuple) else [given]:
        if isinstance(name, str) and is_reward_model(name):
            check_source("reward_funcs", name, args.model_init_kwargs)


def check_services(start: Start) -> None:
    """Trackers, the hub's login, vLLM and the addresses of its servers; callbacks that are some."""
    args = start.args
    tracker_arguments(args)
    check_hub(args)
    start.engine_name = engine_name(args, start.peft_config or getattr(start.model, "active_peft_config", None))
    inner = callable(start.engine) and (args.use_vllm or args.vllm_mode == "server")  # of a rollout_func
    if start.engine is None or inner:
        prepared([], args.sampling(seed=args.seed), random.Random(), engine=start.engine_name)
    if (start.engine is None or inner) and start.engine_name != "transformers":
        if args.vllm_max_model_length is None and start.has_streams:
            raise InputError("got a dataset without random access; fix: set vllm_max_model_length")
        checked_urls(server_urls(args), allow_remote=args.vllm_server_allow_remote)
        if start.engine_name == "vllm":
            check_installed()
            check_vllm_arguments(args.vllm_engine_kwargs or ())
            if args.vllm_dtype != "auto":
                check_dtype(sampling_dtype(args))
            if args.batch_invariant:
                enable_batch_invariance()
    elif start.engine is None and args.generate_ahead:
        raise InputError(
            f"got generate_ahead={args.generate_ahead} with the transformers engine, which samples with the model that "
            "is trained, want vLLM beside the trainer; fix: use_vllm=True, vllm_mode='server', or generate_ahead=0"
        )
    for callback in start.callbacks:
        if not all(callable(getattr(callback, event, None)) for event in EVENTS):
            raise WrongTypeError(
                f"got {callback!r} among the callbacks, want classes or instances of transformers.TrainerCallback; "
                "fix: inherit from it"
            )


def check_model(start: Start) -> None:
    """The model's configuration, what can be trained on a quantised one, and its tokenizer."""
    args = start.args
    start.config = load_config("model", start.model, args, args.model_init_kwargs)
    check_routing(args, start.engine_name, start.config.get_text_config(), own=start.engine)
    given = [{QUANTIZATION: start.quantization_config}, args.model_init_kwargs] if start.model_path is not None else []
    quantization = quantization_of(start.config, *given)
    has_adapter = start.peft_config is not None or is_adapted(start.model)
    is_sharded = getattr(start.accelerator, "distributed_type", None) == DistributedType.FSDP
    check_quantization(quantization, has_adapter=has_adapter, is_sharded=is_sharded)
    options = {**loading_options(args), QUANTIZATION: quantization}
    start.shape = planned_shape(start.config, start.model, start.peft_config, **options)
    with loading(f"model {start.model_path or start.config._name_or_path!r}, whose tokenizer"):
        start.tokenizer = tokenizer_for(start.model, start.processing_class, args)
    if not knows_text(start.tokenizer):
        raise DataError(
            f"got a tokenizer without a vocabulary from {start.tokenizer.name_or_path!r}, want that of the model; fix: "
            "save it beside the model, or pass it as processing_class"
        )


def check_episodes(start: Start) -> None:
    """Tools have schemas, environments can be made and reset, and the chat template shows their calls and answers."""
    if not start.tools and start.environment_factory is None:
        return
    generation = generation_config(start.model, start.args) or GenerationConfig.from_model_config(start.config)
    stop_ids = stop_token_ids(generation, start.tokenizer)
    start.rules = rules_of(start.tools, start.environment_factory, start.args, start.tokenizer, stop_ids)
    for name, rows in start.sets.items():
        if not is_conversational(next(iter(read_rows(rows, name=name)))):
            raise DataError(
                f"got tools and strings as prompts of {name}, want conversations, in which a template writes calls and "
                "answers; fix: [{'role': 'user', 'content': ...}] as prompt"
            )


def check_prompts(start: Start) -> None:
    """Every prompt has tokens that the model knows, and room for a completion; the data can be drawn in that order."""
    own, args, text = start.engine, start.args, start.config.get_text_config()
    read = [text]  # by models that read whole sequences
    if start.teacher_model not in (None, SELF):
        config = load_config("teacher_model", start.teacher_model, args, args.teacher_model_init_kwargs)
        read.append(config.get_text_config())
    start.limit = PromptLimit(
        start.args,
        start.tokenizer,
        # A user's engine may shorten prompts, and their function encodes them itself.
        positions=positions(*read) if own is None else None,
        vocabulary=known_tokens(text, start.model) if own is None or hasattr(own, "generate") else None,
        tools=() if start.rules is None else start.rules.shown_tools,
    )
    start.train_dataset = start.limit.applied(start.train_dataset, name="train_dataset")
    for name, rows in start.evals.items():
        start.limit.applied(rows, name=set_name(name))
    order: Any = {"curriculum": args.curriculum, "shuffle": args.shuffle_dataset}
    sampler = prompt_sampler(start.train_dataset, prompts_per_batch=1, seed=0, **order)
    start.max_steps, start.epochs = planned_steps(args, sampler.num_prompts, start.processes)


def check_saving(start: Start) -> None:
    """What will be saved beside the weights is saved once, in a temporary folder: transformers refuses some of it."""
    parts = {"the tokenizer": start.tokenizer}
    if start.peft_config is None and not is_adapted(start.model):  # else the adapter alone is saved
        warn_of_other_weights(start.model)
        parts |= {"the config": start.config}
        if (generation := copy.deepcopy(generation_config(start.model, start.args))) is not None:
            generation.pad_token_id = start.tokenizer.pad_token_id  # a run sets it; some are saved only as loaded
            parts |= {"the generation_config": generation}
    warn_of_added_rows(start.model, start.peft_config)
    remove_abandoned(directory := gettempdir())  # of a process that was killed here
    for name, part in parts.items():
        try:
            with suppress(OSError), temporary_folder(0, directory=directory) as folder:  # of the temporary folder
                part.save_pretrained(folder)
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            raise InputError(
                f"got {name} of {start.model_path or type(start.model).__name__}, which could not be saved after the "
                f"run ({type(error).__name__}: {reason}); want one that transformers saves; fix: what it names, in its "
                "file or on the object, such as generation_config.do_sample = True beside a temperature"
            ) from error


def check_places(start: Start) -> None:
    """The output directory, the checkpoint to resume from, and files of others where this run is going to save."""
    args, path, resume = start.args, Path(start.args.output_dir), start.args.resume_from_checkpoint
    if not start.is_main:
        return
    if checkpoint := newest_checkpoint(path, sums=False) if resume is True else Path(str(resume)) if resume else None:
        verify_checkpoint(checkpoint, sums=False)
        read_numbers(checkpoint, start.max_steps)
    # Where there are checkpoints, the arguments of `train` say whether to resume from them; the command has none.
    is_open = bool(resume or (start.accelerator is not None and checkpoints(path)))
    # Where a resumed run goes on is not known yet.
    is_saved = (lambda step: False) if resume else None if is_open else start.is_saved
    start.replaced = check_output_dir(
        path, resume=is_open, overwrite=args.overwrite_output_dir, keep=start.models, is_saved=is_saved
    )


def check_disk(start: Start) -> None:
    """Room for the final model and the checkpoints."""
    if start.shape is None or not start.is_main:
        return
    args, saved = start.args, start.shape.trained_size * start.shape.trained  # an adapter is saved alone
    copies = 1 if args.save_only_model or not args.optim.startswith("adamw_torch") else 3
    most = args.most_checkpoints(start.max_steps, float(start.epochs.at(start.max_steps)))
    check_space(Path(args.output_dir), saved, copies=copies, checkpoints_kept=most)


def check_rewards(start: Start) -> None:
    """The reward functions, and that every set has the columns that they read."""
    environments = None if start.rules is None else start.rules.environments
    start.rewards = make_rewards(start, [] if environments is None else environments.rewards())
    check_columns(start, start.sets)
    args = start.args
    last = start.epochs.total if args.eval_strategy == "epoch" else start.max_steps
    warn_of_no_best(args, has_sets=bool(start.evals), last=float(last))
    check_best_name(args, start.rewards, start.evals, is_overridden=start.adds_metrics)


def check_given_sets(start: Start, sets: Mapping[str, Any]) -> None:
    """Eval sets given to `evaluate`: what `check_start` asks of the trainer's own, before the first is completed."""
    named = {set_name(name): rows for name, rows in sets.items()}
    for name, rows in named.items():
        start.limit.applied(rows, name=name)
    check_columns(start, named)


def check_columns(start: Start, sets: Mapping[str, Any]) -> None:
    """Every set has the columns that the rewards read, and reward models can score it; names are those of errors."""
    added = () if start.rules is None or start.rules.environments is None else ("environments",)
    for name, rows in sets.items() if start.engine is None else ():  # the user's own may add columns
        try:
            first = next(iter(read_rows(rows, name=name)))
            start.rewards.check_columns([*first, *added])
            start.rewards.check_models(first)
        except InputError as error:
            raise InputError(f"{error} ({name})") from error


def make_rewards(start: Start, more: Sequence[Callable[..., Any]]) -> Rewards:
    """The reward functions of a run, and `more` of weight 1, which environments have. A dry run loads no reward model.

    With a teacher there may be none: all rewards are 0 then.
    """
    args, functions, classes = start.args, start.reward_funcs, start.reward_processing_classes
    if start.accelerator is None and isinstance(functions, list):
        functions = [one if callable(one) or not is_reward_model(one) else unloaded(one) for one in functions]
    if more:
        listed = functions if isinstance(functions, list | tuple) else [] if functions is None else [functions]
        functions = [*listed, *more]
        if classes is not None:
            classes = [*(classes if isinstance(classes, list | tuple) else [classes]), *[None] * len(more)]
    if args.distillation_coef > 0 and (functions is None or functions == []):
        others = [("advantage_estimator", "grpo")] if args.advantage_estimator == "remax" else []
        for name, off in (("dynamic_sampling", 0), ("curriculum", "off"), *others):
            if (value := getattr(args, name)) != off:
                raise InputError(
                    f"got {name}={value!r} without reward_funcs, want rewards that differ in some groups; fix: "
                    f"{name}={off!r}"
                )
        functions = no_reward
    elif args.num_generations == 1 and args.advantage_estimator not in ("reinforce_plus_plus", "remax"):
        raise InputError(
            "got num_generations=1 with reward_funcs, want at least 2: an advantage compares a group's members; fix: "
            "leave reward_funcs out, where the teacher alone counts"
        )
    return Rewards(
        functions,
        weights=None if args.reward_weights is None else [*args.reward_weights, *[1.0] * len(more)],
        processing_classes=classes,
        failure=args.reward_failure,
        retries=args.reward_retries,
        timeout=args.reward_timeout,
        device=torch.device("cpu") if start.accelerator is None else start.accelerator.device,
        chat_template_kwargs=args.chat_template_kwargs,
        trust_remote_code=args.runs_remote_code,
        model_init_kwargs=args.model_init_kwargs,
    )


def make_learner(start: Start, optimizers: Optimizers, *, corrected: bool) -> tuple[Any, Learner]:
    """(the model that is trained, its learner); `corrected` as of `Learner`."""
    args, accelerator = start.args, start.accelerator
    assert accelerator is not None
    teacher = load_teacher(start.teacher_model, args, accelerator, start.tokenizer, start.model)
    set_seed(args.seed, device_specific=True)  # for dropout and new adapters
    given = {} if start.quantization_config is None else {QUANTIZATION: start.quantization_config}
    loaded = load_model(start.model, accelerator, **loading_options(args), **given)
    for config in filter(None, (loaded.config.get_text_config(), loaded.generation_config)):
        config.pad_token_id = start.tokenizer.pad_token_id
    policy = adapt(loaded, start.peft_config, args, accelerator, keep_reference=teacher == SELF)
    options: dict[str, Any] = {"optimizers": optimizers, "corrected": corrected, "teacher": teacher}
    learner = Learner(policy, args, accelerator, max_steps=start.max_steps, **options)
    is_saved = args.save_strategy != "no" and not args.save_only_model
    check_optimizer(learner.policy, learner.optimizer.optimizer, learner.scheduler, is_saved=is_saved)
    try_schedule(learner.scheduler, learner.optimizer.optimizer, start.max_steps)
    return policy, learner
