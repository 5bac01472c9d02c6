"""--data=PATH for a model that scores sequences: preference pairs, or texts with labels.

recognized_scored("pairs.jsonl", None, pairs=True, keeps_classes=False)
"""

from __future__ import annotations

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data import hub_data, local_data
from plimsoll.framework.data.kinds import ROW_KINDS, DataListing
from plimsoll.framework.data.recognize import Recognized
from plimsoll.framework.data.scored import (
    LabelledSource,
    RankedSource,
    class_name,
    class_names,
    content_of,
    sequences_of,
)
from plimsoll.framework.data.sources import rows_of_file
from plimsoll.framework.files.hub_names import is_hub_url

# Settings that a source keeps when it reads other files.
_KEPT = ("append_eos", "pad_token_id", "template_variables")
# Maximum number of class names to show.
_NUM_SHOWN = 8


def recognized_scored(
    path: str,
    template: Config | None,
    *,
    pairs: bool,
    keeps_classes: bool,
    validation_fraction: float = 0.05,
) -> Recognized:
    """Inspects a file, a folder, a glob, an fsspec URL, or a Hub dataset, as `recognized` does.

    Args:
        path: as for `recognized`.
        template: config of a LabelledSource or a RankedSource, whose other settings stay; None for the defaults.
        pairs: rows are preference pairs; otherwise texts or conversations with labels.
        keeps_classes: use the classes of `template`; otherwise, those of the training files.
        validation_fraction: as for `recognized`.

    Raises:
        FileNotFoundError, PermissionError, ValueError: as for `recognized`, or a row has no label, or a field is
            missing. The message names the file, row and field.
    """
    listing = hub_data.data_listing(path) if is_hub_url(path) else local_data.data_listing(path)
    if listing.kind not in ROW_KINDS:
        wanted = "chosen and rejected" if pairs else "text (or messages) and label"
        raise ValueError(f"{listing.place} holds {listing.kind}; expected JSON lines, Parquet or CSV with {wanted}")
    needs_template = _first_row_needs_template(listing, pairs=pairs)
    classes: list[str] | None = None
    if pairs:
        source = config_for(RankedSource, paths=list(listing.train))
        what = "pairs"
    else:
        names: list[str] = template.classes if template is not None and keeps_classes else class_names(listing.train)
        classes = names
        source = config_for(LabelledSource, paths=list(listing.train), classes=names)
        more = ", ..." if len(names) > _NUM_SHOWN else ""
        what = f"texts of {len(names)} classes ({', '.join(names[:_NUM_SHOWN])}{more})"
    if template is not None:
        for name in _KEPT:
            source[name] = template[name]
    held_out = source.copy()
    split = f"{validation_fraction:.0%} held out"
    if listing.validation:
        held_out.paths = list(listing.validation)
        split = f"{listing.num_validation} files held out, {listing.told_by}"
    else:
        for config, part in ((source, "train"), (held_out, "validation")):
            config.split = part
            config.validation_fraction = validation_fraction
    line = f"data: {what} from {listing.place}: files for training: {listing.num_train}, {split}"
    return Recognized(source, held_out, has_text=True, needs_template=needs_template, line=line, classes=classes)


def _first_row_needs_template(listing: DataListing, *, pairs: bool) -> bool:
    """Returns whether the first row has messages. Raises ValueError if it is not the expected data."""
    for place, row in rows_of_file(listing.first):
        try:
            content = sequences_of(row)[0] if pairs else content_of(row)
            if not pairs:
                class_name(row)
        except ValueError as error:
            raise ValueError(f"{listing.first}, {place}: {error}") from error
        return not isinstance(content, str)
    raise ValueError(f"{listing.first} holds no rows")
