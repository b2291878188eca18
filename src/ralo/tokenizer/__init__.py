"""Text to token ids and back, chat prompts and streaming, from a Hugging Face directory or a GGUF file."""

from ralo.tokenizer.gguf import from_gguf
from ralo.tokenizer.hf import from_directory
from ralo.tokenizer.stream import Stream
from ralo.tokenizer.text import Tokenizer

__all__ = ["Stream", "Tokenizer", "from_directory", "from_gguf"]
