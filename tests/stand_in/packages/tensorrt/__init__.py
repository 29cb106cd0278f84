"""Stand-in of the few names of `tensorrt` that a user of `tensorrt_llm` meets. See `stand_in`."""

import enum

from stand_in.state import at_least

__version__ = "10.14.1.48" if at_least("1.2") else "10.7.0"


class DataType(enum.Enum):
    """Types of tensors."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8


float32, float16, bfloat16 = DataType.FLOAT, DataType.HALF, DataType.BF16
int8, int32, int64, fp8 = DataType.INT8, DataType.INT32, DataType.INT64, DataType.FP8
bool = DataType.BOOL


class TensorIOMode(enum.Enum):
    """What a named tensor is to the engine."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    """Whose memory TensorRT thinks a tensor is in."""

    DEVICE = 0
    HOST = 1


class Dims(tuple):
    """A shape; -1 for a side that is not known."""

    __slots__ = ()
