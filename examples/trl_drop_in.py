"""TRL's GRPOTrainer with our ops under it: one line of a script changes, the numbers do not.

Trains a tiny random model for ten steps with `trl.GRPOTrainer`, and again with `FusedGRPOTrainer`; prints what TRL logs
and how far apart the two models are. Needs fused-grpo and `pip install 'trl==1.16.*'`. Leaves nothing behind.
"""

import os
import tempfile
import warnings

warnings.filterwarnings("ignore")  # of TRL's, about versions of engines that are not used here
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from fused_grpo.integrations.trl import FusedGRPOTrainer  # noqa: E402 - the line that changes

VOCAB = ["<pad>", "<eos>", *(str(number) for number in range(30))]


def even(completions, **columns):
    """Share of even numbers in what was written."""
    words = [text.split() for text in completions]
    return [sum(int(word) % 2 == 0 for word in answer if word.isdigit()) / max(1, len(answer)) for answer in words]


def train(trainer_class: type, folder: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    torch.manual_seed(0)
    backend = Tokenizer(models.WordLevel({word: k for k, word in enumerate(VOCAB)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(VOCAB), num_attention_heads=2, num_key_value_heads=1, **sizes, **ids)
    )
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        max_steps=10,
        learning_rate=3e-3,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": f"{a} {b}"} for a in range(4) for b in range(4)])
    trainer = trainer_class(model, even, args, rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.state_dict(), [line for line in trainer.state.log_history if "loss" in line]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (trl_weights, trl_log), (ours, our_log) = train(GRPOTrainer, folder), train(FusedGRPOTrainer, folder)
    for name in ("reward", "loss", "grad_norm", "entropy"):
        print(f"{name:>10}  TRL {trl_log[-1][name]:+.6f}   fused {our_log[-1][name]:+.6f}")
    apart = max(float((weight - ours[name]).abs().max()) for name, weight in trl_weights.items())
    print("parameters differ by at most", apart)


if __name__ == "__main__":
    main()
