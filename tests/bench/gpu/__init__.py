"""The parts of `bench_gpu.py`; each imports nothing but what it measures."""
