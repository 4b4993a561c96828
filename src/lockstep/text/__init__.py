"""Text to tokens and back. Knows tokenizers, chat templates and the stream of an answer's text; does not know models, requests or HTTP.

tokenizer      `Tokenizer`: encode, decode, one token's bytes, chats
from_folder    builds one from a Hugging Face folder
from_gguf      builds one from a GGUF file's metadata
bad_words      words as the token sequences that spell them
stream         `TextStream`: tokens in, text out, up to a stop string
"""

from lockstep.text.bad_words import bad_word_ids
from lockstep.text.from_folder import tokenizer_from_folder
from lockstep.text.from_gguf import tokenizer_from_gguf
from lockstep.text.stream import TextDelta, TextStream
from lockstep.text.tokenizer import Tokenizer

__all__ = ["TextDelta", "TextStream", "Tokenizer", "bad_word_ids", "tokenizer_from_folder", "tokenizer_from_gguf"]
