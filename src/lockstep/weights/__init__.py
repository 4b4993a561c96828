"""Checkpoint files: bytes to named float32 arrays. Knows formats and names; does not know what a model computes.

checkpoint   the protocol, and `open_checkpoint` / `find_model`
folder       a Hugging Face folder: config.json and safetensors
gguf_model   GGUF files in Hugging Face names and row order
"""

from lockstep.weights.checkpoint import Checkpoint, find_model, open_checkpoint

__all__ = ["Checkpoint", "find_model", "open_checkpoint"]
