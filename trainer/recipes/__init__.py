"""Ready-to-run recipes. `fused-grpo train` without a model runs `demo.yaml` with the task of `arithmetic.py`."""
