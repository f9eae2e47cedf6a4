"""Predictions from fresh traces, a JSON object for each: `fresh_predictions.py`, without TRITON_INTERPRET.

Of our plans on every machine, and of those that are plain torch on the first; none of TRL, which may not be installed.
"""

import json

from fused_grpo.bench import predict

SHAPES = {(4096, 8192), (1024, 8192), (4096, 1024), (1024, 64)}


def main() -> None:
    for job in predict.jobs([predict.OURS, predict.FLOOR, "full logits"]):
        traced = job.implementation == predict.OURS or job.machine == predict.H200
        if not traced or (job.D, job.N) not in SHAPES:
            continue
        facts = predict.predict(job)
        facts.pop("operations", None)
        print(json.dumps({"machine": job.machine.name, "plan": job.plan, "D": job.D, "N": job.N, "facts": facts}))


if __name__ == "__main__":
    main()
