"""Engines that TensorRT-LLM builds and runs: what is asked of the vendor's package, and what is not taken on trust."""
