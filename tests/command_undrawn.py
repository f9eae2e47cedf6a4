"""`fused-grpo`, but for the report at the end of a run: drawing it takes longer than a short run."""

from __future__ import annotations

from fused_grpo.trainer.cli.main import main as cli
from fused_grpo.trainer.logging import run_output

run_output.write_report = lambda folder: folder / "report.html"
cli.main()
