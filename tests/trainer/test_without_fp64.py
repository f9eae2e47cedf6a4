"""A step on a device without fp64 (Apple's MPS): no tensor is fp64, and the step is the same but for rounding.

The stand-in is the CPU without its fp64: what such a device leaves to the CPU, sums and a quantile, is exempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fused_grpo import _loss_inputs, precision
from fused_grpo.trainer import learner

RUNS = {
    "dapo": {},
    "grpo by sequence, with a reference": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "vespo": {"loss_type": "vespo"},
    "entropies, drift": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "off_policy_mask_threshold": 1.0},
    "a sequence's correction": {"vllm_importance_sampling_mode": "sequence_truncate"},
}


class NoFP64(TorchDispatchMode):
    """Raises where an op returns an fp64 tensor, as MPS does."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            raise TypeError(f"{function}: Cannot convert a MPS Tensor to float64 dtype")
        return result


@contextlib.contextmanager
def without_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def on_the_cpu(function: Any) -> Any:
        def call(*arguments: Any) -> torch.Tensor:
            with _disable_current_modes():
                return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(precision, "has_fp64", lambda device: False)
        patch.setattr(_loss_inputs, "has_fp64", lambda device: False)
        patch.setattr(_loss_inputs, "_sums", on_the_cpu(_loss_inputs._sums))
        patch.setattr(learner, "quantile", on_the_cpu(learner.quantile))
        with NoFP64():
            yield


@pytest.mark.parametrize("name", RUNS)
def test_a_step_makes_no_fp64_tensor_on_the_device(make_trainer, monkeypatch, name):
    losses = []
    for limited in (False, True):
        trainer = make_trainer(**RUNS[name], max_steps=1)
        learn = trainer.learner.learn

        def learning(batch, learn=learn, limited=limited, **options):
            with without_fp64(monkeypatch) if limited else contextlib.nullcontext():
                return learn(batch, **options)

        trainer.learner.learn = learning
        losses.append(trainer.train().metrics)
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], abs=1e-6)
    assert losses[1]["grad_norm"] == pytest.approx(losses[0]["grad_norm"], rel=1e-5)


def test_the_stand_in_finds_what_it_is_for(monkeypatch):
    assert not precision.has_fp64(torch.device("mps"))
    with without_fp64(monkeypatch), pytest.raises(TypeError, match="MPS"):
        torch.ones(2).double()
