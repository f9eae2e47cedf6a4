"""Weights under their checkpoint names, and a tied head served as one of its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fused_grpo.trainer.engines import checkpoint_weights
from fused_grpo.trainer.engines.weights import Tie


@pytest.mark.parametrize("source", ["named_parameters", "state_dict"])
def test_an_untied_head_gets_the_embedding_exactly_once(build_model, source) -> None:
    model = build_model("llama", tied=True)
    weights = model.named_parameters() if source == "named_parameters" else model.state_dict().items()
    untied = list(Tie.of(model).undo(weights))
    heads = [weight for name, weight in untied if name == "lm_head.weight"]
    assert len(heads) == 1
    assert torch.equal(heads[0], model.model.embed_tokens.weight)
    assert sorted(name for name, _ in untied) == sorted(model.state_dict())


def test_a_model_with_its_own_head_has_no_tie(build_model) -> None:
    assert Tie.of(build_model("llama", tied=False)) is None


def test_checkpoint_weights_are_those_that_save_pretrained_writes(build_model, tmp_path) -> None:
    model = build_model("qwen2", tied=False)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    given = dict(checkpoint_weights(model))
    assert given.keys() == saved.keys()
    assert all(torch.equal(given[name], saved[name]) for name in saved)
