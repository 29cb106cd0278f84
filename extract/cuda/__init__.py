"""Our packed decoder on a CUDA card, in torch: bfloat16 and FP8, variable-length attention, late downloads."""
