"""How byte-level BPE vocabularies cut a text before they merge: what a name in a GGUF file's `tokenizer.ggml.pre` stands for.
Knows names and regular expressions; does not know vocabularies.

The names and what they mean are defined by llama.cpp (src/llama-vocab.cpp). Its expressions are rewritten for an engine without \\p{Lu} and (?i: );
those here are the ones of the models' own tokenizer.json, which llama.cpp's source quotes beside them. Each expression of a cut divides the parts
that the one before it left into matches and what lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from lockstep.errors import UnsupportedError

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
# GPT-2's own: contractions, letters, numbers and the rest, each with a space before it.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
# Capitals that go on in small letters are one part (o200k and Tekken).
_CASED_HEAD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
_HAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK3_WORDS = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
# Letters that have a case, as DeepSeek's first tokenizer lists them.
_CASED_RANGES = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556
    10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B
    1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115
    2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2
    10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_PUNCTUATION_RANGES = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"


def _cl100k(digits: str, *, letters: str = r"\p{L}", suffixes: str = _SUFFIXES, marks: str = "") -> str:
    """The cut of cl100k and its heirs: words with one character before them, digits, punctuation with line ends, line ends, spaces."""
    return rf"{suffixes}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"


def _cased(digits: str, suffixes: str = "") -> str:
    return rf"{_CASED_HEAD}*{_CASED_TAIL}+{suffixes}|{_CASED_HEAD}+{_CASED_TAIL}*{suffixes}|{digits}{_CASED_END}"


def _one_of(ranges: str) -> str:
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in ranges.split()) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """expressions: applied in turn. words_first: a part that is a token as a whole is that token, whatever the merges make of it. adds_bos: where
    the file does not say. composes: text is put into Unicode's form NFC first, as the models' own tokenizer.json has it."""

    expressions: tuple[str, ...]
    words_first: bool = False
    adds_bos: bool = False
    composes: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composes else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cuts, then spells every byte as a character."""
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*map(_split, self.expressions), spelling])


def _split(expression: str) -> pre_tokenizers.PreTokenizer:
    if expression == _DIGIT:  # what these models' own files have, and much faster
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(expression), "isolated")


_THREE_DIGITS = Cut(expressions=(_cl100k(r"\p{N}{1,3}"),))
_ONE_DIGIT = Cut(expressions=(_cl100k(r"\p{N}"),))
_O200K = Cut(expressions=(_cased(r"\p{N}{1,3}", _SUFFIXES + "?"),))
_DEEPSEEK3 = Cut(expressions=(r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK3_WORDS))
_LLAMA3 = Cut(expressions=_THREE_DIGITS.expressions, words_first=True, adds_bos=True)
_WORDS = Cut(expressions=(_GPT2,))
_DIGITS_AND_WORDS = Cut(expressions=(_DIGIT, _GPT2))
_BAILING = Cut(expressions=(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES,))

_BY_CUT: tuple[tuple[Cut, str], ...] = (
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_THREE_DIGITS, "dbrx smaug-bpe glm4 chatglm-bpe"),
    (Cut(expressions=_ONE_DIGIT.expressions, composes=True), "qwen2"),
    (_ONE_DIGIT, "deepseek-r1-qwen kormo megrez hunyuan solar-open grok-2 stablelm2"),
    (Cut(expressions=(_cl100k(r"\p{N}", letters=r"[\p{L}\p{M}]", marks=r"\p{M}"),), composes=True), "qwen35"),
    (_O200K, "gpt-4o llama4 kanana2 minimax-m2"),
    (Cut(expressions=(_cased(r"\p{N}"),), words_first=True, adds_bos=True), "tekken"),
    (
        Cut(expressions=(r"[\r\n]", rf"\s?{_one_of(_CASED_RANGES)}+", rf"\s?{_one_of(_PUNCTUATION_RANGES)}+", r"\s+$", _HAN, r"\p{N}+")),
        "deepseek-llm",
    ),
    (Cut(expressions=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, _DIGIT)), "deepseek-coder"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_WORDS, "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum"),
    (_DIGITS_AND_WORDS, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (Cut(expressions=(r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (Cut(expressions=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
)  # fmt: skip
CUTS: dict[str, Cut] = {name: cut for cut, names in _BY_CUT for name in names.split()}


def cut_named(name: object) -> Cut:
    """name: the file's `tokenizer.ggml.pre`, or None where it has none: files older than May 2024, of which nothing says how they cut.
    Raises UnsupportedError."""
    cut = CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise UnsupportedError(
            f"tokenizer.ggml.pre {name!r} is not supported; supported are {', '.join(CUTS)}: convert the model anew, or use its Hugging Face folder"
        )
    return cut
