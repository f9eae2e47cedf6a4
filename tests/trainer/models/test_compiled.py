"""A model that was compiled before it is passed: it is saved and sent under its own names, and trained compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from fused_grpo.errors import InputError
from fused_grpo.integrations.model_modes import has_dropout, uncompiled
from fused_grpo.trainer import GRPOConfig, GRPOTrainer

LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def compile(self, module: nn.Module) -> Any:
        return torch.compile(module, backend=self)


def layers(model: Any, counting: Counting) -> Any:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = counting.compile(layer)
    return model


def parts(model: Any, counting: Counting) -> Any:
    model.model, model.lm_head = counting.compile(model.model), counting.compile(model.lm_head)
    return model


KINDS = {
    "whole": lambda model, counting: counting.compile(model),
    "layers": layers,
    "backbone and head": parts,
    "twice": lambda model, counting: counting.compile(layers(model, counting)),
}


@pytest.fixture
def train(tokenizer, tmp_path):
    def run(model: Any, **options: Any) -> tuple[GRPOTrainer, Any]:
        arguments = {"teacher_model": options.pop("teacher_model", None)}
        own = {"output_dir": str(tmp_path), "use_vllm": False, "num_generations": 4, "per_device_train_batch_size": 4}
        own |= {"max_completion_length": 5, "max_steps": 1, "save_strategy": "no", "gradient_checkpointing": False}
        reward = lambda completions, **columns: [float(place) for place in range(len(completions))]  # noqa: E731
        args, rows = GRPOConfig(**own | options), [{"prompt": "1+1="}, {"prompt": "12-3="}]
        trainer = GRPOTrainer(model, reward, args, rows, processing_class=tokenizer, **arguments)
        return trainer, trainer.train()

    return run


@pytest.mark.parametrize(
    "kind", ["whole", "layers", *(pytest.param(k, marks=pytest.mark.full) for k in list(KINDS)[2:])]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that torch hides from its own access
def test_a_compiled_model_is_trained_so_and_saved_under_its_own_names(make_model, train, kind):
    counting, ids = Counting(), torch.tensor([[2, 3, 4]])
    trainer, result = train(KINDS[kind](make_model(), counting), beta=0.1 if kind == "twice" else 0.0)
    assert 0 < counting.graphs <= 4  # none for the lengths of a KV cache
    loaded, loading = AutoModelForCausalLM.from_pretrained(result.checkpoint, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)
    assert [name for name, _ in trainer.learner.served_weights()] == list(make_model().state_dict())


def test_an_adapter_around_a_compiled_model(make_model, train):
    counting = Counting()
    trainer, _ = train(get_peft_model(counting.compile(make_model()), LORA))
    assert counting.graphs
    assert not any("_orig_mod" in name for name, _ in trainer.model.named_parameters())
    assert {name for name, _ in trainer.learner.served_weights()} == make_model().state_dict().keys()


def test_a_compiled_adapter(make_model):
    counting = Counting()
    model = uncompiled(counting.compile(get_peft_model(make_model(), LORA)))
    assert isinstance(model, PeftModel)
    model.get_base_model().model(torch.tensor([[2, 3]]))
    assert counting.graphs == 1


@pytest.mark.full
def test_a_compiled_teacher(make_model, train):
    counting = Counting()
    train(make_model(), teacher_model=counting.compile(make_model(seed=1)), distillation_coef=0.5)
    assert counting.graphs


def test_compiled_and_eager_make_the_same_steps(make_model, train):
    metrics = [train(model)[1].metrics for model in (make_model(), Counting().compile(make_model()))]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-6)
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-4)


def test_measuring_compiles_nothing(make_model):
    counting = Counting()
    model = uncompiled(counting.compile(make_model()))
    assert not has_dropout(model)
    assert counting.graphs == 0
    model(torch.tensor([[2, 3]]))
    assert counting.graphs == 1


def test_a_compile_in_place_of_the_whole_model_is_warned_of(make_model, caplog):
    model = make_model()
    model.compile(backend="eager")
    assert uncompiled(model) is model
    assert "got a Qwen2ForCausalLM after its compile(), which is about a call with its head" in caplog.text


@pytest.mark.parametrize("kind", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_parallel_wrappers_are_refused_before_anything_else(make_trainer, tokenizer, kind, make_model):
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    wrapped.module = make_model()
    with pytest.raises(InputError, match=f"got a {kind.__name__}, want the model inside.*fix: pass model.module"):
        GRPOTrainer(wrapped, None, GRPOConfig(), [{"prompt": "1"}], processing_class=tokenizer)
