"""vLLM in the trainer's process.

inprocess.py   the rollout engines, with merged weights or with a LoRA adapter beside the base model, and their turns
start_vllm.py  starts vLLM, and restores the state of the process that it changes
"""
