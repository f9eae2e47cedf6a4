"""Reward models score what a hand-made forward pass scores."""

import pytest
import torch
import transformers
from transformers import Qwen2ForCausalLM

from fused_grpo.errors import InputError
from fused_grpo.trainer.rewards import RewardModel, Rewards
from fused_grpo.trainer.rewards import reward_functions as models_module


def expected(model, tokenizer, texts) -> torch.Tensor:
    """Each text alone, without padding."""
    ids = [torch.tensor([tokenizer.convert_tokens_to_ids(list(text))]) for text in texts]
    with torch.no_grad():
        return torch.stack([model(x).logits[0, 0] for x in ids])


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_module_scores_prompt_and_completion(reward, reward_model, tokenizer, monkeypatch, batch_size):
    monkeypatch.setattr(models_module, "BATCH_SIZE", batch_size)
    rows = [{"prompt": prompt} for prompt in ("p", "p", "pqpq", "pqpq")]
    given = reward(reward_model, rows=rows, processing_classes=tokenizer).per_function[:, 0]
    torch.testing.assert_close(given, expected(reward_model, tokenizer, ["pa", "pb", "pqpqc", "pqpqd"]))
    assert given.unique().numel() == 4


@pytest.mark.parametrize("content", ["p", [{"type": "text", "text": "p"}]])
def test_a_conversation_is_scored_in_the_chat_template(reward_model, tokenizer, content):
    rows = [{"prompt": [{"role": "user", "content": content}]}] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("ab", "h")]
    given = Rewards(reward_model, processing_classes=[tokenizer])(rows, completions, [[1], [2]], num_generations=2)
    torch.testing.assert_close(given.per_function[:, 0], expected(reward_model, tokenizer, ["u:p|a:ab|", "u:p|a:h|"]))


def test_a_model_is_found_by_its_path_and_named_after_it(reward, reward_model, tokenizer, tmp_path):
    path = tmp_path / "my-judge"
    reward_model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    rewards = Rewards([str(path), "builtins:len"])
    assert rewards.names == ["my-judge", "len"]
    assert not rewards.functions[0].model.training
    given = reward(str(path)).per_function[:, 0]
    torch.testing.assert_close(given, expected(reward_model, tokenizer, ["pa", "pb", "qc", "qd"]))


def test_a_model_by_name_is_loaded_as_the_policy_is(reward_model, tokenizer, tmp_path):
    reward_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = {"dtype": torch.bfloat16, "attn_implementation": "eager", "trust_remote_code": True}
    model = Rewards(str(tmp_path), model_init_kwargs=asked).functions[0].model
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["GPT2", "Bert", "Roberta"])
def test_a_text_longer_than_the_places_of_a_model_is_named(tokenizer, kind):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 6, "num_labels": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    judge = RewardModel(getattr(transformers, f"{kind}ForSequenceClassification")(config), tokenizer)
    assert len(judge(["p"], ["ab"])) == 1
    with pytest.raises(InputError, match=r"got 7 tokens .*, max_position_embeddings=6 \(.*fix: a smaller max_comp"):
        judge(["p"], ["abcdef"])


def test_a_model_without_a_trained_score_is_refused(reward_model, tokenizer, tmp_path):
    Qwen2ForCausalLM(reward_model.config).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    with pytest.raises(InputError, match=r"policy' without trained weights for score\.weight"):
        Rewards(str(tmp_path / "policy"))


def test_a_model_that_is_nowhere_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"names no function .* and no model with one score"):
        Rewards(str(tmp_path / "nothing"))


def test_a_model_without_its_tokenizer_is_refused_in_one_line(reward_model, tmp_path):
    reward_model.config._name_or_path = str(tmp_path / "moved")
    with pytest.raises(
        InputError, match=r"moved', whose tokenizer cannot be loaded: .*fix: pass reward_proc"
    ) as caught:
        Rewards(reward_model)
    assert "\n" not in str(caught.value)


def test_a_module_needs_a_tokenizer_that_pads(reward_model, tokenizer):
    with pytest.raises(InputError, match="without a path and no tokenizer; fix: pass reward_processing_classes"):
        Rewards(reward_model)
    tokenizer.pad_token = None
    assert RewardModel(reward_model, tokenizer).model.config.pad_token_id == tokenizer.eos_token_id
