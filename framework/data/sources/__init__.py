"""Where documents come from: one class per kind of source, each configured by its constructor.

A source of text yields documents; a `TokenMemmap` is tokens already; a `Mixture` weighs other sources. To add one,
follow docs/data.md. May import: framework.config, framework.data.storage, framework.data.token_files.
"""

from framework.data.sources.base import Contents, TextSource
from framework.data.sources.memmap import TokenMemmap
from framework.data.sources.mixture import Mixture
from framework.data.sources.parquet import Parquet
from framework.data.sources.stdlib import StdlibSource
from framework.data.sources.text import JsonLines, TextFiles

__all__ = ["Contents", "JsonLines", "Mixture", "Parquet", "StdlibSource", "TextFiles", "TextSource", "TokenMemmap"]
