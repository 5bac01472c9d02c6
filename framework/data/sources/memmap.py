"""Tokens that exist already: nanoGPT-style `.bin` files, and those that `launch.prepare` writes.

May import: framework.data.
"""

from __future__ import annotations

from typing import Literal

from framework.config import NonNegativeInt
from framework.data.storage import FileHashes, find
from framework.data.token_files import TokenShard, TokenStream


class TokenMemmap:
    """Headerless token files, read in ranges straight from where they lie; nothing is copied.

    Args:
        path: a `.bin`, a glob of shards (read in sorted order as one stream), or an fsspec URL of either.
        dtype: uint16 or uint32; None takes what the sidecar says, or uint16 without one.
        eos_id: the token between documents; None takes the sidecar's. Needed only to mask documents from each other.
        verify: read each file once before training, to compare block hashes with the sidecar and ids with the
            vocabulary (remembered until the file changes). False checks the sizes, and ids only as they are read.
    """

    def __init__(
        self,
        *,
        path: str,
        dtype: Literal["uint16", "uint32"] | None = None,
        eos_id: NonNegativeInt | None = None,
        verify: bool = True,
    ):
        self.path = path
        self.dtype: Literal["uint16", "uint32"] | None = dtype
        self.eos_id = eos_id
        self.verify = verify

    def open(self, *, vocab_size: int, tokenizer: str | None, hashes: FileHashes) -> TokenStream:
        """The stream of all shards.

        Args:
            vocab_size: every token id must be below it.
            tokenizer: digest of the configured tokenizer; None where there is none to compare.

        Raises:
            FileNotFoundError, PermissionError: as `storage.find`.
            ValueError: a shard is truncated or garbled, or was written with another tokenizer.
        """
        shards = [
            TokenShard(
                file,
                dtype=self.dtype,
                eos_id=self.eos_id,
                vocab_size=vocab_size,
                tokenizer=tokenizer,
                verify=self.verify,
                hashes=hashes,
            )
            for file in find(self.path)
        ]
        return TokenStream(shards)
