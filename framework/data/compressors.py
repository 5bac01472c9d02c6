"""What general compressors need for a text: the yardstick beside a language model's bits per byte.

May import: the standard library.
"""

from __future__ import annotations

import gzip
import lzma


def compressor_bits_per_byte(text: bytes) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9` on the whole text, as {"gzip -9": ..., "xz -9": ...}.

    Raises:
        ValueError: the text is empty.
    """
    if not text:
        raise ValueError("expected some text to compress, given none")
    sizes = {"gzip -9": len(gzip.compress(text, compresslevel=9, mtime=0)), "xz -9": len(lzma.compress(text, preset=9))}
    return {name: 8.0 * size / len(text) for name, size in sizes.items()}
