"""A program: damages a checkpoint's header again and again and reads what is left, with little memory to spare. It judges nothing; it prints one
JSON object a damage: {"damage", "outcome", "message"}.

    read_damaged.py KIND OPENED FILE FIRST COUNT

KIND: gguf or safetensors. OPENED: what is opened. FILE: the intact file in it, which is damaged in place. Damages FIRST .. FIRST + COUNT are drawn,
each from its own number. outcome: "read", or the name of whatever was raised. A single damage that takes longer than HANG_S ends the program.
"""

from __future__ import annotations

import faulthandler
import json
import math
import resource
import sys
import traceback
from pathlib import Path

import numpy as np
from header_damage import DAMAGES

from lockstep.weights import open_checkpoint

# What a reader may take beside what the program has when it starts: many times a file of 300 kB and its values in float32.
MEMORY_SPARE_BYTES = 64 << 20
HANG_S = 60


def limit_memory() -> None:
    """No more address space than now and MEMORY_SPARE_BYTES: what wants more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def read_everything(path: Path, file_bytes: int) -> None:
    """Every tensor, and every value of a GGUF file's metadata. Asserts what holds of any file: the tensors fit the shapes that are told, and take no
    more bytes together than the file has."""
    checkpoint = open_checkpoint(path)
    values = 0
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        assert tensor.dtype == np.float32
        assert tensor.shape == checkpoint.shape(name)
        assert tensor.size == math.prod(tensor.shape)
        float(tensor.sum(dtype=np.float64))
        values += tensor.size
    # No format that is read has less than 2.5 bits a value.
    assert values * 2.5 / 8 <= file_bytes
    source = checkpoint.tokenizer_source
    if not isinstance(source, Path):
        assert len(list(source.values())) == len(source)


def main() -> None:
    kind, opened, file, first, count = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    raw = file.read_bytes()
    read_everything(opened, len(raw))
    names = list(DAMAGES[kind])
    limit_memory()
    for number in range(first, first + count):
        name = names[number % len(names)]
        damaged = DAMAGES[kind][name](raw, np.random.default_rng([number, 7]))
        file.write_bytes(damaged)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        outcome, message = "read", ""
        try:
            with np.errstate(all="ignore"):
                read_everything(opened, len(damaged))
        except BaseException as error:
            outcome, message = type(error).__name__, str(error) or traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"damage": name, "outcome": outcome, "message": message}), flush=True)


if __name__ == "__main__":
    main()
