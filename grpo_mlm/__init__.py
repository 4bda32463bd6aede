"""GRPO training of language models: Megatron trains, vLLM samples, Ray drives, one layout algebra in between."""

__version__ = "0.1.0"
