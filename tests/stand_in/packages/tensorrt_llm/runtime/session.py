"""Session: one engine with one execution context, run on raw memory.

As with the vendor, `run` looks at no type, no shape and no stride: it reads what lies behind the addresses, as the type
and shape that the engine was told. Tensors `host_*` are read when a pass is queued, all others when it is done; who
frees or changes them in between gets what he deserves.
"""

import math
import weakref
from dataclasses import dataclass

import numpy as np
import tensorrt as trt
import torch
from stand_in.card import DeviceFault
from stand_in.execution import CONTEXT_PHASE, Execution
from stand_in.program import Program
from stand_in.state import STATE

import tensorrt_llm
from tensorrt_llm._utils import str_dtype_to_torch, str_dtype_to_trt


@dataclass
class TensorInfo:
    """Name, TensorRT type and shape."""

    name: str
    dtype: trt.DataType
    shape: tuple

    def numel(self):
        """Elements."""
        return math.prod(self.shape)


class _Engine:
    """What TensorRT says of an engine."""

    def __init__(self, program):
        self._program = program
        self._names = [*program.inputs, *program.outputs]

    @property
    def num_io_tensors(self):
        return len(self._names)

    def get_tensor_name(self, index):
        return self._names[index]

    def get_tensor_mode(self, name):
        modes = trt.TensorIOMode
        inputs, outputs = self._program.inputs, self._program.outputs
        return modes.INPUT if name in inputs else modes.OUTPUT if name in outputs else modes.NONE

    def get_tensor_dtype(self, name):
        return str_dtype_to_trt(self._program.values[self._key(name)].dtype)

    def get_tensor_shape(self, name):
        return trt.Dims(self._program.shape(self._key(name), {}))

    def get_tensor_location(self, name):
        """Device, for `host_*` too: that those are read by the CPU is between the plugin and its caller."""
        self._key(name)
        return trt.TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name, profile_index):
        assert profile_index == 0, "there is one profile"
        return [trt.Dims(shape) for shape in self._program.profiles[name]]

    @property
    def device_memory_size_v2(self):
        """Activations at the largest shapes."""
        width = 0
        for node in self._program.needed():
            width += sum(node.settings.get("widths", {}).values())
        return 2 * width * self._program.about["max_num_tokens"]

    def _key(self, name):
        return name if name in self._program.inputs else self._program.outputs[name]


class _Context:
    """Shapes of the next pass."""

    def __init__(self, program):
        self.program, self.shapes = program, {}

    def set_input_shape(self, name, shape):
        """Whether the shape fits the profile."""
        shape, (least, _, most) = tuple(shape), self.program.profiles[name]
        fits = len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
        if fits:
            self.shapes[name] = shape
        return fits

    def sizes(self):
        """T and B. Raises ValueError."""
        return self.program.sizes(self.shapes)


class Session:
    """An engine on the card."""

    def __init__(self, **kwargs):
        raise NotImplementedError("use Session.from_serialized_engine")

    @staticmethod
    def from_serialized_engine(engine):
        """Put an engine on the card. Raises RuntimeError if it was built for something else or does not fit."""
        card = STATE.needs_card()
        program = Program.from_bytes(engine)
        here = {
            "release": tensorrt_llm.__version__,
            "tensorrt": trt.__version__,
            "card": [card.device.name, card.device.compute_capability],
        }
        for name, value in here.items():
            if program.about[name] != value:
                found = program.about[name]
                raise RuntimeError(f"stand-in TensorRT: deserialisation failed: {name} is {value}, engine has {found}")
        session = object.__new__(Session)
        session._engine, session._context = _Engine(program), _Context(program)
        session._started = session._finished = 0
        weights = sum(tensor.numel() * tensor.element_size() for tensor in program.weights.values())
        nbytes = weights + session._engine.device_memory_size_v2
        try:
            card.take(nbytes)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"stand-in TensorRT: Error Code 2: OutOfMemory ({error})") from None
        weakref.finalize(session, card.give, nbytes).atexit = False
        session._execution = Execution(program)
        return session

    @property
    def engine(self):
        """For introspection."""
        return self._engine

    @property
    def context(self):
        """Shapes of the next pass."""
        return self._context

    @property
    def context_mem_size(self):
        """Bytes of activations."""
        return self._engine.device_memory_size_v2

    def infer_shapes(self, inputs, context=None):
        """Set the inputs' shapes and say what comes out."""
        for info in inputs:
            if self._engine.get_tensor_mode(info.name) is not trt.TensorIOMode.INPUT:
                raise ValueError(f"Tensor:{info.name} is not an input tensor")
            if self._engine.get_tensor_dtype(info.name) is not info.dtype:
                raise ValueError(f"Tensor:{info.name} has wrong dtype {info.dtype}")
            if not self._context.set_input_shape(info.name, info.shape):
                profile = self._context.program.profiles[info.name]
                raise RuntimeError(f"Could not set shape {tuple(info.shape)} for tensor {info.name}: profile {profile}")
        sizes, program = self._context.sizes(), self._context.program
        return [
            TensorInfo(name, self._engine.get_tensor_dtype(name), trt.Dims(program.shape(key, sizes)))
            for name, key in program.outputs.items()
        ]

    def set_shapes(self, tensor_dict, context=None):
        """Set the inputs' shapes from tensors."""
        for name in self._context.program.inputs:
            if not self._context.set_input_shape(name, tuple(tensor_dict[name].shape)):
                raise ValueError(f"Couldn't assign {name} with shape {tuple(tensor_dict[name].shape)}")

    def run(self, inputs, outputs, stream, context=None):
        """Queue one pass on a raw stream; False if TensorRT would not take it."""
        card, program = STATE.needs_card(), self._context.program
        queue = card.stream_of(stream)
        card.check()
        given = {**inputs, **outputs}
        for name in [*program.inputs, *program.outputs]:
            if name not in given or given[name].numel() == 0:
                return False
        if set(self._context.shapes) != set(program.inputs):
            return False
        sizes = self._context.sizes()
        host, device = {}, {}
        for name in program.inputs:
            value = program.values[name]
            count, dtype = math.prod(self._context.shapes[name]), str_dtype_to_torch(value.dtype)
            if name.startswith("host_"):
                host[name] = self._read_on_host(card, name, given[name], dtype, count)
            else:
                device[name] = _Address(card, name, given[name], dtype, self._context.shapes[name])
        if (host["host_request_types"] != CONTEXT_PHASE).any() and not program.about["use_cache"]:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: KV-cache-less is only supported for context")
        results = {}
        for name, key in program.outputs.items():
            dtype = str_dtype_to_torch(program.values[key].dtype)
            results[name] = _Address(card, name, given[name], dtype, program.shape(key, sizes))
        self._started += 1
        number, execution = self._started, self._execution
        session = weakref.ref(self)

        def work():
            owner = session()
            if owner is None:
                raise DeviceFault("an illegal memory access was encountered (stand-in: the session is gone)")
            overlapping = number != owner._finished + 1
            owner._finished += 1
            tensors = {name: address.tensor() for name, address in device.items()}
            found = execution({**tensors, **host})
            for name, address in results.items():
                target = address.tensor()
                target.copy_(torch.full_like(target, float("nan")) if overlapping else found[name])

        queue.enqueue(work)
        return True

    @staticmethod
    def _read_on_host(card, name, tensor, dtype, count):
        if card.where(tensor) == "card":
            card.broken = f"segmentation fault (stand-in: {name} is on the card, and the CPU reads it)"
            card.check()
        start, available = tensor.storage_offset() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if start + count * dtype.itemsize > available:
            card.broken = f"segmentation fault (stand-in: {name} has fewer than {count} elements)"
            card.check()
        data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (count * dtype.itemsize,))
        return data.clone().view(dtype)


class _Address:
    """Memory that a pass will find, or not, when it is done."""

    def __init__(self, card, name, tensor, dtype, shape):
        self.name, self.dtype, self.shape, self.where = name, dtype, tuple(shape), card.where(tensor)
        storage = tensor.untyped_storage()
        self.region = card.region(storage.data_ptr())
        self.start = tensor.storage_offset() * tensor.element_size()

    def tensor(self):
        """The memory as type and shape say, whatever the tensor was."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        buffer = self.region.buffer() if self.where == "card" and self.region is not None else None
        if self.where != "card":
            raise DeviceFault(f"an illegal memory access was encountered (stand-in: {self.name} is not on the card)")
        if not isinstance(buffer, np.ndarray):
            raise DeviceFault(f"an illegal memory access was encountered (stand-in: {self.name} was freed)")
        if self.start + nbytes > self.region.nbytes:
            raise DeviceFault(f"an illegal memory access was encountered (stand-in: {self.name} is too short)")
        if self.start % self.dtype.itemsize:
            raise DeviceFault(f"misaligned address (stand-in: {self.name})")
        return torch.from_numpy(buffer[self.start : self.start + nbytes]).view(self.dtype).view(self.shape)
