"""Loading models and tokenizers; adapters."""
