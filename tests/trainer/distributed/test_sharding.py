"""What is refused before anything is sharded across ranks; what works is in test_scale_out.py."""

from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer.distributed.sharding import prepare_sharding
from fused_grpo.trainer.engines import transformers_generate
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine


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


def test_a_sharded_model_does_not_generate(make_model, tokenizer, monkeypatch):
    model = make_model()
    monkeypatch.setattr(transformers_generate, "is_sharded", lambda weight: weight is model.lm_head.weight)
    with pytest.raises(UnsupportedError, match="install vLLM"):
        TransformersEngine(model, tokenizer)
