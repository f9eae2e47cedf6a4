"""Loading models and tokenizers; LoRA adapters."""
