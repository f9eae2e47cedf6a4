"""What a run needs to resume, beside the weights: docs/checkpoints.md lists the files. The weights are read here too.

Tensors, numbers and strings: nothing is pickled. Weights keep their own dtype, bit for bit, under the configuration of
this run's model. Before anything is used, it is compared with the state that this run has in its place: `check_alike`
for JSON, `check_tensors` for tensors, so that what PyTorch, an optimizer or a stream keep needs no list here. What no
pattern shows, `check_cursors` and `check_rollouts` derive from the options.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerState
from transformers.core_model_loading import revert_weight_conversion

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.batching.rollout_buffer import RolloutBuffer, as_tensors, from_tensors, without_prefix
from fused_grpo.trainer.checkpoint.checkpoint import STATE_FILE, open_regular, read_json, read_manifest, refuse_unusable
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.engines.checked_engine import wrong_completion, wrong_logprob, wrong_tokens
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, adapter_path, adapter_tensors, is_adapted

_log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
PROCESS_FILE = "process-{rank}.safetensors"
TRAINING_FILE = "training.json"
EVALUATIONS = ("eval_before", "eval_after")
WINDOWS = ("unlogged", "unshown")  # metrics since the last entry of the log, and since the last line of the console

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
Tensors = Mapping[str, Tensor]
_WITHIN_A_CALL = ("_is_initial", "_get_lr_called_within_step")  # when torch sets them, of a schedule
_GROUP = re.compile(r"(random|prefetched(?:\.\d+)?|buffer\.\d+)\.(.*)", re.DOTALL)


@dataclass(frozen=True)
class TrainingFiles:
    """A training state to be saved: the content of training.json, and tensors by file name."""

    numbers: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for named in self.tensors.values() for tensor in named.values())

    def __call__(self, directory: Path) -> None:
        """Write them into `directory`, except for files that would hold no tensors."""
        for name, named in self.tensors.items():
            if named:
                save_file({key: value.detach().contiguous().clone() for key, value in named.items()}, directory / name)
        names = {name: sorted(named) for name, named in self.tensors.items()}
        text = json.dumps({**self.numbers, "tensors": names})  # a curriculum's window may have millions of numbers
        (directory / TRAINING_FILE).write_text(text + "\n", encoding="utf-8")


def read_numbers(directory: Path, max_steps: int) -> dict[str, Any]:
    """The content of training.json, which `check_numbers` compares with the run.

    CheckpointError without one, or where it is of a later step than `max_steps`.
    """
    path = directory / TRAINING_FILE
    if not path.exists():
        raise CheckpointError(
            f"got {directory}, a checkpoint of a model alone; want one with its training state; "
            "fix: resume from another, save without save_only_model, or pass it as the model of a new run"
        )
    with refuse_unusable(directory, TRAINING_FILE):
        numbers: dict[str, Any] = {"unshown": {}, "eval_after": None} | read_json(path)  # older versions have none
        mappings = {name: dict[str, Any]() for name in ("run", "buffers", "tensors", "options", *WINDOWS)}
        check_alike({"step": 0, **mappings}, numbers, "content", exact=True)
        for window in WINDOWS:  # older versions have lists of values there, of which the next entry does without
            numbers[window] = {name: sums for name, sums in numbers[window].items() if not isinstance(sums, list)}
        if numbers["step"] > max_steps:
            raise CheckpointError(
                f"got {directory} of step {numbers['step']}, want one of max_steps={max_steps} at most; "
                "fix: a larger max_steps, or an earlier checkpoint"
            )
    return numbers


@contextmanager
def tensors_of(directory: Path, name: str, names: dict[str, list[str]] | None = None) -> Iterator[dict[str, Any]]:
    """Around the use of the tensors of one file; none where there is no such file, which may be where there are none.

    CheckpointError where the file cannot be read, does not have the tensors that it had when it was saved (`names`), or
    cannot be used: any error in the body of the `with`.
    """
    with refuse_unusable(directory, name):
        tensors = dict[str, Tensor]()
        if (directory / name).exists():
            open_regular(directory / name).close()
            tensors = load_file(directory / name)
        for other in tensors.keys() ^ (tensors if names is None else names.get(name, [])):
            raise ValueError(f"{other!r} is {'unknown' if other in tensors else 'missing'}")
        yield tensors


def by_group(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """Those of a rank's file by their group: "random", those of `prefetched_group`, and "buffer.<n>" of the buffer."""
    groups: dict[str, dict[str, Tensor]] = {"random": {}}
    for name, tensor in tensors.items():
        if match := _GROUP.match(name):
            groups.setdefault(match[1], {})[match[2]] = tensor
    return groups


def prefetched_group(number: int) -> str:
    """The group of a batch that is in flight: "prefetched", "prefetched.1", ..."""
    return f"prefetched.{number}" if number else "prefetched"


def read_weights(model: Any, checkpoint: Path) -> dict[str, Any]:
    """The full weights, under the policy's names, or the adapter; CheckpointError where they do not fit the model."""
    if is_adapted(model):
        return read_adapter(model, checkpoint)
    saved, own = dict[str, Tensor](), model.state_dict()
    for name in sorted(read_manifest(checkpoint)):
        if fnmatch(name, "model*.safetensors"):
            with tensors_of(checkpoint, name) as shard:
                saved |= shard
    with refuse_unusable(checkpoint, "model.safetensors"):
        _check_dtypes(model, own, saved)
        # transformers maps the names of a checkpoint to those of its models. It gives all weights one dtype: here one
        # that holds them all exactly, so that each can have its own again.
        load: Any = type(model).from_pretrained
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in model.parameters()))
        loaded, report = load(None, config=model.config, state_dict=saved, dtype=dtype, output_loading_info=True)
        if wrong := sorted(str(name) for problem in report.values() for name in problem):
            raise ValueError(f"{wrong[0]} is missing, unknown or of another shape")
        for name, weight in loaded.named_parameters():
            if not weight.isfinite().all():
                raise ValueError(f"{name} is not finite")
        return {f"model.{name}": value.to(own[name].dtype) for name, value in loaded.state_dict().items()}


def _check_dtypes(model: Any, own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise ValueError where a saved weight has another dtype than this run would save it with."""
    # A checkpoint may have other names for them, and other shapes; on "meta" they take no memory.
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in own.items()}
    for name, value in revert_weight_conversion(model, empty).items():
        if name in saved and saved[name].dtype != value.dtype:
            raise ValueError(f"it has {saved[name].dtype} as {name!r}, where this run has {value.dtype}")


def read_trainer_state(checkpoint: Path, step: int) -> TrainerState:
    """transformers' state of the run at `step`, its log and its best metric; CheckpointError where it is of another.

    Fields that this version of transformers does not have are left out.
    """
    fresh = asdict(TrainerState())
    with refuse_unusable(checkpoint, STATE_FILE):
        saved = read_json(checkpoint / STATE_FILE)
        check_alike({name: fresh[name] for name in fresh.keys() & {*saved, "global_step", "epoch"}}, saved, "content")
        best = {"best_metric": -math.inf, "best_global_step": 0, "best_model_checkpoint": ""}  # a metric has any sign
        check_alike({name: best[name] for name in best if saved.get(name) is not None}, saved, "content")
        if saved["global_step"] != step or not all(isinstance(entry, dict) for entry in saved["log_history"]):
            raise ValueError(f"global_step is {saved['global_step']}, want {step}, and log_history a list of entries")
        state = TrainerState(**{name: saved[name] for name in fresh.keys() & saved.keys()})
    if (named := state.best_model_checkpoint) is not None:
        # Beside the checkpoint: a run that was moved or copied has its own there.
        places = (place for place in (checkpoint.absolute().parent / Path(named).name, Path(named)) if place.is_dir())
        state.best_model_checkpoint = str(folder) if (folder := next(places, None)) is not None else None
        if folder is None:
            _log.warning("the best checkpoint, %s, does not exist any more", named)
    return state


def read_adapter(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    """The adapter of a checkpoint, for `load_adapter`; CheckpointError where there is none, or it does not fit."""
    path = adapter_path(model, checkpoint)
    if not path.is_file():
        raise CheckpointError(
            f"got {checkpoint}, which has no {ADAPTER_FILE}, to resume a run with an adapter; want a checkpoint of "
            "such a run; fix: resume without peft_config"
        )
    with tensors_of(path.parent, path.name) as saved:
        check_tensors(adapter_tensors(model), saved)
    return saved


def model_state(model: nn.Module, *, full: bool = True) -> dict[str, Tensor]:
    """The full state dict of a model. A collective; only rank 0 gets it. Without `full`, as in `optimizer_state`."""
    state: dict[str, Any] = get_model_state_dict(model, options=FULL if full else None)
    return state


def random_state(python: Any = random, numpy: Any = np.random, cpu: Any = torch.default_generator) -> dict[str, Tensor]:
    """The generators of Python, NumPy and torch (CPU, and this process' GPU), as tensors."""
    version, words, gauss = python.getstate()
    legacy: Any = numpy.get_state(legacy=False)
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor([legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]], dtype=torch.float64),
        "torch": cpu.get_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """The inverse of `random_state`; an error of any kind where it is no state of these generators.

    Generators of its own are compared with it: threads (websockets' pings) draw from the global ones at any moment.
    """
    if other := {name for name in state.keys() ^ random_state().keys() if name != "cuda"}:
        raise ValueError(f"{min(other)} is missing or unknown")
    if not all(tensor.isfinite().all() for tensor in state.values()):
        raise ValueError("a value that is not finite")
    own = random.Random(), np.random.RandomState(), torch.Generator()
    _set_generators(state, *own)
    for name, value in random_state(*own).items():
        if name != "cuda" and (value.dtype != state[name].dtype or not torch.equal(value, state[name])):
            raise ValueError(f"{name} is no state of that generator")
    _set_generators(state, random, np.random, torch.default_generator)
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
        if not torch.equal(torch.cuda.get_rng_state(), state["cuda"]):
            raise ValueError("cuda is no state of that generator")


def _set_generators(state: dict[str, Tensor], python: Any, numpy: Any, cpu: Any) -> None:
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    python.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy_rest"].tolist()
    if not 0 <= position <= 624:  # NumPy reads its key there without a check
        raise ValueError(f"position {position} of NumPy's generator")
    key = state["numpy_key"].numpy().astype(np.uint32)
    numpy.set_state(("MT19937", key, int(position), int(has_gauss), cached))
    cpu.set_state(state["torch"])


def check_alike(own: Any, saved: Any, path: str, *, exact: bool = False, counts: bool = False) -> Any:
    """Compare saved values with what this run has in their place: keys, lengths, kinds of values.

    Nothing is known of what is None or empty here. Flags may be missing, which a later version of PyTorch has added.
    With `exact`, ints are counts; what something `counts` may have any sign, and its lists any length. TypeError for
    another form, a number that is not finite, or a negative one where this run's is not.

    Returns what this run would have saved in its place: no other name is loaded into its objects.
    """
    if own is None:
        return None if isinstance(saved, dict | list) else saved
    if saved is None and isinstance(own, bool):
        return None
    options = {"exact": exact, "counts": counts}
    if isinstance(own, dict) and isinstance(saved, dict):
        entries = {name: saved.get(name, saved.get(str(name))) for name in own}  # JSON has no numbers as names
        checked = {name: check_alike(own[name], value, f"{path}.{name}", **options) for name, value in entries.items()}
        return {name: value for name, value in checked.items() if own[name] is None or value is not None}
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        if len(own) not in (0, len(saved)) and not (counts and isinstance(own, list)):
            raise TypeError(f"{path} has {len(saved)} values, want {len(own)}")
        pairs = enumerate(zip(own, saved, strict=False))
        values = [check_alike(*pair, f"{path}[{index}]", **options) for index, pair in pairs]
        return saved if len(values) != len(saved) else tuple(values) if isinstance(own, tuple) else values
    if isinstance(own, Tensor) and isinstance(saved, Tensor):
        check_tensors({path: own}, {path: saved})
    elif is_number(own) and is_number(saved):
        largest = 2**53 if own <= 2**53 else 2**128  # where a stream has a generator's state
        whole = not (exact and isinstance(own, int)) or (isinstance(saved, int) and saved <= largest)
        if not whole or not (counts or (math.isfinite(saved) and saved >= min(own, 0))):
            raise TypeError(f"{path} is {saved}")
    elif not isinstance(own, str | bool) or type(own) is not type(saved):
        raise TypeError(f"{path} is {reprlib.repr(saved)}, want a value such as {reprlib.repr(own)}")
    return saved


def check_tensors(own: Tensors, saved: Tensors) -> None:
    """ValueError for a name, shape or dtype other than this run's, or a value that is not finite where its are."""
    for name in sorted(own.keys() | saved.keys()):
        got, want = (_form(tensors.get(name)) for tensors in (saved, own))
        if got != want:
            raise ValueError(f"{name!r} is {got}, where this run has {want}")
        if saved[name].is_floating_point() and not saved[name].isfinite().all() and own[name].isfinite().all():
            raise ValueError(f"{name!r} is not finite")
        if name.startswith("optimizer.") and "_sq" in name.rpartition(".")[2] and (saved[name] < 0).any():
            raise ValueError(f"{name!r} has negative squares")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_numbers(numbers: dict[str, Any], own: dict[str, Any], stream_form: Any) -> dict[str, Any]:
    """Of the content of training.json what this run would save there; KeyError or TypeError where it is not that."""
    checked: dict[str, Any] = check_alike(own, numbers, "content", exact=True)
    place = numbers["collector"]["sampler"]
    stream_form = None if place.get("stream") is None else stream_form
    check_alike({"stream": stream_form}, place, "content.collector.sampler", exact=True)
    for name in EVALUATIONS:
        _check_log(name, {} if numbers[name] is None else numbers[name])
    for window in WINDOWS:
        for name, sums in numbers[window].items():
            check_alike({"total": -math.inf, "count": 0}, sums, f"{window}.{name}", exact=True)
    return checked


def _check_log(name: str, log: Any) -> None:
    if not isinstance(log, dict) or not all(value is None or is_number(value) for value in log.values()):
        raise TypeError(f"{name} is {reprlib.repr(log)}, want numbers")


def check_cursors(numbers: dict[str, Any], epoch: float, learner: Any) -> None:
    """Raise ValueError where numbers do not follow from one another: steps, batches, prompts and epochs."""
    args, processes, step, skips = learner.args, learner.accelerator.num_processes, numbers["step"], numbers["skipped"]
    prompts = args.prompts_per_generation(processes)
    steps = args.optimizer_steps_per_generation(processes) * args.num_iterations
    calls, place = numbers["collector"]["generate_calls"], numbers["collector"]["sampler"]
    used, rows = place["prompts"], place["num_prompts"]
    schedule, beginning = numbers["scheduler"], learner.beginning[1]
    # Where a callback has left out the rest of an epoch, its prompts were too, and those of the next in its last batch.
    saved = numbers["buffers"]["0"]
    waiting = 0.0 if saved is None else prompts * (1 - saved["done"] / steps)
    learned = calls * prompts if rows is None else round(epoch * rows + waiting)
    jumped = rows is not None and epoch > step * prompts / steps / rows + 1e-6
    counters = ("last_epoch", *["_step_count"] * (type(learner.scheduler).step is LRScheduler.step))
    consistent = {
        "skipped": skips["in_a_row"] <= skips["total"] <= step,
        "scheduler": all(
            name not in beginning or schedule[name] - beginning[name] == step - skips["total"] for name in counters
        )
        and all(schedule.get(name, value) == value for name, value in beginning.items() if name in _WITHIN_A_CALL),
        "epoch": rows is None or epoch <= math.ceil(used / rows) + 1e-6,
        "generate_calls": calls * steps >= step and calls <= used,
        "prompts": used >= learned and (jumped or used in (learned, calls * prompts)),
        "prompts_of_pass": max(place.get("prompts_of_pass", 0), place.get("pass", 0)) <= used + place.get("dropped", 0),
        "buffers": numbers["buffers"].keys() == {str(rank) for rank in range(processes)}
        and len({saved is None for saved in numbers["buffers"].values()}) == 1,
    }
    for name, is_so in consistent.items():
        if not is_so:
            raise ValueError(f"{name} cannot be that of step {step}")


def check_rollouts(
    groups: dict[str, dict[str, Tensor]], saved: Any, learner: Any, *, step: int
) -> list[dict[str, Tensor]]:
    """Check the rollouts of a rank, those in progress and those that were prefetched: that they can be trained on.

    Raises an error of any kind where something is missing, unknown, of another form or out of its range. `saved` is
    what training.json says of the rollouts in progress. None: there are none. Returns the prefetched ones.
    """
    parts = {group: part for group, part in groups.items() if group != "random" and part}
    args, processes = learner.args, learner.accelerator.num_processes
    steps = args.optimizer_steps_per_generation(processes)
    size = args.per_device_train_batch_size * args.micro_batches_per_generation(processes)
    prefetched = [parts[name] for name in map(prefetched_group, range(len(parts))) if name in parts]
    buffers = parts.keys() - set(map(prefetched_group, range(len(prefetched))))
    if buffers != {f"buffer.{index}" for index in range(0 if saved is None else steps)}:
        raise ValueError(f"it has {sorted(parts)}, want {0 if saved is None else steps} batches in progress")
    if saved is not None:
        check_alike(RolloutBuffer([], 1, 0).state()[0], saved, "buffer", exact=True)
        total = steps * args.num_iterations
        if saved["batches"] * saved["iterations"] != total or saved["batches"] != steps or saved["done"] >= total:
            raise ValueError(f"{saved} is no part of {steps} batches and {total} steps")
        if saved["done"] and "old_logprobs.values" not in parts[f"buffer.{saved['done'] % steps}"]:
            raise ValueError("the log-probs of the policy that sampled the next batch are missing")
        _check_log("metrics", saved["metrics"])
    for group, table in parts.items():
        part, greedy = without_prefix(table)
        _check_sequences(part, group, learner)
        if greedy:
            _check_sequences(greedy, f"{group}.greedy", learner)
        oldest, versions = saved["weight_version"] if group in buffers else 0, part["weight_version"]
        if group not in buffers and len(versions) != size:
            raise ValueError(f"{group} has {len(versions)} samples, want {size}")
        if ((versions < oldest) | (versions > step)).any():
            raise ValueError(f"{group}.weight_version is not one from {oldest} to {step}, which sampled the batch")
    return prefetched


def _check_sequences(part: dict[str, Tensor], group: str, learner: Any) -> None:
    """The samples of a table are checked as an engine's are, and the table is the one that would be saved of them."""
    samples = from_tensors(part)
    torch.testing.assert_close(part, as_tensors(samples), rtol=0, atol=0, equal_nan=True)
    for sample in samples:
        wrong = wrong_tokens(sample.prompt_ids, learner.vocab_size)
        if sample.completion_ids or sample.failure is None:
            size = learner.vocab_size
            wrong = wrong or wrong_completion(sample, learner.routers, vocab_size=size, nan_allowed=True)
        # The policy and the reference have seen only what goes through the model.
        allowed = {sample.num_own} if sample.in_forward else {0, sample.num_own}
        for values in (sample.old_logprobs, sample.ref_logprobs):
            if values is not None and (len(values) not in allowed or wrong_logprob(values.tolist())):
                wrong = wrong or "log-probs that no policy gives"
        advantages = sample.token_advantages
        if advantages is not None and not (len(advantages) == sample.num_own and advantages.isfinite().all()):
            wrong = wrong or "advantages of other tokens than it has"
        if wrong or not math.isfinite(sample.advantage) or math.isinf(sample.reward) or sample.weight_version < 0:
            raise ValueError(f"{group} has {wrong or 'a number that no run leaves'}")
