"""Ready-to-run recipes. `arithmetic.py` with `demo.yaml` is what `fused-grpo train` runs when it is given no model."""
