"""The built-in task: splits that do not leak, a reward that is exact, and a base model with room to learn."""

import copy
import hashlib

import pytest
import torch
import yaml
from make_base_model import encode, without_carries
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.options import RECIPES
from fused_grpo.trainer.recipes import arithmetic

# As many as tests/test_demo.py makes, which asks for the same gain.
DEMO_STEPS = 24
NUCLEUS = {"top_p": 0.9, "sampling_support": "require", "per_device_train_batch_size": 256}
# Options, and the least gain.
GAINS = {"the demo's options": ({}, 0.5), "top_p=0.9": (NUCLEUS, 0.3)}


@pytest.fixture(scope="module")
def splits():
    return arithmetic.build_splits()


@pytest.fixture(scope="module")
def base():
    return arithmetic.load_base_model()


def terms(row):
    return frozenset(row["prompt"].rstrip("=").split("+"))


def generate(model, tokenizer, prompts):
    """Greedy completions by transformers, decoded as the trainer decodes them."""
    inputs = tokenizer(prompts, return_tensors="pt")["input_ids"]
    new = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=5)
    return tokenizer.batch_decode(new[:, inputs.shape[1] :], skip_special_tokens=True)


def test_no_pair_of_terms_is_in_two_splits_in_either_order(splits):
    train, heldout = ({terms(row) for row in rows} for rows in (splits.train, splits.heldout))
    assert not train & heldout
    assert 256 <= len(splits.heldout) <= 512


def test_answers_are_the_sums_least_significant_digit_first(splits):
    for row in splits.train + splits.heldout:
        first, second = map(int, row["prompt"].rstrip("=").split("+"))
        assert int(row["answer"][::-1]) == first + second


def test_text_survives_the_tokenizer_one_token_per_character():
    tokenizer = arithmetic.build_tokenizer()
    ids = tokenizer("58+67=521")["input_ids"]
    assert len(ids) == len("58+67=521")
    assert len(set(tokenizer("0123456789+=")["input_ids"])) == 12
    assert tokenizer.decode(ids) == "58+67=521"


def test_the_tokenizer_is_the_same_after_a_save(tmp_path):
    tokenizer = arithmetic.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("58+67=")["input_ids"] == tokenizer("58+67=")["input_ids"]
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert loaded.decode(loaded("521")["input_ids"]) == "521"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("521", 1.0), ("125", 0.0), ("52", 0.0), ("", 0.0), ("5210", 0.0), ("521=", 0.0), (" 521", 0.0), ("5+1", 0.0)],
)
def test_only_exactly_the_answer_is_rewarded(completion, reward):
    assert arithmetic.sum_reward(prompts=["58+67="], completions=[completion], answer=["521"]) == [reward]


def test_rewards_stay_beside_their_completions():
    inputs = {"prompts": ["12+34=", "58+67="], "completion_ids": [[1], [1]]}
    assert arithmetic.sum_reward(completions=["64", "64"], answer=["64", "521"], **inputs) == [1.0, 0.0]


def test_the_head_is_its_own_weight(base):
    # The CPU build of vLLM keeps serving the old head of a tied model after a weight sync.
    model, _ = base
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()


def test_the_base_model_is_the_file_that_the_page_beside_it_describes(base):
    stored, size = load_file(arithmetic.BASE_MODEL), arithmetic.BASE_MODEL.stat().st_size
    assert hashlib.sha256(arithmetic.BASE_MODEL.read_bytes()).hexdigest() in arithmetic.__doc__
    assert size <= 300_000
    for name, value in base[0].state_dict().items():
        assert (value.dtype, stored[name].dtype) == (torch.float32, torch.float16)
        assert torch.equal(value, stored[name].float()), name


def test_loading_it_leaves_the_global_generator_alone():
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    arithmetic.load_base_model()
    assert torch.equal(torch.rand(4), expected)


def test_the_base_model_adds_and_rarely_carries(base, splits):
    """Greedily all but never, in one sample of seven: there is much to learn, and it is found."""
    model, tokenizer = base
    prompts, right = encode(tokenizer, splits.heldout)
    carries = torch.tensor([without_carries(row) != row["answer"] for row in splits.heldout])
    completions = generate(model, tokenizer, [row["prompt"] for row in splits.heldout])
    greedy = arithmetic.sum_reward(completions=completions, answer=[row["answer"] for row in splits.heldout])
    with torch.no_grad():
        logits = model(torch.cat([prompts, right], 1), use_cache=False).logits[:, prompts.shape[1] - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, right[..., None])[..., 0].masked_fill(right == 0, 0.0)
    sampled = logprobs.sum(1).exp()
    assert torch.tensor(greedy)[carries].mean() < 0.02
    assert torch.tensor(greedy)[~carries].mean() > 0.98
    assert 0.1 < sampled[carries].mean() < 0.2


@pytest.mark.learning
@pytest.mark.parametrize("kind", GAINS)
def test_the_task_is_learned(base, splits, tmp_path, kind, learning_seed, learned):
    """With the demo's options and transformers' generate."""
    model, tokenizer = base
    options, least = GAINS[kind]
    demo = yaml.safe_load((RECIPES / "demo.yaml").read_text())
    demo |= {"output_dir": str(tmp_path), "max_steps": DEMO_STEPS, "save_strategy": "no", "use_vllm": False}
    args = GRPOConfig(**{**demo, "log_completions": False, "seed": learning_seed, **options})
    own = {"eval_dataset": splits.heldout, "processing_class": tokenizer}
    result = GRPOTrainer(copy.deepcopy(model), arithmetic.sum_reward, args, splits.train, **own).train()
    assert ("sampling/kept_tokens/mean" in result.metrics) is ("top_p" in options)
    assert result.metrics.get("sampling/kept_tokens/mean", 2) < 3
    assert result.metrics["sampling/sampling_logp_difference/max"] < 5e-4
    gain = result.eval_after["reward"] - result.eval_before["reward"]
    learned(f"the built-in task, {kind}: gain of held-out accuracy", measured=gain, least=least)
