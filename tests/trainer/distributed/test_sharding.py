"""What is refused before anything is sharded across ranks; what works is in test_scale_out.py."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from accelerate.utils import DistributedType
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ConstantLR

from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.checkpoint.optimizer_states import check_optimizer
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.distributed import sharding
from fused_grpo.trainer.engines import transformers_generate
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.models.adapters import adapt, checkpoint_weights
from fused_grpo.trainer.models.optimizer import make_optimizer
from fused_grpo.trainer.policy import PolicyLoss


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"USE_FSDP": "true"}, "got FSDP 1, .*fsdp_version: 2"),
        ({"USE_DEEPSPEED": "true"}, "got DeepSpeed, .*--config_file fsdp2.yaml"),
        ({"USE_MEGATRON_LM": "true"}, "got Megatron-LM, .*--config_file fsdp2.yaml"),
        *(
            ({"USE_PARALLELISM_CONFIG": "true", f"{kind}_SIZE": "2"}, f"got parallelism of .*{kind} 2")
            for kind in ("TP", "CP", "SP")
        ),
    ],
)
def test_what_trains_otherwise_is_refused_before_ranks_wait(monkeypatch, variables, message):
    monkeypatch.setattr(sharding, "Accelerator", lambda **options: pytest.fail("the ranks wait"))
    for name, value in variables.items():
        monkeypatch.setenv(f"{'ACCELERATE' if 'USE' in name else 'PARALLELISM_CONFIG'}_{name}", value)
    with pytest.raises(UnsupportedError, match=message):
        sharding.make_accelerator(GRPOConfig())


def test_groups_by_size_are_refused_before_ranks_wait(monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    with pytest.raises(UnsupportedError, match="fix: fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"):
        sharding.check_launch(GRPOConfig())


@pytest.mark.parametrize(
    ("tied", "wrapped", "named"),
    [
        (False, "lm_head", "model.lm_head"),
        (True, "embed_tokens", "model.model.embed_tokens"),
        (False, "layers.0", None),
    ],
)
def test_a_head_in_a_group_of_its_own_is_refused_at_the_start(make_model, alone, tied, wrapped, named):
    def prepare(policy, optimizer):
        for name, module in list(policy.named_modules()):
            if name.endswith(wrapped):
                fully_shard(module)
        fully_shard(policy).model.tie_weights()  # as Accelerate
        return policy, optimizer

    policy = PolicyLoss(make_model(tie_word_embeddings=tied), GRPOLossConfig(), temperature=1.0)
    accelerator, optimizer = SimpleNamespace(is_fsdp2=True, prepare=prepare), torch.optim.SGD(policy.parameters())
    with pytest.raises(InputError, match=f"FSDP2 for {named}, .*to_wrap") if named else nullcontext():
        sharding.prepare(accelerator, policy, optimizer)


@pytest.mark.parametrize(
    ("offload", "options", "fix"),
    [
        (False, {}, None),
        (True, {"gradient_checkpointing_kwargs": {"offload": True}}, None),
        (False, {"gradient_checkpointing": False}, "fix: gradient_checkpointing=True, or"),
        (True, {}, 'fix: gradient_checkpointing=True, gradient_checkpointing_kwargs={"offload": True}, or'),
    ],
)
def test_recomputation_by_accelerate_is_that_of_the_options(monkeypatch, offload, options, fix):
    names = {"ACCELERATE_USE_FSDP": True, "FSDP_ACTIVATION_CHECKPOINTING": True}
    for name, value in {**names, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": offload, "FSDP_VERSION": 2}.items():
        monkeypatch.setenv(name, str(value).lower())
    with nullcontext() if fix is None else pytest.raises(InputError, match=re.escape(fix)):
        sharding.check_launch(GRPOConfig(**options))


def test_what_shards_nothing_or_runs_several_times_is_a_warning(monkeypatch, caplog):
    def warnings() -> list[str]:
        caplog.clear()
        warn_once.cache_clear()
        sharding.make_accelerator(GRPOConfig())
        return [record.getMessage() for record in caplog.records]

    assert warnings() == []
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert [text for text in warnings() if text.startswith("got 4 processes from srun and no WORLD_SIZE")]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert [text for text in warnings() if "nothing is sharded" in text]


def test_virtual_tokens_are_refused_under_fsdp(make_model):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedError, match="virtual tokens under FSDP"):
        adapt(make_model(), config, GRPOConfig(), SimpleNamespace(distributed_type=DistributedType.FSDP))


def test_a_sharded_model_does_not_generate(make_model, tokenizer, monkeypatch):
    model = make_model()
    monkeypatch.setattr(transformers_generate, "is_sharded", lambda weight: weight is model.lm_head.weight)
    with pytest.raises(UnsupportedError, match="install vLLM"):
        TransformersEngine(model, tokenizer)


@pytest.fixture
def alone():
    """A process group of this process, which is enough for shards."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_sync_of_one_process_leaves_its_shards(make_model, alone):
    model = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model)
    dict(checkpoint_weights(model))
    assert all(torch.equal(shard.full_tensor(), before[name]) for name, shard in model.named_parameters())


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch_fused", "adagrad", "rmsprop", "sgd"])
def test_an_optimizer_that_cannot_step_on_shards_is_refused_at_the_start(make_model, alone, optim):
    model = fully_shard(make_model())
    optimizer = make_optimizer(model, GRPOConfig(optim=optim))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
        refused = nullcontext()
    except RuntimeError as error:
        refused = pytest.raises(UnsupportedError, match=f"RuntimeError: {re.escape(str(error))}.* want steps .*shards")
    with refused:
        check_optimizer(model, optimizer, ConstantLR(optimizer), is_saved=True)
