"""What is refused before anything is sharded across ranks; what works is in test_scale_out.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from accelerate.utils import DistributedType
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.distributed.sharding import prepare_sharding
from fused_grpo.trainer.engines import transformers_generate
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.models.adapters import adapt, checkpoint_weights


@pytest.mark.parametrize(
    ("kind", "version", "fix"),
    [("FSDP", 1, "fsdp_version: 2"), ("DEEPSPEED", 2, "--config_file fsdp2.yaml")],
)
def test_kinds_of_sharding_that_do_not_work_here_are_refused(kind, version, fix):
    plugin = SimpleNamespace(mixed_precision_policy=None)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType[kind], is_fsdp2=version == 2, state=SimpleNamespace(fsdp_plugin=plugin)
    )
    with pytest.raises(UnsupportedError, match=fix):
        prepare_sharding(accelerator)


def test_virtual_tokens_are_refused_under_fsdp(make_model):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedError, match="virtual tokens under FSDP"):
        adapt(make_model(), config, GRPOConfig(), SimpleNamespace(distributed_type=DistributedType.FSDP))


def test_a_sharded_model_does_not_generate(make_model, tokenizer, monkeypatch):
    model = make_model()
    monkeypatch.setattr(transformers_generate, "is_sharded", lambda weight: weight is model.lm_head.weight)
    with pytest.raises(UnsupportedError, match="install vLLM"):
        TransformersEngine(model, tokenizer)


def test_a_sync_of_one_process_leaves_its_shards(make_model):
    model = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model)
        dict(checkpoint_weights(model))
        assert all(torch.equal(shard.full_tensor(), before[name]) for name, shard in model.named_parameters())
    finally:
        torch.distributed.destroy_process_group()
