"""The shared memory of one link: where the flags, headers, messages and slots lie.

```
control block of rank 0 | control block of rank 1 | … | slots of parity 0, rank by rank | parity 1
```

Flags are 64-bit words that one rank writes and the others read. The link relies on the memory model
of x86-64 (total store order): a rank that sees a flag sees everything its owner wrote before it. On
other processors the link is not used.

The memory is an anonymous file (`memfd_create`): it has no name in any file system, so nothing
stays behind whatever happens to the ranks, and the size of /dev/shm does not matter.
"""

import ctypes
import mmap
import os
from array import array

import torch
from torch import Tensor

# Words of a control block. A rank's step, its two signatures and its alarm share a cache line, so
# that a reader fetches them together; what a rank writes while it waits lies on another.
STEP = 0
SIGNATURE = 1  # and 2: one per parity
ALARM = 3
ASLEEP = 8
MESSAGE_BYTES = 16
HEADER = 32  # 64 words per parity
HEADER_WORDS = 64
MESSAGE = 256
CONTROL_WORDS = 1024
MAX_MESSAGE = (CONTROL_WORDS - MESSAGE) * 8

SEGMENT_BYTES = 16 << 20
MAX_SLOT_BYTES = 2 << 20
PAGE = 4096


def slot_bytes(size: int) -> int:
    """Bytes of one slot in a link of `size` ranks: the segment stays within 16 MB."""
    share = (SEGMENT_BYTES - size * CONTROL_WORDS * 8) // (2 * size)
    return min(MAX_SLOT_BYTES, share // PAGE * PAGE)


def segment_bytes(size: int) -> int:
    """Bytes of the whole segment of a link of `size` ranks."""
    return size * CONTROL_WORDS * 8 + 2 * size * slot_bytes(size)


class Segment:
    """One rank's mapping of the shared memory.

    Attributes:
        words: The control blocks as 64-bit words.
        address: Address of the first word in this process.
        slot_bytes: Bytes of one slot.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.slot_bytes = slot_bytes(size)
        self._map = mmap.mmap(descriptor, segment_bytes(size))
        self.words = memoryview(self._map)[: size * CONTROL_WORDS * 8].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Drop the mapping; the memory goes when the last view of it does."""
        self.words = memoryview(bytearray(0)).cast("q")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        del self._map

    def slot(self, parity: int, rank: int, dtype: torch.dtype) -> Tensor:
        """The slot of a rank as a flat tensor."""
        start = self.size * CONTROL_WORDS * 8 + (parity * self.size + rank) * self.slot_bytes
        with torch.inference_mode(False):
            return self._bytes[start : start + self.slot_bytes].view(dtype)

    def write_header(self, rank: int, parity: int, row: list[int]) -> None:
        """Store the header of a rank's next step."""
        start = rank * CONTROL_WORDS + HEADER + parity * HEADER_WORDS
        self.words[start : start + len(row)] = memoryview(array("q", row))

    def read_header(self, rank: int, parity: int) -> list[int]:
        """The header a rank stored for the step of this parity."""
        start = rank * CONTROL_WORDS + HEADER + parity * HEADER_WORDS
        return self.words[start : start + HEADER_WORDS].tolist()

    def write_message(self, rank: int, message: str) -> None:
        """Store a rank's message for the others, cut to what fits."""
        text = message.encode()[:MAX_MESSAGE]
        base = rank * CONTROL_WORDS
        self.words[base + MESSAGE : base + CONTROL_WORDS] = memoryview(
            array("q", text.ljust(MAX_MESSAGE, b"\0"))
        )
        self.words[base + MESSAGE_BYTES] = len(text)

    def read_message(self, rank: int) -> str:
        """The message a rank stored."""
        base = rank * CONTROL_WORDS
        text = self.words[base + MESSAGE : base + CONTROL_WORDS].tobytes()
        return text[: self.words[base + MESSAGE_BYTES]].decode(errors="replace")


def create(size: int) -> int:
    """A new anonymous file of the right length; returns its descriptor."""
    descriptor = os.memfd_create("plait-link", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, segment_bytes(size))
    return descriptor
