"""Text to tokens and back. Knows tokenizers, chat templates and the stream of an answer's text; does not know models, requests or HTTP.

tokenizer      `Tokenizer`: encode, decode, one token's bytes, chats
from_folder    builds one from a Hugging Face folder; from_gguf from a GGUF file's metadata; both use
cuts           how byte-level vocabularies divide a text, and
sentencepiece  the other kind of vocabulary, whose own file sentencepiece_file reads
chat_template  chats to text, in the sandbox of template_sandbox and the limits of template_limits
bad_words      words as the token sequences that spell them
stream         `TextStream`: tokens in, text out, up to a stop string
"""

from lockstep.text.bad_words import bad_word_ids
from lockstep.text.from_folder import tokenizer_from_folder
from lockstep.text.from_gguf import tokenizer_from_gguf
from lockstep.text.stream import TextDelta, TextStream
from lockstep.text.tokenizer import Tokenizer

__all__ = ["TextDelta", "TextStream", "Tokenizer", "bad_word_ids", "tokenizer_from_folder", "tokenizer_from_gguf"]
