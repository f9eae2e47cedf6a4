"""vLLM in the trainer's process.

inprocess.py       the rollout engine
lora_engine.py     the same with a LoRA adapter beside the base model: a sync loads the adapter alone
start_vllm.py      starts vLLM
preserved_state.py restores the state of the process that vLLM changes
"""
