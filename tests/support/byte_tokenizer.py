"""A tokenizer whose tokens are bytes, and two special ones."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from headrace.models.text.tokenizer import Tokenizer, _byte_of_char

EOS, BOS = 256, 257
VOCAB = 258


def byte_tokenizer() -> Tokenizer:
    """Token ids 0..255 are bytes, 256 ends a text, 257 begins one."""
    library = LibraryTokenizer(models.BPE(vocab=dict(_byte_of_char()), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken("<|im_end|>", special=True), AddedToken("<s>", special=True)]
    )
    return Tokenizer(library, bos_token_id=BOS, eos_token_ids=(EOS,))
