"""Names of the files that a run leaves in its output directory, beside its checkpoints and its final model."""

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
OLD_ROLLOUTS_FILE = "rollouts-old.jsonl"
RUN_FILE = "run.json"
REPORT_FILE = "report.html"
REWARD_FILE = "reward.svg"
