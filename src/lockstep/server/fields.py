"""Request fields that Lockstep does not implement: which may be ignored and which must be refused.

Knows names that OpenAI's and vLLM's clients send; does not know the fields that are implemented. The rule: a field that could change the tokens is
never ignored in silence. It passes only at the value at which it changes nothing; so does `null`, everywhere. A name that nobody knows is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from lockstep.errors import InvalidRequestError

# They say who asks, or how to bill, cache or log; no token depends on them.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "request_id",
    }
)

# The values at which a field that is not implemented asks for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "audio": (),
        "cache_salt": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "kv_transfer_params": (),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_embeds": (),
        "reasoning_effort": (),
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "verbosity": (),
        "web_search_options": (),
    }
)


def refuse_unserved(fields: Mapping[str, object], served: Collection[str]) -> None:
    """Raise InvalidRequestError for the first of `fields` that is not in `served` and that might change the answer."""
    for name, value in fields.items():
        if name in served or name in HARMLESS or value is None:
            continue
        if name == "best_of":
            _refuse_best_of(value, fields.get("n"))
        elif name not in NEUTRAL:
            raise InvalidRequestError(f"{name!r} is not a field of this endpoint; leave it out", param=name)
        elif value not in NEUTRAL[name]:
            neutral = " or ".join(repr(v) for v in NEUTRAL[name])
            remedy = f"leave it out or set it to {neutral}" if neutral else "leave it out"
            raise InvalidRequestError(f"{name} is not supported, and ignoring it could change the answer; {remedy}", param=name)


def _refuse_best_of(best_of: object, n: object) -> None:
    if best_of != (1 if n is None else n):
        raise InvalidRequestError("best_of other than n is not supported; leave it out and ask for n choices", param="best_of")
