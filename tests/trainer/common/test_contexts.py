"""What raises inside of our context managers leaves them as the error that explains it, a StopIteration too."""

import ast
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import fused_grpo.trainer
from fused_grpo.errors import CheckpointError, DataError, FusedGRPOError, UnavailableError, WeightSyncError
from fused_grpo.trainer.checkpoint.checkpoint import refuse_unusable, weights_stay
from fused_grpo.trainer.checkpoint.training_state import tensors_of
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.process_state import place_kept, process_kept
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, report_failure
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, _sampling_errors
from fused_grpo.trainer.logging.console import live, progress
from fused_grpo.trainer.models.loading import loading

ENDS = [StopIteration, StopAsyncIteration, KeyError, RuntimeError]


def engine_loading(folder):
    engine = SimpleNamespace(_asleep=False, _engine=object, close=lambda: None)
    return VLLMEngine._loading(engine, "weight version 1", 1, want="others")


@contextmanager
def around(folder):
    with refuse_unusable(folder, "a.json"):
        yield


EXPLAINED = {
    "refuse_unusable": (
        lambda folder: refuse_unusable(folder, "a.json"),
        CheckpointError,
        "a.json does not fit",
    ),
    "tensors_of": (lambda folder: tensors_of(folder, "a.safetensors"), CheckpointError, "a.safetensors does not fit"),
    "weights_stay": (
        lambda folder: weights_stay(folder, nn.Linear(2, 2), {"weight": torch.ones(2)}),
        CheckpointError,
        "the weights are in",
    ),
    "around": (around, CheckpointError, "a.json does not fit"),
    "loading": (lambda folder: loading("model 'a'"), DataError, "model 'a' cannot be loaded"),
    "_loading": (engine_loading, WeightSyncError, "from vLLM while loading weight version 1"),
    "_sampling_errors": (lambda folder: _sampling_errors(), UnavailableError, "from vLLM while sampling"),
}
PASSED = {
    "process_kept": process_kept,
    "place_kept": place_kept,
    "live": lambda: live("a"),
    "progress": lambda: progress("a"),
    "all_ranks_succeed": lambda: all_ranks_succeed(Accelerator(cpu=True), "a"),
    "report_failure": lambda: report_failure(Accelerator(cpu=True)),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", EXPLAINED)
def test_an_error_of_the_body_leaves_as_the_one_that_explains_it(tmp_path, name, end):
    make, kind, words = EXPLAINED[name]
    raised = end("over")
    with pytest.raises(kind, match=words) as caught, make(tmp_path):
        raise raised
    assert caught.value.__cause__ is raised
    assert isinstance(caught.value, FusedGRPOError)


@pytest.mark.parametrize("end", [*ENDS, GeneratorExit, KeyboardInterrupt])
@pytest.mark.parametrize("name", PASSED)
def test_an_error_that_is_nothing_to_a_context_passes_as_it_is(name, end):
    raised = end("over")
    with pytest.raises(end) as caught, PASSED[name]():
        raise raised
    assert caught.value is raised
    assert caught.value.__cause__ is None
    assert caught.traceback[-1].path == Path(__file__)  # and not in ours


def test_a_context_may_end_an_error():
    @contextmanager
    def without(kind):
        try:
            yield "entered"
        except kind:
            return

    with without(StopIteration) as entered:
        raise StopIteration
    assert entered == "entered"


def test_a_context_that_yields_again_behind_an_error_is_named():
    @contextmanager
    def twice():
        with suppress(StopIteration):
            yield
        yield

    with pytest.raises(RuntimeError, match="yields twice, want one yield"), twice():
        raise StopIteration


def test_every_context_manager_of_the_trainer_is_of_that_kind():
    folder = Path(fused_grpo.trainer.__file__).parent
    plain = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module == "contextlib"
        and any(alias.name == "contextmanager" for alias in node.names)
    }
    assert plain == {"__init__.py"}  # which is imported first, and raises of a ModuleNotFoundError alone


def test_what_ends_with_a_process_does_not_end_with_its_forks():
    """They run all finalizers at their end: one killed the workers, the server or the session of the trainer."""
    sources = Path(fused_grpo.trainer.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "weakref.finalize(" in path.read_text()] == ["contexts.py"]
