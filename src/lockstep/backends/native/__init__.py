"""The C++ CPU backend: row-invariant kernels behind `ops.backend.Backend`, one call from Python a step.

Importing this loads the extension and nothing else of weight; torch is never imported.
"""

from lockstep.backends.native._kernels import philox4x32
from lockstep.backends.native.backend import NativeBackend
from lockstep.backends.native.processor import cpu_features, instruction_sets

__all__ = ["NativeBackend", "cpu_features", "instruction_sets", "philox4x32"]
