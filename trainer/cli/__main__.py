"""`python -m fused_grpo.trainer.cli`: what `fused-grpo` is, for launchers that want a module."""

from fused_grpo.trainer.cli.main import main

if __name__ == "__main__":
    main()
