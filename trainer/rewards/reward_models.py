"""Reward models: a sequence-classification model with one label as a reward function.

It scores the text of prompt + completion, or the whole conversation in the model's own chat template, without further
special tokens. The model takes the score at the last token that is not padding, so its config needs `pad_token_id`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn

from fused_grpo.errors import InputError

BATCH_SIZE = 16  # sequences in one forward pass
_ONLY_RANK_0 = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # which Accelerate sets, for transformers


class RewardModel:
    """A reward function that returns the scores of a model.

    Args:
        model: a sequence-classification model of transformers, with one label.
        processing_class: its tokenizer. None: the tokenizer saved with the model.
        device: the model is moved to this device. None, or loaded with a device map: it stays where it is.
        chat_template_kwargs: variables for the chat template, in conversations.
        trust_remote_code: run tokenizer code that comes with the model.
        revision: of the tokenizer saved with the model.

    Raises:
        InputError: there is no tokenizer with the model, or it has no padding token.
    """

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any = None,
        *,
        device: torch.device | str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        revision: str = "main",
    ) -> None:
        from transformers import AutoTokenizer

        config: Any = getattr(model, "config", None)
        source = str(getattr(config, "_name_or_path", ""))
        self.__name__ = source.rstrip("/").split("/")[-1] or type(model).__name__
        if processing_class is None:
            if not source:
                raise InputError(
                    f"got the reward model {self.__name__} without a path and no tokenizer; "
                    "fix: pass reward_processing_classes=<tokenizer>"
                )
            options = {"trust_remote_code": trust_remote_code, "revision": revision}
            processing_class = AutoTokenizer.from_pretrained(source, **options)
        if processing_class.pad_token_id is None:
            if processing_class.eos_token is None:
                raise InputError(f"got a tokenizer of the reward model {self.__name__} that has no padding token")
            processing_class.pad_token = processing_class.eos_token
        if config is not None:
            config.get_text_config().pad_token_id = processing_class.pad_token_id
        stays = device is None or getattr(model, "hf_device_map", None)
        self.model = model.eval() if stays else model.eval().to(device)
        self.tokenizer, self.template_options = processing_class, dict(chat_template_kwargs or {})

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """The model's score of each completion."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        return [
            score
            for start in range(0, len(texts), BATCH_SIZE)
            for score in self._scores(texts[start : start + BATCH_SIZE])
        ]

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        messages = [*prompt, *completion]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template_options))

    @torch.inference_mode()
    def _scores(self, texts: list[str]) -> list[float]:
        device = next(self.model.parameters()).device
        encoded = self.tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(device)
        scores: list[float] = self.model(**encoded).logits[:, 0].float().tolist()
        return scores


def load_reward_model(
    name: str,
    processing_class: Any = None,
    *,
    trust_remote_code: bool = False,
    model_init_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> RewardModel:
    """A reward model from a path or hub id, with the `options` of `RewardModel`.

    `model_init_kwargs` are for `from_pretrained`, as in TRL those of the policy; the tokenizer has the same revision.

    Raises:
        InputError: there is no such model, or its score layer has no trained weights.
    """
    from transformers import AutoModelForSequenceClassification

    given = {**(model_init_kwargs or {}), "trust_remote_code": trust_remote_code}
    try:
        # Under FSDP, rank 0 may be the only one to read weights: the others would have zeros, and nothing shards these.
        with patch_environment(**{_ONLY_RANK_0: ""}):
            del os.environ[_ONLY_RANK_0]  # until the end of the block
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1, output_loading_info=True, **given
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"got reward {name!r}, which names no function (module:name, module.name or path.py:name) "
            f"and no model with one score that can be loaded: {error}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"got the reward model {name!r} without trained weights for {', '.join(missing)}, "
            "want a sequence-classification model with one label"
        )
    options |= {"trust_remote_code": trust_remote_code, "revision": given.get("revision", "main")}
    return RewardModel(model, processing_class, **options)
