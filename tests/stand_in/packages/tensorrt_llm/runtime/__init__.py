"""Running engines."""

from tensorrt_llm.runtime.session import Session, TensorInfo

__all__ = ["Session", "TensorInfo"]
