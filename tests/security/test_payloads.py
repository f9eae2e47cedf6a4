"""Model folders that carry code: it does not run unless remote code was asked for."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.models.loading import load_model, tokenizer_for

CODE = "from pathlib import Path; Path({mark!r}).touch()"
ON_CPU = SimpleNamespace(device=torch.device("cpu"), distributed_type=DistributedType.NO)


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return exec, (CODE.format(mark=str(self.mark)),)


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "the payload has run"


def model_folder(tmp_path: Path, **config: object) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_code_beside_the_weights_is_refused(tmp_path, mark):
    kinds = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Fast", None]}
    folder = model_folder(tmp_path, model_type="evil", auto_map=kinds)
    (Path(folder) / "evil.py").write_text(CODE.format(mark=str(mark)))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(folder, ON_CPU, trust_remote_code=False)
    with pytest.raises(ValueError, match=r"trust_remote_code|backend tokenizer"):
        tokenizer_for(folder, None, GRPOConfig())
    assert not mark.exists()


def test_weights_that_are_a_pickle_of_code_are_refused(tmp_path, mark):
    shape = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    folder = model_folder(
        tmp_path, model_type="qwen2", architectures=["Qwen2ForCausalLM"], num_key_value_heads=1, **shape
    )
    torch.save({"model.embed_tokens.weight": Payload(mark)}, Path(folder) / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickl|unsupported"):
        load_model(folder, ON_CPU, trust_remote_code=False)
    assert not mark.exists()


def test_the_payload_is_one(tmp_path, mark):
    torch.save(Payload(mark), tmp_path / "weights.bin")
    torch.load(tmp_path / "weights.bin", weights_only=False)
    assert mark.exists()
