"""Datasets, prompts and the order of prompts."""
