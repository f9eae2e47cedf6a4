"""A rank that fails before it connects to the others, by the fault of its first argument. Run by test_starts.py.

start_run.py <folder> <fault> <rank on which it happens>
"""

import os
import sys
from pathlib import Path

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.options import TrainOptions
from fused_grpo.trainer.cli.train import train
from fused_grpo.trainer.logging import run_output

OUT, FAULT, RANK = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
HAPPENS = int(os.environ["RANK"]) == RANK
TRACKED = {"report_to": ["wandb"]} if FAULT == "tracker" else {}
args = GRPOConfig(str(OUT / "run"), use_cpu=True, ddp_timeout=4 if FAULT == "script" else 300, **TRACKED)
# A package that is installed on the other machine alone.
run_output.get_available_trackers = lambda: [] if HAPPENS else ["wandb"]
if FAULT == "options" and HAPPENS:
    args.beta = -1.0
if FAULT == "environment" and HAPPENS:
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "inductor"
if FAULT == "backend":
    args.ddp_backend = "nccl" if HAPPENS else "gloo"
if FAULT == "script" and HAPPENS:
    sys.exit("no such dataset")
if FAULT == "train":  # of the command: a disk of another machine
    file = OUT / "file"
    file.write_text("")
    train(TrainOptions(str(file if HAPPENS else OUT / "run"), use_cpu=True, ddp_timeout=300))
GRPOTrainer("no/such/model", "accuracy_reward", args, [{"prompt": "1"}])
