"""Whether a saved training state is one that this run could have saved, checked before anything of it is used.

The pattern is the state that this run has: `check_alike` for JSON, `check_tensors` for tensors, so that what PyTorch,
an optimizer or a stream keep needs no list here. What no pattern shows, `check_cursors` and `check_rollouts` derive
from the options: numbers that follow from one another, and rollouts that the model can be trained on.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.batching.rollout_buffer import DTYPES, RolloutBuffer, rows_from_tensors
from fused_grpo.trainer.engines.sampling import Support, wrong_support

Tensors = Mapping[str, Tensor]
OF = " of "  # "exp_avg of model.lm_head.weight"
# Fields that earlier versions did not save, or that are only saved where they are not 0.
_OPTIONAL = ("num_tokens", "dropped", "options", "unlogged", "tensors")
_LARGEST = torch.finfo(torch.float32).max
_LOGPROB = (-_LARGEST, 1e-3)  # fp32 rounds to a little above 0
# Of each tensor of rollouts: its dtype, and the range of its values.
_FORMS: dict[str, tuple[torch.dtype, tuple[float, float]]] = {
    **{f"{name}.lengths": (torch.int64, (0, _LARGEST)) for name in DTYPES},
    **{f"{name}.values": (dtype, _LOGPROB if "logprobs" in name else (0, _LARGEST)) for name, dtype in DTYPES.items()},
    **dict.fromkeys(("advantages", "rewards"), (torch.float32, (-_LARGEST, _LARGEST))),
    **dict.fromkeys(("in_loss", "skipped"), (torch.bool, (0, 1))),
    **dict.fromkeys(("numbers", "failed"), (torch.int64, (0, _LARGEST))),
    "finish_reasons": (torch.int64, (0, 1)),
}
# NaN is the log-prob of a user's function that does not know it, and the reward of what was not scored.
_UNKNOWN = ("sampling_logprobs.values", "rewards")
_PART = re.compile(r"(prefetched|buffer\.\d+)\.(.*)")


def check_alike(here: Any, saved: Any, where: str, *, exact: bool = False, signed: bool = False) -> None:
    """Compare saved JSON with what this run has in its place: keys, lengths, kinds of values.

    Nothing is known of what is None or empty here. Flags may be missing, which a later version of PyTorch has added.
    With `exact`, ints are counts. Numbers are not negative where this run's are not, but for `signed` ones.

    Raises:
        TypeError: it is of another form, or a number is not finite or out of range.
    """
    if here is None or (saved is None and isinstance(here, bool)):
        return
    if isinstance(here, dict) and isinstance(saved, dict):
        for name in [name for name in here if name in saved or name not in _OPTIONAL]:
            check_alike(here[name], saved.get(name), f"{where}.{name}", exact=exact, signed=signed)
    elif isinstance(here, list | tuple) and isinstance(saved, list) and len(here) in (0, len(saved)):
        for index, value in enumerate(here):
            check_alike(value, saved[index], f"{where}[{index}]", exact=exact)
    elif is_number(here) and is_number(saved):
        whole = not (exact and isinstance(here, int)) or (isinstance(saved, int) and saved <= 2**53)
        if not math.isfinite(saved) or not whole or (saved < min(here, 0) and not signed):
            raise TypeError(f"{where} is {saved}")
    elif not isinstance(here, str | bool) or type(here) is not type(saved):
        raise TypeError(f"{where} is {reprlib.repr(saved)}, want a value such as {reprlib.repr(here)}")


def check_tensors(here: Tensors, saved: Tensors, *, stateless: frozenset[str] = frozenset()) -> None:
    """Compare tensors with those of this run: names, shapes and dtypes; all values are finite.

    Raises:
        ValueError: the first that differs; those of `stateless` parameters may be missing.
    """
    for name in sorted(here.keys() | saved.keys()):
        if name.partition(OF)[2] in stateless and name not in saved:
            continue
        if form(saved.get(name)) != form(here.get(name)):
            raise ValueError(f"{name!r} is {form(saved.get(name))}, where this run has {form(here.get(name))}")
        if saved[name].is_floating_point() and not saved[name].isfinite().all():
            raise ValueError(f"{name!r} is not finite")
        if "_sq" in name.partition(OF)[0] and (saved[name] < 0).any():
            raise ValueError(f"{name!r} has negative squares")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def form(tensor: Tensor | None) -> str:
    """Dtype and shape."""
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_optimizer_state(
    own: tuple[dict[str, Tensor], dict[str, Any]], tensors: dict[str, Tensor], saved: Any, *, partial: bool
) -> list[str]:
    """Compare the state of an optimizer with this run's. Returns its hyperparameters that differ.

    Args:
        own, tensors, saved: as `optimizer_state` returns them, of this run and of the checkpoint.
        partial: parameters may have no state at all, as those that never had a gradient.

    Raises:
        TypeError, ValueError: another form, or a number that no step leaves.
    """
    groups, of_parameters, differ = json.loads(json.dumps(own[1]["param_groups"])), own[1]["state"], list[str]()
    names = {name.partition(OF)[2] for name in (*own[0], *of_parameters)}
    stateless = frozenset(names - {name.partition(OF)[2] for name in (*tensors, *saved["state"])} if partial else ())
    check_tensors(own[0], tensors, stateless=stateless)
    expected = {name: value for name, value in of_parameters.items() if name.partition(OF)[2] not in stateless}
    check_alike({"param_groups": groups, "state": expected}, saved, "optimizer")
    for here, there in zip(groups, saved["param_groups"], strict=True):
        if here["params"] != there["params"] or not all(0 <= beta < 1 for beta in there.get("betas", ())):
            raise ValueError(f"a group of parameters has others, or betas={there.get('betas')}")
        for name in sorted(here.keys() & there.keys() - {"lr", "params"}):
            if here[name] != there[name]:
                values = f"{reprlib.repr(there[name])} in the checkpoint, {reprlib.repr(here[name])} now"
                differ.append(f"{name} of the optimizer: {values}; the checkpoint's counts: it is loaded")
    return differ


def check_numbers(numbers: dict[str, Any], here: dict[str, Any], stream_form: Any) -> None:
    """Raise KeyError or TypeError where the content of training.json is not what this run would save there."""
    check_alike(here, numbers, "content", exact=True)
    place = numbers["collector"]["sampler"]
    form_of_place = {"dropped": 0, "stream": None if place.get("stream") is None else stream_form}
    check_alike(form_of_place, place, "content.collector.sampler", exact=True)
    _check_log("eval_before", {} if numbers["eval_before"] is None else numbers["eval_before"])
    for name, values in numbers.get("unlogged", {}).items():
        _check_log(f"unlogged.{name}", dict(enumerate(values)))


def _check_log(where: str, log: Any) -> None:
    if not isinstance(log, dict) or not all(value is None or is_number(value) for value in log.values()):
        raise TypeError(f"{where} is {reprlib.repr(log)}, want numbers")


def check_cursors(numbers: dict[str, Any], epoch: float, learner: Any) -> None:
    """Raise ValueError where numbers do not follow from one another: steps, batches, prompts and epochs."""
    args, processes, step, skips = learner.args, learner.accelerator.num_processes, numbers["step"], numbers["skipped"]
    prompts = args.prompts_per_generation(processes)
    steps = args.optimizer_steps_per_generation(processes) * args.num_iterations
    calls, place = numbers["collector"]["generate_calls"], numbers["collector"]["sampler"]
    used, rows = place["prompts"], place["num_prompts"]
    schedule = numbers["scheduler"].get("last_epoch", 0) - learner.beginning[1].get("last_epoch", 0)
    # Where a callback has left out the rest of an epoch, its prompts were left out too.
    jumped = rows is not None and epoch > step * prompts / steps / rows + 1e-6
    consistent = {
        "skipped": skips["in_a_row"] <= skips["total"] <= step,
        "scheduler.last_epoch": schedule == step - skips["total"] or "last_epoch" not in learner.beginning[1],
        "epoch": rows is None or epoch <= math.ceil(used / rows) + 1e-6,
        "generate_calls": calls * steps >= step,
        "prompts": used >= calls * prompts and (jumped or used == calls * prompts),
        "prompts_of_pass": max(place.get("prompts_of_pass", 0), place.get("pass", 0)) <= used + place.get("dropped", 0),
        "buffers": numbers["buffers"].keys() == {str(rank) for rank in range(processes)}
        and len({saved is None for saved in numbers["buffers"].values()}) == 1,
    }
    for name, is_so in consistent.items():
        if not is_so:
            raise ValueError(f"{name} cannot be that of step {step}")


def check_rollouts(tensors: dict[str, Tensor], saved: Any, learner: Any, vocab_size: int) -> None:
    """Check the rollouts of a rank, those in progress and those that were prefetched: that they can be trained on.

    Args:
        tensors: those of `process-<rank>.safetensors`.
        saved: what training.json says of the rollouts in progress. None: there are none.

    Raises:
        KeyError, TypeError, ValueError: something is missing, unknown, of another form or out of its range.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for match, tensor in ((_PART.match(name), tensor) for name, tensor in tensors.items()):
        if match:
            parts.setdefault(match[1], {})[match[2]] = tensor
    steps = learner.args.optimizer_steps_per_generation(learner.accelerator.num_processes)
    if parts.keys() - {"prefetched"} != {f"buffer.{index}" for index in range(0 if saved is None else steps)}:
        raise ValueError(f"it has {sorted(parts)}, want {0 if saved is None else steps} batches in progress")
    if saved is not None:
        check_alike(RolloutBuffer([], 1, 0).state()[0], saved, "buffer", exact=True)
        total = steps * learner.args.num_iterations
        if saved["batches"] * saved["iterations"] != total or saved["batches"] != steps or saved["done"] >= total:
            raise ValueError(f"{saved} is no part of {steps} batches and {total} steps")
        if saved["done"] and "old_logprobs.values" not in parts[f"buffer.{saved['done'] % steps}"]:
            raise ValueError("the log-probs of the policy that sampled the next batch are missing")
        _check_log("metrics", saved["metrics"])
    for where, part in parts.items():
        _check_sequences(part, where, vocab_size)


def _check_sequences(part: dict[str, Tensor], where: str, vocab_size: int) -> None:
    for name, tensor in part.items():
        dtype, (low, high) = _FORMS[name]
        high = vocab_size - 1 if name.endswith("_ids.values") else high
        in_range = (tensor >= low) & (tensor <= high) | (tensor.isnan() & (name in _UNKNOWN))
        if tensor.dtype != dtype or tensor.dim() != 1 or not in_range.all():
            raise ValueError(f"{where}.{name} is {form(tensor)}, want {dtype} from {low} to {high}")
    lengths, of_prompts = part["completion_ids.lengths"], part["prompt_ids.lengths"]
    # The policy and the reference have seen only what goes through the model.
    unseen = ~part.get("in_loss", lengths >= 0) | part.get("skipped", lengths < 0)
    for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs", "support_sizes"):
        got = part.get(f"{name}.lengths", lengths)
        left_out = unseen & (got == 0) if name in ("old_logprobs", "ref_logprobs") else lengths < 0
        if not torch.equal(got, torch.where(left_out, 0, lengths)):
            raise ValueError(f"{where}.{name} is not a value for each token")
    counts = {
        len(part[name]) for name in ("advantages", "rewards", "in_loss", "skipped", "finish_reasons") if name in part
    }
    per_prompt = int(part["numbers"][0]) if "numbers" in part else 1
    if counts != {len(lengths)} or len(of_prompts) * per_prompt != len(lengths):
        raise ValueError(f"{where} is not a value for each completion, and {per_prompt} completion(s) for each prompt")
    if (of_prompts < 1).any() or (not len(part.get("failed", ())) and (lengths < 1).any()):
        raise ValueError(f"{where} has an empty sequence")
    rows = rows_from_tensors(part)
    supports = map(Support, rows.get("support_ids", ()), rows.get("support_sizes", ()))
    for support, tokens in zip(supports, rows["completion_ids"], strict=False):
        if tokens and (wrong := wrong_support(support, tokens, vocab_size)):
            raise ValueError(f"{where} has {wrong}")
