"""What this processor can run. Knows names of instruction sets; does not know what the kernels compute with them."""

from __future__ import annotations

from lockstep.backends.native import _kernels
from lockstep.errors import ConfigError


def cpu_features() -> dict[str, bool]:
    """The features that the kernels look for, by their usual names, and whether processor and operating system both offer them."""
    return dict(_kernels.cpu_features())


def instruction_sets() -> tuple[str, ...]:
    """Kernel sets that run here, best first; the last is always 'portable'."""
    return tuple(_kernels.instruction_sets())


def choose_instruction_set(wanted: str | None) -> str:
    """`wanted`, or the best one if it is None. Raises ConfigError if this processor cannot run it."""
    usable = instruction_sets()
    if wanted is None:
        return usable[0]
    if wanted not in usable:
        raise ConfigError(f"instruction set {wanted!r} cannot be used on this processor; choose one of {', '.join(usable)}, or none for the first")
    return wanted
