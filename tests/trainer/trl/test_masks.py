"""The masks and the log that TRL's trainer has, called as its users and tests call them."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from fused_grpo.trainer import GRPOTrainer


@pytest.fixture(scope="module")
def trl_trainer():
    """vLLM is hidden from TRL, which warns of versions that it has not seen."""
    import_utils = pytest.importorskip("trl.import_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        from trl import GRPOTrainer as TRLTrainer
    return TRLTrainer


def padded(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in fp32, with the mask of a padded batch, whose first sequence is empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([0, *range(1, shape[0])]) * shape[1] // (shape[0] - 1)
    return torch.randn(shape, generator=generator), (torch.arange(shape[1]) < lengths[:, None]).long()


@pytest.mark.parametrize("threshold", [0.0, 0.37, 0.8, 1.0])
def test_the_most_uncertain_tokens_are_those_of_trl(trl_trainer, threshold):
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True))
    for seed in range(5):
        values, mask = padded(seed, 4, 7)
        for tokens in (mask, mask * 0):
            given = trainer, values.abs(), tokens, threshold
            assert torch.equal(GRPOTrainer.get_high_entropy_mask(*given), trl_trainer.get_high_entropy_mask(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_sequences_off_policy_are_those_of_trl(trl_trainer, dtype):
    kept = set()
    for seed in range(20):
        logprobs, mask = padded(seed, 5, 6)
        sampled, advantages = padded(seed + 100, 5, 6)[0], padded(seed + 200, 5, 1)[0]
        sampled[4, 0] = torch.nan
        given = advantages, logprobs * 2, sampled, mask.to(dtype), 0.4
        masks = GRPOTrainer.get_off_policy_mask(*given), trl_trainer.get_off_policy_mask(*given)
        assert masks[0].dtype == dtype
        assert torch.equal(*masks)
        kept |= set(masks[0].flatten().tolist())
    assert kept == {0, 1}


@pytest.mark.parametrize("prompt", ["1+2=", [{"role": "user", "content": "1+2="}]], ids=["text", "conversation"])
def test_the_log_has_the_newest_completions_with_what_was_logged(make_trainer, tokenizer, prompt):
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    seen = []

    def first(completions, log_extra, **columns):
        log_extra("start", [str(completion)[:1] for completion in completions])
        seen[:] = completions
        return [float(place) for place in range(len(completions))]

    trainer = make_trainer(first, max_steps=2, dataset=[{"prompt": prompt}] * 4)
    assert trainer._logs["completion"] == []
    trainer.train()
    logs = trainer._logs
    assert logs["completion"] == seen
    assert logs["prompt"] == [prompt] * len(seen)
    assert logs["rewards"] == {"first": [float(place) for place in range(len(seen))]}
    assert logs["extra"] == {"start": [str(completion)[:1] for completion in seen]}
    assert sum(logs["advantages"]) == pytest.approx(0, abs=1e-5)
