"""Names of the files and folders that a run leaves in its output directory, beside checkpoints and the final model."""

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
OLD_ROLLOUTS_FILE = "rollouts-old.jsonl"
RUN_FILE = "run.json"
REPORT_FILE = "report.html"
REWARD_FILE = "reward.svg"
RUN_FILES = (METRICS_FILE, ROLLOUTS_FILE, OLD_ROLLOUTS_FILE, RUN_FILE, REPORT_FILE, REWARD_FILE)
TRACKERS_FOLDER = "trackers"
NONFINITE_FOLDER = "nonfinite-step-"
