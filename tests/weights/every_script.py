"""Texts of every script, drawn from Unicode's blocks with a seed. Knows ranges of characters; does not know tokenizers."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache

# (first, last) of what each script is written with.
BLOCKS = {
    "latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C88)),
    "armenian, georgian": ((0x531, 0x58F), (0x10A0, 0x10FF), (0x1C90, 0x1CBF)),
    "hebrew": ((0x591, 0x5F4), (0xFB1D, 0xFB4F)),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC)),
    "syriac, thaana, nko": ((0x700, 0x7FA),),
    "devanagari": ((0x900, 0x97F), (0xA8E0, 0xA8FF)),
    "bengali": ((0x980, 0x9FE),),
    "gurmukhi, gujarati, oriya": ((0xA00, 0xB7F),),
    "tamil": ((0xB82, 0xBFA),),
    "telugu, kannada, malayalam, sinhala": ((0xC00, 0xDF4),),
    "thai": ((0xE01, 0xE5B),),
    "lao, tibetan, burmese": ((0xE81, 0xEDF), (0xF00, 0xFDA), (0x1000, 0x109F)),
    "khmer": ((0x1780, 0x17F9), (0x19E0, 0x19FF)),
    "ethiopic, cherokee, mongolian": ((0x1200, 0x137C), (0x13A0, 0x13FD), (0x1800, 0x18AA)),
    "hangul": ((0xAC00, 0xD7A3), (0x1100, 0x11FF), (0x3131, 0x318E)),
    "kana": ((0x3041, 0x309F), (0x30A0, 0x30FF), (0xFF66, 0xFF9D)),
    "han": ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x200FF), (0xF900, 0xFAD9)),
    "old and rare": ((0x10000, 0x100FA), (0x10330, 0x1034A), (0x12000, 0x12399), (0x13000, 0x1342E), (0x1E900, 0x1E95F)),
    "numbers": ((0x30, 0x39), (0xB2, 0xB3), (0xBC, 0xBE), (0x660, 0x669), (0x966, 0x96F), (0x2150, 0x218B), (0x2460, 0x24FF), (0xFF10, 0xFF19)),
    "punctuation and symbols": ((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0xA1, 0xBF), (0x2010, 0x205E), (0x20A0, 0x20C0),
                                (0x2190, 0x22FF), (0x3000, 0x303F), (0xFF01, 0xFF0F)),
    "mathematical letters": ((0x1D400, 0x1D7FF), (0x2100, 0x214F)),
    "emoji": ((0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F900, 0x1F9FF), (0x2600, 0x27BF)),
    "private use": ((0xE000, 0xE0FF), (0xF0000, 0xF00FF), (0x10FF00, 0x10FFFD)),
    "controls": ((0x00, 0x1F), (0x7F, 0x9F)),
    "unassigned": ((0x378, 0x379), (0xFDD0, 0xFDEF), (0x3FFFE, 0x3FFFF), (0xE0080, 0xE00FF)),
}  # fmt: skip
MARKS = tuple(chr(code) for first, last in ((0x300, 0x36F), (0x20D0, 0x20F0), (0xFE20, 0xFE2F)) for code in range(first, last + 1))
DIRECTIONS = tuple("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
SPACES = (
    " ",
    "  ",
    "   ",
    " " * 7,
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\r",
    "\t",
    "\t\t",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u200b",
    "\ufeff",
    "\u2028",
    " \n ",
    "\x85",
)
CODE = (
    "def f(x):\n\treturn x**2  # ok\n\n\nprint(f(3))", "if (a != b && c[i] <= 0x1F) { return -1; }", "SELECT * FROM t WHERE n = 'O''Brien';",
    "<div class=\"a\">&nbsp;</div>",
    "https://example.org/a?b=c&d=%20e#f", '{"a": [1, 2.5e-10, null], "é": "\\ud83d\\ude00"}', "\\u00e9 \\ud83d \\x00 \\N{DASH}",
    "x = y+z; // TODO: it's John's", "v1.2.3-rc4",
    "a_b-c.d/e\\f", "#include <stdio.h>\r\n", "f();\n/// x\n//\n}/\n", "$HOME/${x:-y}", "1,234,567.89 €", "I'M you're IT'S they'LL",
)  # fmt: skip
EMOJI = ("👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷", "1️⃣", "❤️", "🧑🏿‍🚀", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f")


@cache
def characters(block: str) -> tuple[str, ...]:
    """Those that are assigned; of "unassigned" all."""
    found = [chr(code) for first, last in BLOCKS[block] for code in range(first, last + 1)]
    return tuple(character for character in found if block == "unassigned" or unicodedata.category(character) != "Cn")


def texts(count: int, seed: int = 0) -> list[str]:
    """`count` different texts without lone surrogates; each block is in one in twenty-seven, mixtures are in every fourth."""
    draw = random.Random(seed)
    makers: Sequence[Callable[[], str]] = (
        lambda: _words(draw, draw.choice(tuple(BLOCKS))),
        lambda: _words(draw, draw.choice(tuple(BLOCKS))),
        lambda: "".join(draw.choice((_words(draw, block), draw.choice(SPACES))) for block in draw.sample(tuple(BLOCKS), 4)),
        lambda: "".join(
            draw.choice((*SPACES, *CODE, *EMOJI, *DIRECTIONS, _marked(draw), str(draw.randrange(10**9)))) for _ in range(draw.randint(1, 6))
        ),
    )
    found: dict[str, None] = dict.fromkeys(("", *SPACES, *CODE, *EMOJI, *(_words(draw, block) for block in BLOCKS)))
    while len(found) < count:
        found[makers[len(found) % len(makers)]()] = None
    return list(found)[:count]


def _words(draw: random.Random, block: str) -> str:
    letters = characters(block)
    words = ("".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(draw.randint(1, 5)))
    return draw.choice(("", "", " ", "  ")) + draw.choice((" ", " ", "  ", "", "\n")).join(words) + draw.choice(("", "", " ", "\n"))


def _marked(draw: random.Random) -> str:
    return "".join(letter + "".join(draw.choices(MARKS, k=draw.randint(0, 3))) for letter in draw.choices(characters("latin"), k=4))
