"""Which tensor of a published directory holds a parameter of ours, and how it lies in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from framework.layout import ParameterSpec

# Stand for the layer's and the expert's number in the names of a family.
LAYER = "{layer}"
EXPERT = "{expert}"
Index = tuple[slice, ...]


def layer_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """The shape of a parameter, without the axis of the layers that it may be stacked along."""
    return spec.shape if spec.num_layers is None else spec.shape[1:]


@dataclass(frozen=True)
class Source:
    """The tensor of a directory that holds one layer's parameter, alone or with others; or one of each expert.

    Args:
        name: of the tensor; `{layer}` stands for the layer's number. With `{expert}` there is a tensor for each index
            of the parameter's first axis, and the other fields are about one expert's.
        transpose: torch's Linear keeps [out, in], we keep [in, out].
        piece: (i, n): the i-th of n equal parts of the last axis, of a fused matrix.
        interleaved: the parts take turns along that axis: the i-th has its elements i, i + n, i + 2 n, ...
        span: (first, width): where the parameter begins in the last axis of a fused matrix, and the size of that axis;
            instead of a piece where the parts are not equal.
    """

    name: str
    transpose: bool = False
    piece: tuple[int, int] = (0, 1)
    interleaved: bool = False
    span: tuple[int, int] | None = None

    @property
    def is_fused(self) -> bool:
        """Tells whether the tensor holds other parameters too."""
        return self.piece != (0, 1) or self.span is not None

    def first(self, ours: tuple[int, ...]) -> int:
        """Where the parameter begins in the last axis of our orientation."""
        return self.piece[0] * ours[-1] if self.span is None else self.span[0]

    def width(self, ours: tuple[int, ...]) -> int:
        """The whole tensor's size along the last axis of our orientation."""
        return self.piece[1] * ours[-1] if self.span is None else self.span[1]

    def of(self, layer: int) -> Source:
        """This source with the layer's number in its name."""
        return replace(self, name=self.name.replace(LAYER, str(layer)))

    def parts(self, ours: tuple[int, ...]) -> list[SourcePart]:
        """The tensors of a parameter of shape `ours`, in the order of its experts; one where there are none."""
        if EXPERT not in self.name:
            return [SourcePart(self, ours)]
        names = [self.name.replace(EXPERT, str(expert)) for expert in range(ours[0])]
        return [SourcePart(replace(self, name=name), ours[1:]) for name in names]

    def read(
        self,
        tensor_of: Callable[[str], Any],
        ours: tuple[int, ...],
        index: Index,
    ) -> np.ndarray:
        """A slice of the parameter, of one tensor or of those of its experts; `tensor_of` gives a tensor by its name,
        the other arguments are as for `take`."""
        if EXPERT not in self.name:
            return self.take(tensor_of(self.name), ours, index)
        experts = self.parts(ours)[index[0]]
        return np.stack([part.source.take(tensor_of(part.source.name), part.ours, index[1:]) for part in experts])

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor in a file, for a parameter of shape `ours`."""
        joined = (*ours[:-1], self.width(ours))
        return joined[::-1] if self.transpose else joined

    def take(
        self,
        tensor: Any,
        ours: tuple[int, ...],
        index: Index,
    ) -> np.ndarray:
        """A slice of the parameter, read from its tensor.

        Args:
            tensor: an array, or a reader of slices, as it is in a file.
            ours: the parameter's shape.
            index: the slice of the parameter, one `slice` for each axis.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(index, ours, strict=True)]
        # The piece is a range of the last axis of our orientation, or every n-th element of one.
        number, count = self.piece
        start, stop = bounds[-1]
        if self.interleaved:
            bounds[-1] = (start * count, stop * count)
        else:
            offset = self.first(ours)
            bounds[-1] = (start + offset, stop + offset)
        if self.transpose:
            bounds = bounds[::-1]
        slices = tuple(slice(start, stop) for start, stop in bounds)
        array = tensor[slices]
        if self.transpose:
            array = array.T
        # All parts are read: safetensors takes sixteen times as long for every second element.
        return array[..., number::count] if self.interleaved else array

    def join(self, pieces: list[np.ndarray]) -> np.ndarray:
        """The whole tensor of a file, from all of its pieces in their order, each as our parameter has it."""
        if len(pieces) == 1:
            joined = pieces[0]
        elif self.interleaved:
            stacked = np.stack(pieces, axis=-1)
            joined = stacked.reshape(*stacked.shape[:-2], -1)
        else:
            joined = np.concatenate(pieces, axis=-1)
        return joined.T if self.transpose else joined


class SourcePart(NamedTuple):
    """A tensor, and the shape of what it holds of our parameter: all of it, or one expert's."""

    source: Source
    ours: tuple[int, ...]
