"""A run of two steps with secrets in its options, for test_run.py: what it listens on is what it prints.

python tiny_run.py FOLDER SECRET
"""

import sys
from pathlib import Path
from typing import Any

import psutil

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
from resume_run import model


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Called while everything runs."""
    sockets = [socket for socket in psutil.Process().net_connections("inet") if socket.status == "LISTEN"]
    print("listens:", *(f"{socket.laddr.ip} {socket.laddr.port}" for socket in sockets), sep="\nlistens: ", flush=True)
    return [float(len(text)) for text in completions]


def main(folder: str, secret: str) -> None:
    model().save_pretrained(f"{folder}/model")
    args = GRPOConfig(
        f"{folder}/run",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=2,
        use_vllm=False,
        log_completions=True,
        report_to="tensorboard",
        model_init_kwargs={"token": f"hf_{secret}"},
        chat_template_kwargs={
            "api_key": secret,
            "headers": {"Authorization": f"Digest {secret}"},
            "note": f"Bearer {secret}",
            "where": f"https://host/path?page=1&api_key={secret}&size=2",
        },
        vllm_server_base_url=f"http://user:{secret}@127.0.0.1:8000",
    )
    rows = [{"prompt": f"{number}+1="} for number in range(8)]
    GRPOTrainer(
        f"{folder}/model", reward, args, rows, eval_dataset=rows[:2], processing_class=build_tokenizer()
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
