"""What our ops and trainer cost beside the peers, on the machine at hand: `python -m fused_grpo.bench`.

pytest-benchmark runs the suite (conftest.py, heads/test_head.py, trainers/test_*.py) and writes the result file.

    heads/        the head by itself. A `Work` (work.py: which head, how many tokens, which gradients) is done by an
                  `Implementation` (ours and full logits in implementations.py, the others in peers.py). It is timed
                  only after its correctness check passes (correctness.py), in a worker process of its own, in
                  interleaved rounds (worker_pool.py). suites.py lists the cases and what was promised of them
    trainers/     the training phase, whole steps and generation
    report/       the result file (results_file.py), tables and charts
    predictions/  predicted times of GPUs, from traces on fake tensors; predict.py makes them
    gpu/          what scripts/gpu_first.py measures first on a GPU, and its page (page.py)
    results/      committed result files, a folder for each machine
    compare.py    two result files beside each other
    raw_file.py   the file of a measurement that pytest does not run: where it is, and what made it
    accuracy.py   errors from fp64 alone
    pages.py      the figures in README.md and docs/
"""
