"""Random numbers that all ranks of a group share, and those that each draws for itself.

A tensor that every rank holds whole must lose the same elements to a dropout on all of them; of a
split one, each rank must drop its own. So torch's default generators follow one of two streams: the
*shared* one, equal on all ranks of a group, or the rank's *own* one.

Which of the two it is stands in the generator itself, in the top byte of its seed. Whoever restores
a generator's state, as a recomputation in the backward does, restores that too, and a stream
that is left half way by an exception ends where the generator is set back. Nothing else remembers
it. An own stream is made of one number drawn from the shared stream and the rank; the shared stream
goes on from a seed made of the same number, however many numbers each rank drew in between.
"""

import random
import sys
from typing import Any

import torch

SHARED = 0xA6
"""Top byte of the seed of a shared stream."""

OPENED = 0xB5
"""… of a rank's own stream that a split layer began, and that the layer behind it ends."""

HELD = 0xC9
"""… of a rank's own stream that lasts until the end of a block of code."""

RandomStates = tuple[torch.Tensor, torch.Tensor | None, Any, Any]

_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1
_RANKS = (1 << 12) - 1


def mixed(number: int, salt: int = 0) -> int:
    """A number of 64 bits that looks unrelated to its arguments.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014): the
    finaliser of SplitMix64.
    """
    x = (number + (salt + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def drawn() -> int:
    """One number of 63 bits from the default generator of the CPU."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def current() -> int:
    """The kind of stream that the default generators follow, or another byte: neither."""
    return torch.default_generator.initial_seed() >> 56


def follow_shared(number: int) -> None:
    """Follow the shared stream of a number from here on."""
    _seed(SHARED, mixed(number))


def begin_own(rank: int, kind: int = OPENED) -> bool:
    """Leave the shared stream for this rank's own.

    Args:
        rank: The rank's place in the group.
        kind: `OPENED` or `HELD`.

    Returns:
        Whether there was a shared stream to leave. If not, nothing has been done.
    """
    if current() != SHARED:
        return False
    number, place = drawn() & ((1 << 44) - 1), rank & _RANKS
    # The CPU's generator uses the lower half of its seed only: that is what must differ by rank.
    _seed(kind, (number >> 32 << 44) | (place << 32) | ((number ^ _key(place)) & _LOW))
    return True


def end_own(kind: int = OPENED) -> bool:
    """Go back to the shared stream.

    Args:
        kind: The kind of own stream that is to end.

    Returns:
        Whether there was one. If not, nothing has been done.
    """
    seed = torch.default_generator.initial_seed()
    if seed >> 56 != kind:
        return False
    upper, place = (seed >> 44) & _RANKS, (seed >> 32) & _RANKS
    follow_shared((upper << 32) | ((seed ^ _key(place)) & _LOW))
    return True


def seed_others(number: int) -> None:
    """Begin Python's and numpy's random numbers anew, where numpy is in use."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


def saved() -> RandomStates:
    """The states of the generators: the CPU's, the current CUDA device's, Python's, numpy's."""
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if on_cuda else None,
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
    )


def restore(states: RandomStates) -> None:
    """Set the generators back to what `saved` returned."""
    on_cpu, on_cuda, of_python, of_numpy = states
    torch.set_rng_state(on_cpu)
    if on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _key(place: int) -> int:
    return (place + 1) * 0x9E3779B1 & _LOW  # an odd factor: no two ranks have the same


def _seed(kind: int, number: int) -> None:
    seed = (kind << 56) | (number & ((1 << 56) - 1))
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
