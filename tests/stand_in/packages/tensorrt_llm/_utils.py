"""Names of types: strings, torch's and TensorRT's."""

import tensorrt as trt
import torch

_TYPES = {
    "float32": trt.float32,
    "float16": trt.float16,
    "bfloat16": trt.bfloat16,
    "int8": trt.int8,
    "int32": trt.int32,
    "int64": trt.int64,
    "bool": trt.bool,
    "fp8": trt.fp8,
}


def str_dtype_to_trt(dtype):
    """`bfloat16` -> trt.bfloat16."""
    assert dtype in _TYPES, f"Unsupported dtype in TRT: {dtype}"
    return _TYPES[dtype]


def trt_dtype_to_str(dtype):
    """trt.bfloat16 -> `bfloat16`."""
    return next(name for name, value in _TYPES.items() if value is dtype)


def str_dtype_to_torch(dtype):
    """`bfloat16` -> torch.bfloat16."""
    assert dtype in _TYPES, f"Unsupported dtype in torch: {dtype}"
    return torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype)


def trt_dtype_to_torch(dtype):
    """trt.bfloat16 -> torch.bfloat16."""
    return str_dtype_to_torch(trt_dtype_to_str(dtype))


def torch_dtype_to_trt(dtype):
    """torch.bfloat16 -> trt.bfloat16."""
    return str_dtype_to_trt("fp8" if dtype is torch.float8_e4m3fn else str(dtype).removeprefix("torch."))
