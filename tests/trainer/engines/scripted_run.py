"""A short run in a process of its own, for test_vllm_process: start, sample, close, and say what is left."""

import sys

import psutil
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions
from fused_grpo.trainer.types import SamplingParams


def main(*, distributed: bool) -> None:
    if distributed:
        torch.distributed.init_process_group("gloo")
    else:
        print("vllm imported before the engine:", "vllm" in sys.modules)
    sample_once()
    if distributed:
        ranks = torch.ones(())
        torch.distributed.all_reduce(ranks)
        print(f"ranks that answer: {int(ranks)}", flush=True)
        torch.distributed.destroy_process_group()
    else:
        print("children:", len(psutil.Process().children(recursive=True)))


def sample_once() -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    config = Qwen2Config(
        vocab_size=3, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    engine = VLLMEngine(model, tokenizer, VLLMOptions(max_model_len=32, dtype=torch.float32))
    engine.generate([[1, 2]], SamplingParams(n=2, max_tokens=4, seed=0))
    engine.load_weights(model.named_parameters(), version=1)
    sockets = [socket for socket in psutil.Process().net_connections("inet") if socket.status == "LISTEN"]
    print("listens on:", *sorted({socket.laddr.ip for socket in sockets}))
    engine.close()


if __name__ == "__main__":
    main(distributed="--distributed" in sys.argv)
