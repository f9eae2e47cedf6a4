"""Whatever an optimizer keeps comes back; what could not be used is refused before anything is sampled."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft.optimizers.lorafa import LoraFAOptimizer
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer.checkpoint.optimizer_states import pack, unpack
from fused_grpo.trainer.checkpoint.resume import restore
from fused_grpo.trainer.models.loading import check_gradients


class Keeps(Optimizer):
    """Descends, and keeps `kept` of the number of the step for each parameter and each group."""

    kept: Any

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "kept": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["kept"] = group["kept"] = self.kept(state["count"], parameter)
                parameter.sub_(group["lr"] * parameter.grad * state["count"])


def keeping(kept: Callable[[int, Tensor], Any]) -> type[Keeps]:
    return type("KeepsMore", (Keeps,), {"kept": staticmethod(kept)})


def half(parameter: Tensor) -> Tensor:
    """Of another dtype and shape than its parameter."""
    return parameter.detach().flatten()[:3].half() + 0.1


KEPT: dict[str, Callable[[int, Tensor], Any]] = {
    "None, which becomes a tensor": lambda step, one: None if step < 2 else torch.tensor(0.1, dtype=torch.float64),
    "text": lambda step, one: "warm",
    "a flag": lambda step, one: step > 1,
    "a negative number": lambda step, one: 0.0 if step < 2 else -0.1 * step,
    "a number without end": lambda step, one: float("inf"),
    "a list that grows": lambda step, one: [half(one) * n for n in range(step)],
    "a list of lists and texts": lambda step, one: [[step, "a"], [], [None]],
    "a tuple": lambda step, one: (step, half(one), (), (True,)),
    "nested mappings": lambda step, one: {"a": {"b": {"c": half(one)}}, "empty": {}},
    "a mapping by numbers": lambda step, one: {0: half(one), 1: {"0": 1, 0: 2}},
    "names that look like others": lambda step, one: {"a/b": half(one), "a": {"b": 2 * half(one)}, "$tuple": [1]},
    "tensors of all kinds": lambda step, one: [
        half(one).to(kind) for kind in (torch.bool, torch.int64, torch.bfloat16)
    ],
}


def leaves(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every container by its type, and every value by its type and bits."""
    yield at, dict if isinstance(tree, dict) else type(tree)
    if isinstance(tree, dict):
        for key in sorted(tree, key=repr):
            yield from leaves(tree[key], f"{at}/{key!r}")
    elif isinstance(tree, list | tuple):
        for index, one in enumerate(tree):
            yield from leaves(one, f"{at}/{index}")
    elif isinstance(tree, Tensor):
        yield at, (tree.dtype, tree.shape, tree.tolist())
    else:
        yield at, repr(tree)


def learn(make_trainer: Any, make: Callable[[Any], Optimizer], schedule: Any = lr_scheduler.LinearLR) -> Any:
    """A run of two steps, and another one of four that begins behind them."""

    def optimizers(model: Any) -> tuple[Optimizer, Any]:
        optimizer = make(model.parameters())
        return optimizer, schedule(optimizer)

    more = {"optimizers": optimizers, "max_steps": 2, "save_steps": 2, "overwrite_output_dir": False}
    first, again = make_trainer(**more), make_trainer(**more | {"max_steps": 4})
    first.train()
    restore(first.output_dir / "checkpoint-2", again.learner, again.collector)
    return first, again


def assert_same(first: Any, again: Any) -> None:
    for part in ("model", "optimizer", "lr_scheduler"):
        expected, actual = (dict(leaves(getattr(trainer, part).state_dict())) for trainer in (first, again))
        assert expected == actual


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_an_optimizer_keeps_comes_back_as_it_was(make_trainer, kept):
    first, again = learn(make_trainer, keeping(kept))
    assert first.optimizer.state_dict()["state"][0]["count"] == 2
    assert_same(first, again)


def test_groups_without_parameters_as_those_of_lora_plus_come_back_too(make_trainer):
    first, again = learn(make_trainer, lambda of: Adam([{"params": []}, {"params": of, "lr": 1e-2}]))
    assert len(first.optimizer.param_groups) == 2
    assert_same(first, again)


SCHEDULES = {
    "linear": lr_scheduler.LinearLR,
    "by milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "in sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [3]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_learning_rate_that_is_a_tensor_comes_back(make_trainer, schedule):
    first, again = learn(make_trainer, lambda of: Adam(of, lr=torch.tensor(1e-3), foreach=False), schedule)
    assert isinstance(again.optimizer.param_groups[0]["lr"], Tensor)
    assert_same(first, again)


def test_names_are_no_paths():
    tree, tensors = KEPT["names that look like others"](1, torch.ones(3)), {}
    packed = pack(tree, tensors, "")
    assert dict(leaves(unpack(packed, tensors))) == dict(leaves(tree))


CANNOT_STEP = {
    "a closure": lambda of: torch.optim.LBFGS(of),
    "sparse gradients": lambda of: torch.optim.SparseAdam(of),
    "a metric": lambda of: SGD(of),
    "parameters of others": lambda of: Keeps([*of, torch.nn.Parameter(torch.ones(2))]),
}


@pytest.mark.parametrize("make", CANNOT_STEP.values(), ids=CANNOT_STEP)
def test_what_cannot_step_here_is_refused_at_the_start(make_trainer, make):
    def optimizers(model: Any) -> tuple[Optimizer, Any]:
        optimizer = make(model.parameters())
        return optimizer, lr_scheduler.ReduceLROnPlateau(optimizer) if isinstance(optimizer, SGD) else None

    with pytest.raises(UnsupportedError, match=r"got (LBFGS|SparseAdam|ReduceLROnPlateau|Keeps) in .* want .*fix: "):
        make_trainer(optimizers=optimizers)


CANNOT_SAVE: dict[str, Callable[[int, Tensor], Any]] = {
    "a set": lambda step, one: {1},
    "an object": lambda step, one: object(),
    "a sparse tensor": lambda step, one: torch.eye(3).to_sparse(),
    "names that are none": lambda step, one: {(1, 2): 3},
}


def lora_fa(parameters: Any) -> Optimizer:
    options = {"names": list(map(str, range(len(of := list(parameters))))), "scaling_factors": [None] * len(of)}
    return LoraFAOptimizer([{"params": of, **options}])


@pytest.mark.parametrize("make", [*map(keeping, CANNOT_SAVE.values()), lora_fa], ids=[*CANNOT_SAVE, "PEFT's LoRA-FA"])
def test_what_cannot_be_saved_is_refused_where_it_would_be(make_trainer, make):
    optimizers = lambda model: (make(model.parameters()), None)  # noqa: E731
    said = r"got (KeepsMore|LoraFAOptimizer) in .*state gives (?!Key).* want .*fix: .*save_only_model"
    with pytest.raises(UnsupportedError, match=said):
        make_trainer(optimizers=optimizers, save_steps=1)
    assert make_trainer(optimizers=optimizers, save_steps=1, save_only_model=True, max_steps=2).train().steps == 2


def test_trying_an_optimizer_moves_no_generator(make_trainer):
    class Draws(SGD):
        def step(self, closure: Any = None) -> None:
            torch.rand(())
            super().step(closure)

    states = []
    for make in (SGD, Draws):
        make_trainer(optimizers=lambda model, make=make: (make(model.parameters()), None), save_steps=2)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", ["trainer", "train", "model"])
def test_a_run_without_gradients_is_refused_at_the_start(make_trainer, make_model, mode, where):
    if where == "model":
        with mode():
            model = make_model()
        with nullcontext() if mode is torch.no_grad else pytest.raises(UnsupportedError, match="a model that was made"):
            check_gradients(model)
        return
    trainer = make_trainer() if where == "train" else None
    with mode(), pytest.raises(UnsupportedError, match=r"got a trainer inside torch\.no_grad\(\).* want .*fix: "):
        trainer.train() if trainer else make_trainer()
