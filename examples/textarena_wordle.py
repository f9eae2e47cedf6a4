"""A game of TextArena: Wordle with five words and three guesses, without a network.

    pip install 'fused-grpo[textarena]'
    python examples/textarena_wordle.py [model, such as Qwen/Qwen3-0.6B]

The reward is the game's: 1 for the word, otherwise the share of its letters in the last guess. Without a model a tiny
one is made, which can write a call and guesses at random. What is printed is the mean reward of each step. The report
with the games is in runs/textarena, the list of words in runs/nltk_data.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, set_seed

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.environments import textarena_environment
from fused_grpo.trainer.recipes import arithmetic, calculator

WORDS, GUESSES = ("crane", "house", "light", "plant", "water"), 3
CALLS = [{"name": "act", "arguments": {"action": word}} for word in WORDS]
RUN = {"overwrite_output_dir": True, "max_steps": 10, "logging_steps": 1, "save_strategy": "no", "use_vllm": False}
TINY = {"per_device_train_batch_size": 64, "num_generations": 16, "max_completion_length": 32, "learning_rate": 1e-3}


def write_words(folder: Path) -> None:
    """What Wordle reads of NLTK's data: the words, and a tagger for which each of them is a noun."""
    words, tagger = folder / "corpora/words", folder / "taggers/averaged_perceptron_tagger_eng"
    files = {words / name: "\n".join(WORDS) for name in ("en", "en-basic")}  # what may be guessed, and what is chosen
    for name, value in {"weights": {}, "tagdict": {}, "classes": ["NN"]}.items():
        files[tagger / f"{tagger.name}.{name}.json"] = json.dumps(value)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.environ["NLTK_DATA"] = str(folder)  # which NLTK reads when it is imported
    import nltk

    nltk.download = lambda *_, **__: True  # TextArena calls it even where the words are there


def tiny_model(kind: type) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    set_seed(1)
    environment, games = kind(), []
    for seed in range(256):
        games.append([{"role": "user", "content": environment.reset(seed=seed)}])
        while not environment.done:
            call = random.choice(CALLS)
            calls, said = [{"type": "function", "function": call}], environment.act(**call["arguments"])
            games[-1].append({"role": "assistant", "content": "", "tool_calls": calls})
            games[-1].append({"role": "tool", "name": call["name"], "content": said})
    texts = {message["content"] for game in games for message in game if message["content"]}
    tokenizer = calculator.build_tokenizer()  # in which a call is going to be one token, and so is a text of the game
    tokenizer.add_tokens([*sorted(texts), *(f"<tool_call>{json.dumps(call)}</tool_call>" for call in CALLS)])
    ids = tokenizer.apply_chat_template(games, padding=True, return_tensors="pt", return_dict=False)
    model = Qwen2ForCausalLM(arithmetic.build_model_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(ids, labels=ids.masked_fill(ids == tokenizer.pad_token_id, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def main(name: str = "") -> None:
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    write_words(Path("runs/nltk_data").absolute())
    wordle = textarena_environment("Wordle-v0", num_guesses=GUESSES)
    model, tokenizer = (name, None) if name else tiny_model(wordle)
    args = GRPOConfig("runs/textarena", **RUN, **({} if name else TINY))
    trainer = GRPOTrainer(model, None, args, processing_class=tokenizer, environment_factory=wordle)
    trainer.train()
    print("reward by step:", *(f"{entry['reward']:.2f}" for entry in trainer.state.log_history if "reward" in entry))


if __name__ == "__main__":
    main(*sys.argv[1:])
