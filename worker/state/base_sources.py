"""The blocks of an external base, from the bases that the site has added and the sources that its settings name.

No address and no path comes from the coordinator: it gives digests alone, and each byte is verified by them.
"""

import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tessera.shared.client.transport import tls_context
from tessera.shared.lazy_import import load
from tessera.shared.model.blocks import Block
from tessera.shared.problems import Invalid
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.base_folder import BaseFolder, ConvertedBlock, Span
from tessera.shared.urls import proxy_of
from tessera.worker.state.base_cache import BaseCache, Place

Take = Callable[[ConvertedBlock], None]

Convert = Callable[[BaseFolder, Iterable[Block], Take], None]
"""A function that hands over each of the blocks that transformers makes of a folder's tensors."""

MIRROR_SECONDS = 60.0
"""Limit on a connection to a mirror, and on its silence."""

PINNED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)@(?P<revision>[0-9a-f]{40})")
"""A model on the hub at a commit: a branch may be another one tomorrow."""

COMMAND = "tessera worker cache add FOLDER"


class BaseUnavailable(ValueError):
    """Blocks of an external base that the site lacks. The message, for the coordinator too, names files without their
    folders; `faults` are for the site's own log."""

    def __init__(self, said: str, faults: tuple[str, ...]) -> None:
        super().__init__(said)
        self.faults = faults


@dataclass(frozen=True)
class BaseSources:
    """The cache of bases, and what to fill it from: folders, names on the hub at a commit, and mirrors.

    A mirror has a block at URL/sha256-HEX.
    """

    cache: BaseCache
    sources: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None

    def fetch(
        self,
        blocks: Mapping[str, Block],
        convert: Convert,
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, Span]:
        """Return the places of blocks' bytes, by digest, each verified. `check` ends the task early.

        Raises BaseUnavailable.
        """
        lookup = self.cache.find(blocks)
        spans, faults = dict(lookup.spans), list(lookup.wrong.values())
        for source in self.sources:
            missing = {digest: block for digest, block in blocks.items() if digest not in spans}
            if not missing:
                break
            check()
            found: dict[str, Place] = {}
            try:
                if source.startswith(("http://", "https://")):
                    self._add_from_mirror(source, missing, check, found)
                else:
                    pinned = PINNED.fullmatch(source)
                    folder = snapshot_folder(pinned) if pinned else Path(source)
                    self._add_from_folder(folder, missing, convert, check, found, faults)
            except (Invalid, OSError, ValueError, httpx.HTTPError) as fault:
                faults.append(f"{source}: {fault}")
            finally:
                # However it ends, what was verified is not fetched again.
                if found:
                    self.cache.add(source, found)
            spans |= {digest: place.span for digest, place in found.items()}
        if missing := {digest: block for digest, block in blocks.items() if digest not in spans}:
            names = sorted(block.name for block in missing.values())
            said = [f"{name} changed since it was added" for name in sorted({Path(n).name for n in lookup.wrong})]
            said += self.cache.others({digest: block.name for digest, block in blocks.items()})
            raise BaseUnavailable(
                f"{len(missing)} of {len(blocks)} blocks of the base are not at this site, such as "
                f"{'. '.join([', '.join(names[:3]), *said[:4]])}. Add them with `{COMMAND}`, or name their folder in "
                "base_sources",
                tuple(faults),
            )
        return spans

    def _add_from_folder(
        self,
        folder: Path,
        missing: Mapping[str, Block],
        convert: Convert,
        check: Callable[[], None],
        places: dict[str, Place],
        faults: list[str],
    ) -> None:
        base = BaseFolder.open(folder)
        digests = {block.name: digest for digest, block in missing.items()}
        found, lacking = base.find(missing.values(), digests)
        for each in found:
            digest = digests[each.block.name]
            span = each.span or self.cache.keep(digest, [each.data()], each.block.nbytes)
            places[digest] = Place.of(each.block.name, span)

        def take(made: ConvertedBlock) -> None:
            check()
            name = made.block.name
            if (digest := digest_of(made.data)) == digests[name]:
                span = self.cache.keep(digest, [made.data], made.block.nbytes)
                places[digest] = Place.of(name, span, made.sources)
            else:
                faults.append(f"{folder}: {', '.join(path.name for path in made.sources)} give another {name}")

        if lacking:
            convert(base, lacking, take)
        if lacking := [block for block in lacking if digests[block.name] not in places]:
            faults.append(f"{folder}: {base.explain(lacking)}")

    def _add_from_mirror(
        self, url: str, missing: Mapping[str, Block], check: Callable[[], None], places: dict[str, Place]
    ) -> None:
        verify = self.tls or tls_context()
        with httpx.Client(
            verify=verify,
            proxy=proxy_of(url),
            headers={"Accept-Encoding": "identity"},
            timeout=MIRROR_SECONDS,
            trust_env=False,
        ) as client:
            for digest, block in missing.items():
                check()
                with client.stream("GET", f"{url.rstrip('/')}/{digest.replace(':', '-')}") as response:
                    if response.status_code == httpx.codes.NOT_FOUND:
                        continue
                    response.raise_for_status()
                    span = self.cache.keep(digest, _checked(response, check), block.nbytes)
                    places[digest] = Place.of(block.name, span)


def snapshot_folder(pinned: re.Match[str]) -> Path:
    """Return the folder of a model on the hub, by a match of `PINNED`, fetched if it is not here.

    Raises ValueError.
    """
    try:
        folder = load("huggingface_hub").snapshot_download(
            pinned["name"],
            revision=pinned["revision"],
            allow_patterns=["*.json", "*.safetensors"],
            # Folders within it have the same weights in other formats.
            ignore_patterns="*/*",
        )
    except (OSError, ValueError) as fault:
        raise ValueError(f"the hub has no {pinned.string}, or cannot be reached: {fault}") from fault
    return Path(folder)


def _checked(response: httpx.Response, check: Callable[[], None]) -> Iterator[bytes]:
    for piece in response.iter_raw():
        check()
        yield piece
