"""What a caller may ask of one request. Knows ranges; does not know vocabularies, windows or tokenizers.

Names and defaults are vLLM's `SamplingParams`, so that scripts move over unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from lockstep.errors import InvalidRequestError

SEED_LIMIT = 1 << 64
BIAS_LIMIT = 100.0
BIASES_MAX = 1024
BAD_WORDS_MAX = 1024
PENALTY_LIMIT = 2.0
PENALTY_LEAST = 0.01
"""A repetition penalty much smaller makes infinite logits in float32."""

SPELLINGS_MAX = 3 * BAD_WORDS_MAX
"""Of all bad words: as it stands, without its spaces, behind one."""

EXTRA_ARGS_BYTES_MAX = 16 << 10
"""As JSON: every replica of the log keeps them, and they are read anew at every token."""

LOGPROBS_MAX = 20
CHOICES_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like: exactly one of the first five.

    json: a JSON schema, as an object or as its text. regex: all of the answer matches it. choice: the answer is one of these strings.
    grammar: EBNF, in the form of Lark or GBNF. json_object: any JSON object. disable_any_whitespace: JSON without white space between its parts;
    whitespace_pattern: with this between them.

    Raises InvalidRequestError.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            raise _unstructured(f"must have one of {', '.join(_STRUCTURES)}, got {' and '.join(self._given()) or 'none of them'}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs", self.choice))
            if not self.choice:
                raise _unstructured("must have at least one choice")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), (str, NoneType)) or getattr(self, name) == "":
                raise _unstructured(f"must have a non-empty string for {name}, got {getattr(self, name)!r:.200}")
        if not isinstance(self.json, (str, Mapping, bool, NoneType)):
            raise _unstructured(f"must have a JSON schema for json, as an object or as its text, got {self.json!r:.200}")

    def _given(self) -> list[str]:
        return [name for name in _STRUCTURES if getattr(self, name) is not None and not (name == "json_object" and self.json_object is False)]

    @property
    def kind(self) -> str:
        """Which of the five it is, in words."""
        return _STRUCTURES[self._given()[0]]

    @staticmethod
    def of(value: object) -> StructuredOutputsParams | None:
        """value: one of these, a mapping with its fields, or None. Raises InvalidRequestError."""
        if value is None or isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping):
            raise _unstructured(f"must be an object with one of {', '.join(_STRUCTURES)}, got {value!r:.200}")
        known = StructuredOutputsParams.__dataclass_fields__
        for name, given in value.items():
            if name not in known and given is not None:
                raise _unstructured(f"has no field {name!r:.60}; there are {', '.join(known)}")
        return StructuredOutputsParams(**{name: given for name, given in value.items() if given is not None})


_STRUCTURES = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices", "grammar": "grammar", "json_object": "JSON object"}


def _unstructured(words: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs {words}", param="structured_outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    n: independent choices for the prompt; choice i of a seeded request samples with seed + i.
    temperature: 0 is greedy (the lowest id wins a tie); otherwise logits are divided by it.
    top_p, min_p: in (0, 1] and [0, 1]; top_k: 0 or -1 keeps all. They filter in the order min_p, top_k, top_p after the temperature.
    seed: 0 <= seed < 2**64 (negative values are taken modulo 2**64, as numpy's int64 seeds are); None draws one from the operating system at
    admission.
    max_tokens: most tokens to generate; None means up to the model's window.
    stop: strings that end the answer; they are not part of the text unless include_stop_str_in_output.
    stop_token_ids: token ids that end the answer; ignore_eos: the model's own end tokens do not.
    min_tokens: of output before any of the above may end it: until then no end or stop token is chosen, and stop strings are not looked for.
    repetition_penalty: 0.01 to 2; logits of tokens of prompt and output so far are divided by it where positive, else multiplied.
    presence_penalty, frequency_penalty: -2 to 2; taken from the logits of tokens of the output so far, once, or once for each time it is there.
    logit_bias: token id -> added to its logit, -100 to 100. allowed_token_ids: only these are chosen; None allows all.
    bad_words: strings that the answer does not come to hold (as the tokenizer spells them, also behind a space); bad_words_token_ids: the same as
    token ids, which whoever has the tokenizer fills in.
    logprobs: None, or how many of the best alternatives (0..20) to report beside each sampled token's log probability.
    prompt_logprobs: the same for each token of the prompt but the first.
    structured_outputs: what the answer must look like; a mapping becomes a `StructuredOutputsParams`.
    extra_args: arguments of logits processors that the engine has loaded, by name: numbers, texts, true, false, or lists of these.
    skip_special_tokens: leave special tokens out of the text.

    Raises InvalidRequestError naming the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, CHOICES_MAX)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1, got 0; for greedy decoding use temperature=0", param="top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, (1 << 31) - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, LOGPROBS_MAX)
        self._check_shaping()
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        object.__setattr__(self, "extra_args", _extra_args(self.extra_args))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be true or false, got {value!r}", param=name)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) and self.stop else _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    def _check_shaping(self) -> None:
        _integer("min_tokens", self.min_tokens, 0, (1 << 31) - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}", param="min_tokens")
        _number("repetition_penalty", self.repetition_penalty, PENALTY_LEAST, PENALTY_LIMIT)
        _number("presence_penalty", self.presence_penalty, -PENALTY_LIMIT, PENALTY_LIMIT)
        _number("frequency_penalty", self.frequency_penalty, -PENALTY_LIMIT, PENALTY_LIMIT)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids must not be empty; leave it out to allow all", param="allowed_token_ids")
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        if len(self.bad_words) > BAD_WORDS_MAX:
            raise InvalidRequestError(f"bad_words must be at most {BAD_WORDS_MAX} strings, got {len(self.bad_words)}", param="bad_words")
        words = self.bad_words_token_ids
        if not isinstance(words, Sequence) or len(words) > SPELLINGS_MAX or not all(words):
            raise InvalidRequestError(f"bad_words_token_ids must be at most {SPELLINGS_MAX} lists of token ids", param="bad_words")
        object.__setattr__(self, "bad_words_token_ids", tuple(_token_ids("bad_words_token_ids", word) for word in words))


def _extra_args(value: object) -> Mapping[str, Any] | None:
    """A copy. An argument that is None is as good as left out."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise _unfit_arguments(f"must be a mapping of names to values, got {value!r:.200}")
    found: dict[str, Any] = {}
    for name, given in value.items():
        several = isinstance(given, (list, tuple))
        if given is not None and not all(map(_is_plain, given if several else [given])):
            raise _unfit_arguments(f"must have numbers, texts, true, false or lists of these for values, got {given!r:.200} for {name!r:.60}")
        if given is not None:
            found[name] = list(given) if several else given
    size = len(json.dumps(found))
    if size > EXTRA_ARGS_BYTES_MAX:
        raise _unfit_arguments(f"must have at most {EXTRA_ARGS_BYTES_MAX} bytes as JSON, got {size}")
    return found or None


def _is_plain(value: object) -> bool:
    """JSON has it, and no reader of JSON takes it for something else."""
    if isinstance(value, (bool, str)):
        return True
    return -(1 << 63) <= value < 1 << 63 if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)


def _unfit_arguments(words: str) -> InvalidRequestError:
    return InvalidRequestError(f"extra_args {words}", param="extra_args")


def _biases(value: object) -> Mapping[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > BIASES_MAX:
        raise InvalidRequestError(
            f"logit_bias must be a mapping of at most {BIASES_MAX} token ids to numbers, got {value!r:.200}", param="logit_bias"
        )
    found: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        _integer("logit_bias", token, 0, (1 << 31) - 1)
        _number("logit_bias", bias, -BIAS_LIMIT, BIAS_LIMIT)
        found[token] = float(bias)
    return found


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
    if strings is None or not all(isinstance(s, str) and s for s in strings):
        raise InvalidRequestError(f"{name} must be a list of non-empty strings, got {value!r:.200}", param=name)
    return strings


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {value!r:.200}", param=name)
    for item in value:
        _integer(name, item, 0, (1 << 31) - 1)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {value!r}", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}", param=name)
