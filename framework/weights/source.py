"""Maps a parameter of ours to the tensor of a published directory that holds it, and to its location in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from plimsoll.framework.layout import ParameterSpec

# Placeholders for the layer's and the expert's number in the tensor names of a family.
LAYER = "{layer}"
EXPERT = "{expert}"
Index = tuple[slice, ...]


class Sliceable(Protocol):
    """An array, or a tensor of a file that can be read in slices."""

    def __getitem__(self, index: Index, /) -> np.ndarray:
        """Read a slice, which has one `slice` for each axis."""
        ...


class SliceReader(Sliceable, Protocol):
    """A tensor of a file, as safetensors returns it."""

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        ...

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype, such as "BF16"."""
        ...


def layer_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Return the shape of a parameter for one layer, without the layer axis of a stacked parameter."""
    return spec.shape if spec.num_layers is None else spec.shape[1:]


@dataclass(frozen=True)
class Source:
    """The tensor that holds one layer's parameter, possibly fused with others; or one tensor for each expert.

    Args:
        name: name of the tensor; `{layer}` stands for the layer's number. With `{expert}` there is one tensor for each
            index of the parameter's first axis, and the other fields describe one expert's tensor.
        transpose: whether the tensor is [out, in], as in torch's Linear, while ours is [in, out].
        fused_part: (i, n): the parameter is the i-th of n equal parts of a fused matrix along the last axis.
        interleaved: whether the parts alternate along that axis: the i-th has the elements i, i + n, i + 2 n, ...
        span: (first, width): start of the parameter in the last axis of a fused matrix, and the size of that axis; used
            instead of `fused_part` if the parts are not equal.
        groups: number of equal groups along that axis, such as heads: each has its share of the parameter, and `span`
            describes one group.
        has_channel_axis: whether the tensor is [out, 1, in], as in torch's Conv1d of single channels.
    """

    name: str
    transpose: bool = False
    fused_part: tuple[int, int] = (0, 1)
    interleaved: bool = False
    span: tuple[int, int] | None = None
    groups: int = 1
    has_channel_axis: bool = False

    @property
    def is_fused(self) -> bool:
        """True if the tensor also holds other parameters."""
        return self.fused_part != (0, 1) or self.span is not None

    def width(self, ours: tuple[int, ...]) -> int:
        """Return the whole tensor's size along the last axis, in our orientation."""
        return self.fused_part[1] * ours[-1] if self.span is None else self.groups * self.span[1]

    def for_layer(self, layer: int) -> Source:
        """Return this source with the layer's number in its name."""
        return replace(self, name=self.name.replace(LAYER, str(layer)))

    def parts(self, ours: tuple[int, ...]) -> list[SourcePart]:
        """Return the tensors of a parameter of shape `ours`, in the order of its experts; one if it has no experts."""
        if EXPERT not in self.name:
            return [SourcePart(self, ours)]
        names = [self.name.replace(EXPERT, str(expert)) for expert in range(ours[0])]
        return [SourcePart(replace(self, name=name), ours[1:]) for name in names]

    def read(self, get_tensor: Callable[[str], Sliceable], ours: tuple[int, ...], index: Index) -> np.ndarray:
        """Read a slice of the parameter from its tensor, or from those of its experts.

        Args:
            get_tensor: returns the tensor of a given name.
            ours: the parameter's shape.
            index: the slice of the parameter, one `slice` for each axis.
        """
        if EXPERT not in self.name:
            return self.take(get_tensor(self.name), ours, index)
        experts = self.parts(ours)[index[0]]
        return np.stack([part.source.take(get_tensor(part.source.name), part.ours, index[1:]) for part in experts])

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor in a file, for a parameter of shape `ours`."""
        joined = (*ours[:-1], self.width(ours))
        # Experts in one tensor are its first axis.
        theirs = (*joined[:-2], joined[-1], joined[-2]) if self.transpose else joined
        return (theirs[0], 1, theirs[1]) if self.has_channel_axis else theirs

    def take(self, tensor: Sliceable, ours: tuple[int, ...], index: Index) -> np.ndarray:
        """Read a slice of the parameter from its tensor.

        Args:
            tensor: the tensor, in the orientation of the file.
            ours: the parameter's shape.
            index: the slice of the parameter, one `slice` for each axis.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(index, ours, strict=True)]
        # The parameter is a range of the last axis in our orientation, or every n-th element of one.
        number, count = self.fused_part
        start, stop = bounds[-1]
        group_size = ours[-1] // self.groups
        # The groups that hold a part of the slice are read as a whole.
        first_group = start // group_size
        last_group = -(-stop // group_size)
        if self.groups > 1:
            assert self.span is not None, "groups have spans"
            bounds[-1] = (first_group * self.span[1], last_group * self.span[1])
        elif self.interleaved:
            bounds[-1] = (start * count, stop * count)
        else:
            offset = number * ours[-1] if self.span is None else self.span[0]
            bounds[-1] = (start + offset, stop + offset)
        if self.transpose:
            bounds[-2:] = bounds[:-3:-1]
        slices = [slice(*bound) for bound in bounds]
        if self.has_channel_axis:
            array = tensor[(slices[0], slice(None), slices[1])][:, 0]
        else:
            array = tensor[tuple(slices)]
        if self.transpose:
            array = array.swapaxes(-1, -2)
        if self.groups > 1:
            assert self.span is not None, "groups have spans"
            first, width = self.span
            grouped = array.reshape(*array.shape[:-1], -1, width)[..., first : first + group_size]
            parts = grouped.reshape(*array.shape[:-1], -1)
            return parts[..., start - first_group * group_size : stop - first_group * group_size]
        # All parts are read: safetensors takes sixteen times as long to read every second element.
        return array[..., number::count] if self.interleaved else array

    def join(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Return the whole tensor of a file, joined from all its parts in order, each in our orientation."""
        if len(arrays) == 1:
            joined = arrays[0]
        elif self.interleaved:
            stacked = np.stack(arrays, axis=-1)
            joined = stacked.reshape(*stacked.shape[:-2], -1)
        else:
            grouped = [array.reshape(*array.shape[:-1], self.groups, -1) for array in arrays]
            joined = np.concatenate(grouped, axis=-1)
            joined = joined.reshape(*joined.shape[:-2], -1)
        theirs = joined.swapaxes(-1, -2) if self.transpose else joined
        return theirs[:, None] if self.has_channel_axis else theirs


def split_source(tensor: Source, names: Sequence[str], sizes: Sequence[int], groups: int = 1) -> dict[str, Source]:
    """Return {name: its source} for parameters that follow each other in each group of a fused tensor.

    Args:
        tensor: the fused tensor.
        names: our names of the parameters.
        sizes: size of each in one group.
        groups: number of groups.
    """
    sources = {}
    first = 0
    for name, size in zip(names, sizes, strict=True):
        sources[name] = replace(tensor, span=(first, sum(sizes)), groups=groups)
        first += size
    return sources


@dataclass(frozen=True)
class SourcePart:
    """A tensor, and the shape of the part of our parameter that it holds: all of it, or one expert's."""

    source: Source
    ours: tuple[int, ...]
