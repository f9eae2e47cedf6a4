"""What our ops and trainer cost beside the peers, on the machine at hand: `python -m fused_grpo.bench`.

A measurement is a `Work` (work.py: which head, how many tokens, which gradients) done by a `Contender` (contenders.py:
ours and full logits; peers.py: everyone else, in their best documented setting). Nobody is timed who has not passed the
gate (gate.py: a small version of the work, against fp64). Contenders run in a process each (worker.py) and take turns
(crew.py). suites.py says what is measured, and what was promised of the outcome.

pytest-benchmark runs it (conftest.py, test_*.py) and writes the file. tables.py, charts.py, readme_figures.py say it in
Markdown and pictures, compare.py holds two files against each other. trainer_peers.py, whole_steps.py: the same for
whole trainers. accuracy.py measures errors alone, and makes docs/accuracy.md. predict.py says what a roofline predicts
of GPUs from traces on fake tensors (cuda_trace.py), and makes docs/predictions.md; predicted.py looks it up.
gpu_timings.py has what scripts/gpu_first.py measures first on a GPU.
"""
