"""Makes text from files and from other machines safe for a terminal. All messages pass through here."""

import unicodedata

# Escapes for characters that a terminal does not print: control characters, and marks that change the text direction.
_HIDDEN = {
    code: f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"
    for code in range(0x2100)
    if unicodedata.category(chr(code)) == "Cc" or unicodedata.bidirectional(chr(code)) in
    ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
}  # fmt: skip
for _allowed in "\n\t":
    del _HIDDEN[ord(_allowed)]


def escape_control_chars(text: str) -> str:
    """Escape characters that would move the cursor, change colors or reverse the text direction: `\\x1b[2J`."""
    return text.translate(_HIDDEN)
