"""Weights from a file to a card at the speed of the disk: several threads read, into pinned memory, while copies run.

`tensor.to("cuda")` of a mapped file waits for each page, copies it into the driver's own buffer, and waits again: a
tenth of what the bus carries. Here threads read pieces straight into a few pinned buffers (no page faults, no further
copy) and hand each to a stream of its own. The next tensors are read while the last ones are used (`begin` before
`take`). Arrays that one product takes are read into one tensor, each to its place, so nothing is joined afterwards. On
a CPU the same threads fill the same buffers, unpinned, so that the tests run what a card runs.
"""

import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch

from extract.cpu.kernels import Weights
from extract.cpu.mapped_weights import WeightsFile
from extract.cuda.fp8 import FP8
from extract.errors import EngineRefused

PIECE_BYTES = 16 * 2**20
"""Read at once by one thread."""
MOST_THREADS = 8
"""More do not read faster: a few cores saturate the memory."""


class WeightsCut(EngineRefused):
    """The weights file became shorter while it was read."""

    template = "{path}: {found:,} bytes read at byte {start:,}, {expected:,} expected. Copy the engine again."


class WeightsLoader:
    """Reads arrays of a mapped weights file into tensors on a device.

    Args:
        weights: the file; only arrays that lie in it are read.
        device: where tensors go.
        threads: that read; `None`: as many as this process may use, at most `MOST_THREADS`.
        piece_bytes: of a buffer; there are two a thread.

    Attributes:
        num_bytes: read so far.
    """

    def __init__(
        self,
        weights: WeightsFile,
        device: torch.device,
        *,
        threads: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        threads = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self.num_bytes = 0
        self._weights, self._device, self._piece_bytes = weights, device, piece_bytes
        self._on_card = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_card else None  # type: ignore[no-untyped-call]
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for _ in range(2 * threads):
            self._free.put(_Buffer(piece_bytes, pinned=self._on_card))
        self._file = os.open(weights.path, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="extract-weights")
        self._begun: dict[_Blocks, tuple[torch.Tensor, list[Future[torch.cuda.Event | None]]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and close the file; tensors that were taken stay."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self._file)

    def begin(self, *blocks: Weights) -> None:
        """Begin to read arrays [N_i, ...] of one type that will soon be taken as one tensor."""
        key = _key(blocks)
        if key in self._begun:
            return
        rows = sum(len(block) for block in blocks)
        tensor = torch.empty((rows, *blocks[0].shape[1:]), dtype=_type_of(blocks[0]), device=self._device)
        flat = tensor.view(-1).view(torch.uint8)
        ready = None
        if self._on_card:  # memory that was just freed may still be read by work that was begun before
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        reads, end = [], 0
        for block in blocks:
            start, end = end, end + block.nbytes
            place = self._weights.place_of(block)
            if place is None:  # a foreign writer did not align it, so it was copied already
                flat[start:end].copy_(torch.from_numpy(block.reshape(-1).view(np.uint8).copy()))
                continue
            pieces, part = range(0, block.nbytes, self._piece_bytes), flat[start:end]
            reads += [self._pool.submit(self._read, part, at, place + at, ready) for at in pieces]
        self._begun[key] = tensor, reads

    def take(self, *blocks: Weights) -> torch.Tensor:
        """The arrays one under the other: a tensor [sum of N_i, ...] on the device, in their own type.

        uint16 is bfloat16, uint8 is E4M3. Work that the current stream gets from now on sees it whole.

        Raises:
            WeightsCut: the file became shorter.
        """
        self.begin(*blocks)
        self.num_bytes += sum(block.nbytes for block in blocks)
        tensor, reads = self._begun.pop(_key(blocks))
        copied = [read.result() for read in reads]
        if self._stream is not None:
            for event in copied:
                assert event is not None
                torch.cuda.current_stream(self._device).wait_event(event)
            tensor.record_stream(self._stream)
        return tensor

    def _read(self, flat: torch.Tensor, at: int, start: int, ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """One piece: file -> buffer -> its place in the tensor; the event after which it is there."""
        size = min(self._piece_bytes, len(flat) - at)
        buffer = self._free.get()
        try:
            buffer.wait()
            self._fill(buffer, start, size)
            if self._stream is None:
                flat[at : at + size].copy_(buffer.memory[:size])
                return None
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if ready is not None:
                    self._stream.wait_event(ready)
                flat[at : at + size].copy_(buffer.memory[:size], non_blocking=True)
                buffer.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                buffer.copied.record(self._stream)
                return buffer.copied
        finally:
            self._free.put(buffer)

    def _fill(self, buffer: "_Buffer", start: int, size: int) -> None:
        done = 0
        while done < size:
            count = os.preadv(self._file, [buffer.view[done:size]], start + done)
            if count == 0:
                raise WeightsCut(path=self._weights.path, start=start, found=done, expected=size)
            done += count


_Blocks = tuple[tuple[int, int], ...]
"""Where each of some arrays lies in memory, and its bytes."""


def _key(blocks: tuple[Weights, ...]) -> _Blocks:
    return tuple((block.ctypes.data, block.nbytes) for block in blocks)


def _type_of(array: Weights) -> torch.dtype:
    """What the bits of an array are."""
    bits = {np.dtype(np.uint16): torch.bfloat16, np.dtype(np.uint8): FP8}
    return bits.get(array.dtype) or torch.from_numpy(np.empty(0, array.dtype)).dtype


class _Buffer:
    """Memory that a thread reads into; `copied` is when the copy out of it is done."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.view = memoryview(cast("Any", self.memory.numpy()))
        self.copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until its last copy has left it."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
