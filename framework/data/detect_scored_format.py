"""--data=PATH for a model that scores sequences: preference pairs, or texts with labels.

detect_scored_format("pairs.jsonl", None, pairs=True, keeps_classes=False)
"""

from __future__ import annotations

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data import hub_data, local_data
from plimsoll.framework.data.detect_format import DetectedData
from plimsoll.framework.data.file_formats import ROW_FORMATS
from plimsoll.framework.data.row_files import read_file_rows
from plimsoll.framework.data.scored import (
    LabeledSource,
    RankedSource,
    collect_class_names,
    get_class_name,
    parse_content,
    parse_sequences,
)
from plimsoll.framework.files.hub_names import is_hub_url

# Settings that a source keeps when it reads other files.
_KEPT_SETTINGS = ("append_eos", "pad_token_id", "template_variables")
# Maximum number of class names to show.
_NUM_SHOWN = 8


def detect_scored_format(
    path: str, template: Config | None, *, pairs: bool, keeps_classes: bool, validation_fraction: float = 0.05
) -> DetectedData:
    """Inspects a file, a folder, a glob, an fsspec URL, or a Hub dataset, as `detect_format` does.

    Args:
        path: as for `detect_format`.
        template: config of a LabeledSource or a RankedSource, whose other settings stay; None for the defaults.
        pairs: rows are preference pairs; otherwise texts or conversations with labels.
        keeps_classes: use the classes of `template`; otherwise, those of the training files.
        validation_fraction: as for `detect_format`.

    Raises:
        FileNotFoundError, PermissionError, ValueError: as for `detect_format`, or a row has no label, or a field is
            missing. The message names the file, row and field.
    """
    listing = hub_data.data_listing(path) if is_hub_url(path) else local_data.data_listing(path)
    if listing.data_format not in ROW_FORMATS:
        wanted = "chosen and rejected" if pairs else "text (or messages) and label"
        raise ValueError(
            f"{listing.location} has {listing.data_format}; expected JSON lines, Parquet or CSV with {wanted}"
        )
    location, row = next(read_file_rows(listing.first), ("", None))
    if not location:
        raise ValueError(f"{listing.first} has no rows")
    try:
        content = parse_sequences(row)[0] if pairs else parse_content(row)
        if not pairs:
            get_class_name(row)
    except ValueError as error:
        raise ValueError(f"{listing.first}, {location}: {error}") from error
    needs_template = not isinstance(content, str)
    classes: list[str] | None = None
    if pairs:
        source = config_for(RankedSource, paths=list(listing.train))
        what = "pairs"
    else:
        names: list[str] = (
            template.classes if template is not None and keeps_classes else collect_class_names(listing.train)
        )
        classes = names
        source = config_for(LabeledSource, paths=list(listing.train), classes=names)
        more = ", ..." if len(names) > _NUM_SHOWN else ""
        what = f"texts of {len(names)} classes ({', '.join(names[:_NUM_SHOWN])}{more})"
    if template is not None:
        for name in _KEPT_SETTINGS:
            source[name] = template[name]
    # Copied after the settings are set, so that both sources have the same ones.
    held_out = source.copy()
    split = f"{validation_fraction:.0%} held out"
    if listing.validation:
        held_out.paths = list(listing.validation)
        split = f"{listing.num_validation} files held out, {listing.split_basis}"
    else:
        for config, part in ((source, "train"), (held_out, "validation")):
            config.split = part
            config.validation_fraction = validation_fraction
    line = f"data: {what} from {listing.location}: files for training: {listing.num_train}, {split}"
    return DetectedData(source, held_out, has_text=True, needs_template=needs_template, line=line, classes=classes)
