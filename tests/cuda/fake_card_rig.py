"""A card that is not there: torch's fake tensors of device "cuda" check every operation, and count what is alive.

A fake tensor has sizes, strides, a type and a device, and no memory. Every operation on it runs torch's own checks of
these (the "meta" functions, which repeat most of what a card's kernels demand), and whatever would ask the card for a
number, or mix it with host memory, raises. So the decoder runs here by the branches that a card takes, in sizes that no
test machine holds. What kernels compute, and how fast, it cannot say.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.attention.varlen  # its operation registers with a scan of the caller's frame, which no mode should see
from cuda_rig import CARD, LLAMA_8B, contract
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from extract.cpu.architecture import Architecture, LayerKind, Rotary
from extract.cpu.weights import scales_of, tensor_shapes
from extract.cuda.decoder import PackedDecoder
from extract.cuda.host_card import HostCard, HostStream
from extract.cuda.region_variants import regions_of
from extract.cuda.runtime import CudaRuntime
from extract.cuda.weights import Precision, _Assembly
from extract.engine.contract import Contract

Seen = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
BITS = {np.dtype(np.uint16): torch.bfloat16, np.dtype(np.uint8): torch.float8_e4m3fn}


class Meter(TorchDispatchMode):
    """Bytes of the card's tensors that are alive, and the most there were.

    Attributes:
        held, peak: bytes; the peak is since `reset`.
        seen: called with each operation before it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.seen: list[Seen] = []
        self._alive: set[int] = set()
        self._hidden = 0

    def reset(self) -> None:
        """Forget the peak."""
        self.peak = self.held

    @contextmanager
    def inside_a_kernel(self) -> Iterator[None]:
        """What is made in here is never in memory, but for what `count` is told of."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def count(self, found: Any) -> None:
        """Tensors that are in memory from now on, until nobody refers to them."""
        for one in tree_leaves(found):
            if isinstance(one, FakeTensor) and one.device.type == "cuda":
                self._count(one.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for look in self.seen:
            look(func, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        if not self._hidden:
            self.count(found)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.held -= size


class Indexed(TorchFunctionMode):
    """`tensor[...]` as the operations that it is made of.

    Python's brackets first make a tensor's card the current one, which a torch without CUDA refuses even for fakes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            view, indices = _viewed(*args)
            return torch.ops.aten.index(view, indices) if any(one is not None for one in indices) else view
        if func is torch.Tensor.__setitem__:
            view, indices = _viewed(*args[:2])
            if any(one is not None for one in indices):
                return torch.ops.aten.index_put_(view, indices, args[2])
            return view.copy_(args[2])
        return func(*args, **(kwargs or {}))


def _viewed(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that slices, numbers and `None` make, and the index tensors that remain, by dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if ... in keys:
        place = keys.index(...)
        missing = tensor.dim() - sum(one is not None and one is not ... for one in keys)
        keys[place : place + 1] = [slice(None)] * missing
    view, indices = tensor, list[torch.Tensor | None]()
    for one in keys:
        place = len(indices)
        if isinstance(one, int):
            view = view.select(place, one)
            continue
        if one is None:
            view = view.unsqueeze(place)
        elif isinstance(one, slice) and one != slice(None):
            view = torch.ops.aten.slice(view, place, one.start, one.stop, one.step or 1)
        indices.append(one if isinstance(one, torch.Tensor) else None)
    return view, indices


class FakeStream(HostStream):
    """Runs what it is given at once, on tensors of no memory; a copy is only looked at."""

    def __init__(self, card: "FakeCard") -> None:
        self._card = card

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """What a copy between a card and page-locked memory asks: one side each, equal, in one piece."""
        assert {target.device.type, source.device.type} == {"cpu", "cuda"}
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        assert target.is_contiguous() and source.is_contiguous(), "not one copy, and so not behind a pass"

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work()` where every operation is checked and counted."""
        with self._card.used():
            return work()


class FakeCard(HostCard):
    """See `extract.tensorrt.card.Card`."""

    def __init__(self) -> None:
        super().__init__(CARD, 141 * 10**9)
        self.mode, self.meter = FakeTensorMode(), Meter()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Operations in here are the card's: everything that they make is on it."""
        with self.mode, self.meter, Indexed():
            yield

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On the card."""
        with self.used():
            return torch.empty(shape, dtype=dtype, device="cuda")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On the host, and real: flags that come down say that all is well."""
        return torch.ones(shape, dtype=dtype)

    def stream(self) -> FakeStream:
        """A stream."""
        return FakeStream(self)


class _Weights:
    """Tensors of an architecture as a file has them, each of them one number."""

    def __init__(self, architecture: Architecture, *, scaled: bool) -> None:
        self.path = Path("weights that are not there")
        self._shapes = tensor_shapes(architecture, scaled=scaled)
        linears = scales_of(architecture) if scaled else {}
        self._types = dict.fromkeys(linears, np.uint8) | dict.fromkeys(linears.values(), np.float32)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def tensor(self, name: str, shape: Any = None, types: Any = ()) -> Any:
        one = np.ones((), self._types.get(name, np.uint16))
        return np.broadcast_to(one, self._shapes[name])

    def drop(self, *names: str) -> None:
        pass


class _Loader:
    """As `WeightsLoader`: arrays one under the other, on the card."""

    def begin(self, *blocks: Any) -> None:
        pass

    def take(self, *blocks: Any) -> torch.Tensor:
        shape = (sum(len(block) for block in blocks), *blocks[0].shape[1:])
        return torch.empty(shape, dtype=BITS[blocks[0].dtype], device="cuda")


def on_fake_card(
    card: FakeCard, architecture: Architecture, precision: Precision, *, longest: int = 128
) -> PackedDecoder:
    """The decoder that `load_decoder` puts together on a card, with the card's attention."""
    weights: Any = _Weights(architecture, scaled=precision == "fp8")
    loader: Any = _Loader()
    with card.used():
        found = _Assembly(architecture, weights, loader, precision, torch.device("cuda", 0), longest, "varlen")
        return found.decoder().requires_grad_(False).eval()


def fused(decoder: PackedDecoder, meter: Meter) -> PackedDecoder:
    """Regions as one kernel each: memory only for what they return."""
    for region in regions_of(decoder):
        region.forward = _one_kernel(region.forward, meter)
    return decoder


def _one_kernel(plain: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    def run(*inputs: torch.Tensor) -> Any:
        with meter.inside_a_kernel():
            found = plain(*inputs)
        meter.count(found)
        return found

    return run


def llama(**options: Any) -> Architecture:
    """Llama 3.1 8B, two layers of it, with another vocabulary and these differences."""
    return dataclasses.replace(LLAMA_8B, vocab_size=1000, layers=LLAMA_8B.layers[:2], **options)


ARCHITECTURES = {
    "llama": llama(),
    "qwen3": llama(family="qwen3", head_norm="head", intermediate_size=12_288),
    "biases": llama(num_kv_heads=32, intermediate_size=11_008, qkv_bias=True, output_bias=True, mlp_bias=True),
    "gemma3": dataclasses.replace(
        LLAMA_8B,
        family="gemma3_text",
        vocab_size=1000,
        hidden_size=2560,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        intermediate_size=10_240,
        activation="gelu_tanh",
        norms="sandwich",
        norm_plus_one=True,
        head_norm="head",
        embedding_scale=50.6,
        layers=(LayerKind(rotary=0, window=64), LayerKind(rotary=1)),
        rotary=(Rotary(inv_freq=(1.0,) * 128),) * 2,
    ),
    "olmo2": llama(family="olmo2", norms="post", head_norm="projection", num_kv_heads=32, intermediate_size=11_008),
}
"""Two layers each: all layers are alike, but for the last."""


def fake_runtime(
    card: FakeCard, decoder: PackedDecoder, *, pass_tokens: int, share: bool = True, longest: int = 128
) -> CudaRuntime:
    """The runtime around it: its passes, uploads and downloads."""
    precision: Any = decoder.precision
    found: Contract = contract(decoder.architecture, precision, pass_tokens=pass_tokens, longest=longest)
    return CudaRuntime(found, decoder, card, share=share)
