"""What a site's data look like to the training loop, and what an adapter for a kind of them is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tessera.shared.schema import Frozen

LABELS = "labels"


class DataError(ValueError):
    """A data set cannot be used: its kind is not known, its options are wrong, or its file is."""


class Options(Frozen):
    """An adapter's own options, as the settings file gives them; unknown ones are refused."""


@dataclass(frozen=True)
class Padding:
    """How texts are made longer: to `width` tokens, with a value for each tensor that has one value a token."""

    width: int
    values: Mapping[str, int]
    on_left: bool = False

    def fill(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor, [examples, tokens], as wide as `width`."""
        gap = self.width - tensor.shape[1]
        return pad(tensor, (gap, 0) if self.on_left else (0, gap), value=self.values[name])


class Dataset:
    """Examples in memory: each tensor is one of the model's keyword inputs, [examples, ...].

    `common` goes with every batch as it is: the texts that name the classes of a contrastive model, `input_ids`
    [classes, tokens]. `domains`, int64 [examples], says where each example comes from, and no model sees it.
    `held_out` are examples of the same kind that nothing trains on. `sources` are what each example was made from,
    where its tensors depend on other examples too: texts are padded to the longest. `groups` say which examples are
    held out together. `padding` says how long texts may be.

    Raises DataError if the tensors differ in their number of examples, have none, `labels` is not among them, a name
    stands for two tensors, or domains, sources or groups are not one for each example.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        common: Mapping[str, Tensor] | None = None,
        held_out: Dataset | None = None,
        domains: Tensor | None = None,
        sources: Sequence[bytes] | None = None,
        padding: Padding | None = None,
        groups: Sequence[bytes] | None = None,
    ) -> None:
        if LABELS not in tensors:
            raise DataError(f"there is no tensor {LABELS!r} among {', '.join(sorted(tensors)) or 'none at all'}")
        beside = {} if domains is None else {"domain": domains}
        sizes = {
            name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in sorted({**tensors, **beside}.items())
        }
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise DataError(f"every tensor must have the same leading size, and one above 0: {sizes}")
        if domains is not None and (domains.ndim != 1 or domains.is_floating_point()):
            raise DataError(f"domain: {domains.dtype} {list(domains.shape)} is not one integer for each example")
        if twice := sorted(set(tensors) & set(common or {})):
            raise DataError(f"{', '.join(twice)}: both of each example and common to all")
        self.tensors = dict(tensors)
        self.common = dict(common or {})
        self.held_out = held_out
        self.domains = domains
        self.sources = sources
        self.groups = groups
        self.padding = padding
        self.examples = sizes[LABELS]
        for what, given in (("sources", sources), ("groups", groups)):
            if given is not None and len(given) != self.examples:
                raise DataError(f"{what}: {len(given)} for {self.examples} examples")

    @property
    def classes(self) -> Tensor | None:
        """The class of each example, int64 [examples]; None where `labels` are not one class for each."""
        labels = self.tensors[LABELS]
        return None if labels.ndim != 1 or labels.is_floating_point() else labels.long()

    def sides(self) -> Iterator[bytes]:
        """Yield by what each example is held out or not: its group, or else its identity."""
        return self.identities() if self.groups is None else iter(self.groups)

    def identities(self, dtype: torch.dtype | None = None) -> Iterator[bytes]:
        """Yield what tells each example from any other, whatever the label and whatever the other examples are: its
        source, or else the bytes of its tensors, as they are or as `dtype`."""
        if self.sources is not None:
            yield from self.sources
            return
        inputs = [(name, tensor) for name, tensor in sorted(self.tensors.items()) if name != LABELS]
        for place in range(self.examples):
            found = hashlib.sha256()
            for name, tensor in inputs:
                row = tensor[place].to(dtype).contiguous()
                found.update(f"{name} {row.dtype} {list(row.shape)};".encode())
                found.update(row.flatten().view(torch.uint8).numpy().tobytes())
            yield found.digest()

    def rows(self, index: Tensor) -> Dataset:
        """Return the examples at these places, int64 [chosen], in that order. What is held out does not come
        along."""
        return Dataset(
            {name: tensor[index] for name, tensor in self.tensors.items()},
            self.common,
            domains=None if self.domains is None else self.domains[index],
            sources=None if self.sources is None else [self.sources[place] for place in index.tolist()],
            padding=self.padding,
            groups=None if self.groups is None else [self.groups[place] for place in index.tolist()],
        )

    def padded(self) -> Dataset:
        """Return the examples with texts as long as any might be: of no tensor the shape tells how long the longest
        is."""
        if self.padding is None:
            return self
        tensors = {n: self.padding.fill(n, t) if n in self.padding.values else t for n, t in self.tensors.items()}
        return Dataset(tensors, self.common, self.held_out, self.domains, self.sources, groups=self.groups)

    def placeholder(self, examples: int, end: int | None = None) -> dict[str, Tensor]:
        """Made-up examples of the shapes and types of these ones, the same whatever these are.

        Each text has the token `end` once, at its end: some classifiers read what they answer there.
        """
        generator = torch.Generator().manual_seed(0)
        made = {}
        for name, tensor in sorted(self.tensors.items()):
            shape = (examples, *tensor.shape[1:])
            if tensor.is_floating_point() and name != LABELS:
                made[name] = torch.randn(shape, generator=generator).to(tensor.dtype)
            elif name == "input_ids":
                words = torch.randint(0, 2, shape, generator=generator)
                if end is not None:
                    words[words == end] = int(end == 0)
                    words[..., -1] = end
                made[name] = words.to(tensor.dtype)
            else:
                # All of it is there, and of no size 0.
                made[name] = torch.full(shape, "mask" in name or "shape" in name).to(tensor.dtype)
        return made

    def batches(
        self, batch_size: int | None, generator: torch.Generator | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield every example once, `batch_size` at a time (None: all at once), the last batch perhaps smaller.

        In the stored order, or in one drawn from `generator`. What is common is in every batch.
        """
        order = (
            torch.arange(self.examples) if generator is None else torch.randperm(self.examples, generator=generator)
        )
        for rows in torch.split(order, batch_size or self.examples):
            yield {**{name: tensor[rows] for name, tensor in self.tensors.items()}, **self.common}


O = TypeVar("O", bound=Options)  # noqa: E741  (the field's letter for options)


@dataclass(frozen=True)
class Adapter(Generic[O]):
    """A kind of data set, as its file declares it in `ADAPTER`. The file is named for the kind."""

    kind: str
    options: type[O]
    open: Callable[[O], Dataset]
    """Raises DataError."""
