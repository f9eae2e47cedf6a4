"""The options of `fused-grpo train`: those of the command line override a YAML file, which overrides the defaults.

The options are the fields of `GRPOConfig` and the few of `TrainOptions`; their docstrings are the help, in sections.
The values of a YAML file become arguments first, so that one parser checks both. An option that holds a mapping is JSON
on the command line, and a mapping (or JSON) in YAML.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
import yaml
from tyro.constructors import PrimitiveConstructorSpec

from fused_grpo.config import check_ranges, has_type
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer.common.packages import installed
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.common.yaml_loader import YamlLoader
from fused_grpo.trainer.config.checks import check_teacher
from fused_grpo.trainer.config.derived_options import mapping
from fused_grpo.trainer.config.grpo_config import PYTHON_TYPES, GRPOConfig, changed_options, own_fields
from fused_grpo.trainer.config.trl_fields import MISSING, refuse_unless_harmless, unknown_options, with_help
from fused_grpo.trainer.tasks.named import ARITHMETIC, BUILT_IN, CALCULATOR

RECIPES = Path(__file__).parent.parent / "recipes"

# A field that a section of the help begins with, or goes on with, and the title of the section.
SECTIONS = {
    "model": "model, data and reward",
    "use_peft": "LoRA",
    "output_dir": "run",
    "max_steps": "batch",
    "model_init_kwargs": "precision and memory",
    "learning_rate": "optimizer",
    "loss_type": "loss",
    "sync_ref_model": "loss",
    "scale_rewards": "reward and advantage",
    "temperature": "sampling",
    "use_vllm": "vLLM",
    "shuffle_dataset": "evaluation and logging",
    "save_strategy": "saving",
}

# Flags without a --no- form.
COMMANDS = ("dry_run", "resume")

DESCRIPTION = """Train a causal language model with GRPO.

Without --model: the demo. Its defaults are beside the others where they differ.
"""

# Further spellings, as the other options of evaluations begin.
ALIASES = {"num_generations_eval": ["--eval-num-generations"]}

# What the help shows as a value; tyro's "{None}|STR" says no more, since the default is None.
METAVARS: dict[Any, str] = {
    str | None: "STR",
    bool | None: "[True|False]",
    int | None: "INT",
    float | None: "FLOAT",
    list[str] | None: "STR [STR ...]",
    list[float] | None: "FLOAT [FLOAT ...]",
    list[str] | str | None: "STR [STR ...]",
}

JSON_OBJECT = PrimitiveConstructorSpec[dict[str, Any] | None](
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda texts: None if texts[0] == "None" else mapping("text", texts[0]),
    is_instance=lambda value: isinstance(value, dict | None),
    str_from_instance=lambda value: [json.dumps(value) if value is not None else "None"],
)

# Options that say where rows come from, which a task says itself.
_DATA_OPTIONS = ("dataset", "dataset_config", "prompt_column", "answer_column", "eval_dataset")

# Levels of a YAML file: keyword arguments of a library may hold mappings of lists of mappings. Nested brackets can take
# hours of parsing.
MAX_DEPTH = 20
# What PyYAML makes of text without quotes.
_TAG = "tag:yaml.org,2002:"
_TAGS_OF_TEXT = {f"{_TAG}{kind}" for kind in ("bool", "int", "float", "timestamp")}


@with_help
@dataclass(kw_only=True)
class TrainOptions(GRPOConfig):
    """Train a causal language model with GRPO. Without --model: a built-in task."""

    model: str | None = None
    """Path or hub id of the model. None trains the small one of a built-in `task`."""
    teacher_model: str | None = None
    """Path or hub id of a model to distil from, with `distillation_coef`, or "self" for the reference model.
    `reward_funcs` may be left out then."""
    task: str | None = None
    """Task, in the place of `dataset` and with a reward of its own: reasoning_gym:GENERATOR, such as
    reasoning_gym:chain_sum, arithmetic or calculator (`fused-grpo tasks` lists them). None without a model is
    arithmetic."""
    task_options: list[str] = field(default_factory=list)
    """Options of the task's generator as name=value, such as max_terms=2 (`fused-grpo tasks NAME` lists them)."""
    dataset: str | None = None
    """Source of the prompts: a path (.jsonl, .json, .csv, .parquet), a hub id, or a function of the split as
    module:name or path.py:name. The model gets the column of prompts, the rewards get all others."""
    dataset_split: str = "train"
    """Split of a hub dataset."""
    dataset_config: str | None = None
    """Configuration of a hub dataset that has several."""
    prompt_column: str = "prompt"
    """Column with the prompts: text, or conversations."""
    answer_column: str | None = None
    """Column with the correct answers. Rewards get it as "answer", and accuracy_reward as "solution"."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """Form of prompts that are text: the user's message of a conversation ("chat"), text as it is ("plain"), or "chat"
    where the tokenizer has a chat template ("auto"). Rewards get completions of conversations as messages."""
    system_prompt: str | None = None
    """System message of prompts that are text, as "chat" makes conversations of them. None and "" are none."""
    limit: int | None = None
    """Number of rows to use, the first ones. None is all; of a generator 1000, made before repeats are left out."""
    eval_dataset: str | None = None
    """Source of held-out prompts, of the same three kinds as `dataset`, with the same columns."""
    eval_dataset_split: str = "test"
    """Split of a hub dataset of held-out prompts."""
    eval_limit: int | None = None
    """Number of held-out rows to use, the first ones. None is all; of a generator 200."""
    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions: short names that `fused-grpo rewards` lists (accuracy, format, length=TOKENS), or
    module:name or path.py:name, or reward models as paths or hub ids. With `task`: further ones."""
    tools: list[str] = field(default_factory=list)
    """Functions that the model may call, as module:name or path.py:name (docs/agents.md)."""
    environment_factory: str | None = None
    """Class of environments, whose methods are tools, as module:name or path.py:name. With `get_reward` it needs no
    `reward_funcs`, and with `max_steps` no `dataset`."""
    config: str | None = None
    """Path of a YAML file with values for these options, which the command line overrides, or the name of a recipe."""
    dry_run: bool = False
    """Show the resolved options, the arithmetic of the batch and an estimate of the memory, and train nothing."""
    resume: bool = False
    """Resume from the newest complete checkpoint, as --resume-from-checkpoint True does."""

    use_peft: bool = False
    """Train a LoRA adapter instead of all weights."""
    lora_r: int = 16
    """Rank of the adapter."""
    lora_alpha: int = 32
    """Scale of the adapter: alpha / r."""
    lora_dropout: float = 0.0
    """Dropout probability of the adapter's input."""
    lora_target_modules: list[str] | None = None
    """Names of the modules that get an adapter. None selects every linear layer but the head."""

    def __post_init__(self) -> None:
        if self.resume and self.resume_from_checkpoint is None:
            self.resume_from_checkpoint = True
        super().__post_init__()
        if self.prompt_format == "plain" and self.system_prompt:
            raise InputError(
                f"got prompt_format='plain' with system_prompt={self.system_prompt[:80]!r}, want one of the two: a "
                "system message is part of a conversation; fix: leave one out"
            )
        check_ranges(self, (("at least 1 row", lambda rows: rows >= 1, "limit eval_limit"),))
        check_teacher(self, self.teacher_model)

    def command(self) -> str:
        """The command line of the options that are no options of the trainer: model, data, rewards and adapter."""
        trainers = (entry.name for entry in own_fields(GRPOConfig))
        changed = changed_options(self, TrainOptions, but=(*trainers, *COMMANDS, "config"))
        return shlex.join(["fused-grpo", "train", *as_arguments(changed)])

    def trainer_args(self) -> GRPOConfig:
        return GRPOConfig(**{field.name: getattr(self, field.name) for field in own_fields(GRPOConfig)})

    def peft_config(self) -> Any:
        """The `peft.LoraConfig` of these options; None without `use_peft`, UnavailableError without peft."""
        if not self.use_peft:
            return None
        return installed("peft", extra="peft").LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_target_modules or "all-linear",
            task_type="CAUSAL_LM",
        )


def parse_train_options(arguments: Sequence[str]) -> TrainOptions:
    """Options of the command line, of a YAML file, and the defaults (those of the demo where there is no model).

    The help shows the defaults of a run with a model, and those of the demo beside them where they differ. Raises what
    `GRPOConfig` and `read_yaml` do; SystemExit for --help, an unknown option, or a value of the wrong type.
    """
    values, task = dict[str, Any](), None
    for position, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        value = value or "".join(arguments[position + 1 : position + 2])
        if option == "--config":
            values = read_yaml(find_config(value))
        task = value if option == "--task" else task
        if missing := MISSING.get(option.removeprefix("--").replace("-", "_") if option.startswith("--") else ""):
            raise UnsupportedError(
                f"got {option}, an option of TRL's that this trainer does not have: {missing.why}; fix: leave it out"
            )
    demo = read_yaml(RECIPES / "demo.yaml")
    if (task or values.get("task")) == CALCULATOR:  # whose completions are longer than the demo's
        demo |= read_yaml(RECIPES / "calculator.yaml")
    no_demo = {"--model", "-h", "--help"}.intersection(argument.split("=")[0] for argument in arguments)
    parsed: Any = tyro.cli(
        _sectioned(TrainOptions() if "model" in values or no_demo else TrainOptions(**demo), demo),
        args=as_flags([*as_arguments(values), *arguments]),
        prog="fused-grpo train",
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands),
    )
    return TrainOptions(**{name: value for section in vars(parsed).values() for name, value in vars(section).items()})


def check_combination(options: TrainOptions) -> None:
    """Raise InputError where some of model, data and rewards are missing that no teacher or environment replaces.

    Logs a warning of options that nothing reads here.
    """
    changed = changed_options(options, TrainOptions, but=())
    lora_names = [name for name in changed if name.startswith("lora_") and not options.use_peft]
    eval_names = [name for name in ("eval_limit",) if name in changed and options.model and not options.task]
    for names, fix in ((lora_names, "--use-peft"), (eval_names if not options.eval_dataset else [], "--eval-dataset")):
        if names:
            warn_once(f"got {', '.join(f'{name}={changed[name]}' for name in names)} without {fix}: nothing reads it")
    if options.task is not None:
        _check_task(options, options.task)
        return
    if options.task_options:
        raise InputError(
            f"got --task-options {' '.join(options.task_options)} without --task, want the task that takes them; "
            "fix: add --task"
        )
    if options.model is None and (options.tools or options.environment_factory):
        raise InputError(
            "got --tools or --environment-factory without --model, want a chat model that calls them; fix: add "
            "--model, or --task calculator"
        )
    given = {"--model": options.model, "--dataset": options.dataset, "--reward-funcs": options.reward_funcs}
    if options.model is not None and (options.teacher_model or options.environment_factory) is not None:
        del given["--reward-funcs"]
        if options.environment_factory is not None:  # the trainer says what it still needs
            del given["--dataset"]
    has, lacks = (" and ".join(name for name in given if bool(given[name]) is wanted) for wanted in (True, False))
    if has and lacks:
        raise InputError(
            f"got {has} without {lacks}, want all three, or --model and --task, or none for the built-in task; fix: "
            f"add {lacks}"
        )
    if options.model is None:
        _check_task(options, ARITHMETIC)


def _check_task(options: TrainOptions, name: str) -> None:
    for option, value in changed_options(options, TrainOptions, but=()).items():
        if option in _DATA_OPTIONS:
            raise InputError(
                f"got {'--task' if options.task else 'the built-in task'} {name} and --{option.replace('_', '-')} "
                f"{value}, want one of them: a task has rows of its own; fix: leave one out"
                f"{'' if options.task else ', or add --model'}"
            )
    if options.model is None and name not in BUILT_IN:
        raise InputError(f"got --task {name} without --model, want one to train; fix: add --model")


def as_arguments(values: dict[str, Any]) -> list[str]:
    """The values of a YAML file as the command line would have them."""
    arguments = list[str]()
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, dict):
            try:
                arguments.append(f"--{option}={json.dumps(value)}")
            except (TypeError, ValueError) as error:
                what = f"got {name} with a value that JSON does not have ({error})"
                raise InputError(f"{what}, want text or a number") from error
        elif isinstance(value, list):
            arguments += [f"--{option}", *map(str, value)]
        else:
            arguments.append(f"--{option}={value}")
    return arguments


def as_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments with each option that is True or False as the parser wants it.

    `--bf16` and `--no-bf16` need no value, though None is one of its values, and may have one, as in TRL's commands:
    `--bf16 true`, `--gradient_checkpointing False`. `--generate_ahead` was such an option, and is a number.
    """
    types, words = get_type_hints(TrainOptions), {"true": "True", "false": "False", "none": "None"}
    flags, rest = list[str](), list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_") if option.startswith("--") else ""
        is_negated = name.startswith("no_") and not equals
        name = name.removeprefix("no_") if is_negated else name
        is_number = name == "generate_ahead"
        if types.get(name) not in (bool, bool | None) and not is_number:
            flags.append(argument)
            continue
        if is_negated:
            value = "False"
        elif not equals:
            is_value = rest and (rest[0].lower() in words or (is_number and rest[0].isdecimal()))
            value = rest.pop(0) if is_value else "True"
        value, option = words.get(value.lower(), value), name.replace("_", "-")
        value = {"True": "1", "False": "0"}.get(value, value) if is_number else value
        if types[name] is not bool or value not in ("True", "False"):
            flags.append(f"--{option}={value}")
        elif value == "True" or name not in COMMANDS:
            flags.append(f"--{option}" if value == "True" else f"--no-{option}")
    return flags


def find_config(name: str) -> Path:
    """The YAML file of that path, or the packaged recipe of that name."""
    path, recipe = Path(name), RECIPES / f"{name}.yaml"  # a folder may have its name, as one of a dataset
    return recipe if recipe.is_file() and (path.is_dir() or not path.exists()) else path


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file; InputError where there is none, or an option that does not exist.

    UnsupportedError: an option of TRL's that this trainer does not have, not at its default.
    """
    if not (path.is_file() or path.is_fifo()):  # as of --config <(...)
        recipes = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.yaml")))
        raise InputError(f"got --config {path}, want a YAML file that exists, or one of these recipes: {recipes}")
    try:
        text, depth = path.read_text(encoding="utf-8"), 0
        for event in yaml.parse(text, Loader=YamlLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise InputError(f"got values {depth} levels deep, want at most {MAX_DEPTH}")
        root = yaml.compose(text, Loader=YamlLoader)
        _keep_text(root)
        values = root and YamlLoader("").construct_document(root)
    except (yaml.YAMLError, ValueError, OSError) as error:  # bytes that are no text, days that no month has
        raise InputError(f"got {path}, which is not YAML: {error}") from error
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.CollectionNode) and id(node) not in seen:  # it may contain itself
            seen.add(id(node))
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, one) for one in node.value]
            keys = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
            if twice := [key for key in keys if keys.count(key) > 1]:  # the first time in vain
                count = f"{twice[0]} {keys.count(twice[0])} times"
                raise InputError(f"got {count} in {path}, want it once; fix: leave one out")
            nodes += [one for _, one in pairs]
    if not isinstance(values, dict):
        raise InputError(f"got {path} holding {type(values).__name__}, want a mapping of option names to values")
    for name in values.keys() & MISSING.keys():
        refuse_unless_harmless(name, values.pop(name), uploads=bool(values.get("push_to_hub")))
    names = [field.name for field in own_fields(TrainOptions) if field.name != "config"]
    if unknown := sorted(values.keys() - set(names), key=str):
        raise InputError(unknown_options(unknown, names, f"in {path}"))
    return {name: _as_meant(name, value, path) for name, value in values.items()}


def _keep_text(root: Any) -> None:
    """Have text of a YAML file stay as it is written: elsewhere no is False, 010 is 8 and 1_0 is 10."""
    kinds = get_type_hints(TrainOptions)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        kind = kinds.get(key.value) if isinstance(key, yaml.ScalarNode) and key.value not in PYTHON_TYPES else None
        for node in (value, *value.value) if {str, list[str]} & {kind, *get_args(kind)} else ():
            if isinstance(node, yaml.ScalarNode) and node.tag in _TAGS_OF_TEXT:
                node.tag = f"{_TAG}str"


def _as_meant(name: str, value: Any, path: Path) -> Any:
    """A value of a YAML file, where no and off are False, and what is left empty is None."""
    kind, default = get_type_hints(TrainOptions)[name], getattr(TrainOptions, name, None)
    words = [default, *(word for one in (kind, *get_args(kind)) for word in get_args(one))]
    if value is False:
        return next((word for word in ("no", "off") if word in words), value)
    if value is None and get_origin(kind) is list:
        return []
    if value is None and not has_type(None, kind):
        raise InputError(f"got {name} without a value in {path}, want one; fix: leave it out for its default")
    return value


def _sectioned(defaults: TrainOptions, demo: dict[str, Any]) -> type:
    """A dataclass of dataclasses, one per section, since tyro groups options so; `demo` has values for the help."""
    real = TrainOptions()
    types = get_type_hints(TrainOptions)
    sections: dict[str, list[Any]] = {title: [] for title in SECTIONS.values()}
    title = ""
    for entry in own_fields(TrainOptions):
        name = entry.name
        title = SECTIONS.get(name, title)
        annotation: Any = types[name]
        if annotation == dict[str, Any] | str | None:
            annotation = Annotated[dict[str, Any] | None, JSON_OBJECT]
        elif name in COMMANDS:
            annotation = Annotated[annotation, tyro.conf.FlagCreatePairsOff]
        demos = f"; demo: {demo[name]}" if name in demo and demo[name] != getattr(real, name) else ""
        shown: dict[str, Any] = {
            "help": entry.metadata.get("help"),
            "help_behavior_hint": lambda default, demos=demos: f"(default: {default or 'none'}{demos})",
            "metavar": METAVARS.get(types[name]),
            "aliases": ALIASES.get(name),
        }
        annotation = Annotated[annotation, tyro.conf.arg(**shown)]
        sections[title].append((name, annotation, field(default_factory=partial(getattr, defaults, name))))
    groups: list[Any] = []
    for number, (title, fields) in enumerate(sections.items()):
        group = make_dataclass(f"Section{number}", fields)
        groups.append((f"section_{number}", Annotated[group, tyro.conf.arg(name=title)], field(default_factory=group)))
    return make_dataclass("Sections", groups)
