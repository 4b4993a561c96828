"""Checkpoint files: bytes to named float32 arrays. Knows formats and names; does not know what a model computes.

checkpoint   the protocol, and `open_checkpoint` / `find_model`
folder       a Hugging Face folder: config.json and safetensors
gguf_model   GGUF files in Hugging Face names and row order
hub          models by Hugging Face name; the only module that loads huggingface_hub, with `hub_errors`
"""

from lockstep.weights.checkpoint import Checkpoint, find_model, open_checkpoint
from lockstep.weights.hub_names import HubOptions, parse_hub_name

__all__ = ["Checkpoint", "HubOptions", "find_model", "open_checkpoint", "parse_hub_name"]
