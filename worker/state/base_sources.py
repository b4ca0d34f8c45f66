"""The blocks of an external base, from what the site has added and from the sources that its settings name.

No address and no path comes from the coordinator: it gives digests alone, and each byte is verified by them.
"""

import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tessera.shared.model.blocks import Block
from tessera.shared.problems import Invalid
from tessera.shared.updates.base_folder import BaseFolder, Span
from tessera.worker.state.base_cache import BaseCache

MIRROR_SECONDS = 60.0
"""Limit on a connection to a mirror, and on its silence."""

COMMAND = "tessera worker cache add FOLDER"


class BaseUnavailable(ValueError):
    """Blocks of an external base that the site lacks. The message, for the coordinator too, names files without their
    folders; `faults` are for the site's own log."""

    def __init__(self, said: str, faults: tuple[str, ...]) -> None:
        super().__init__(said)
        self.faults = faults


@dataclass(frozen=True)
class BaseSources:
    """The cache of bases, and folders and mirrors to fill it from. A mirror has a block at URL/sha256-HEX."""

    cache: BaseCache
    sources: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None

    def fetch(
        self,
        blocks: Mapping[str, Block],
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, Span]:
        """Return where the bytes of blocks are, by digest, each verified. `check` ends the task early.

        Raises BaseUnavailable.
        """
        lookup = self.cache.find(blocks)
        spans, faults = dict(lookup.spans), list(lookup.wrong.values())
        for source in self.sources:
            missing = {digest: block for digest, block in blocks.items() if digest not in spans}
            if not missing:
                break
            check()
            try:
                found = (
                    self._from_mirror(source, missing, check)
                    if source.startswith(("http://", "https://"))
                    else self._from_folder(Path(source), missing, faults)
                )
            except (Invalid, OSError, httpx.HTTPError) as fault:
                faults.append(f"{source}: {fault}")
                continue
            if found:
                self.cache.extend(source, {digest: (blocks[digest].name, span) for digest, span in found.items()})
            spans |= found
        if missing := {digest: block for digest, block in blocks.items() if digest not in spans}:
            names = sorted(block.name for block in missing.values())
            wrong = sorted({Path(name).name for name in lookup.wrong})
            said = f". {', '.join(wrong[:4])} changed since it was added" if wrong else ""
            raise BaseUnavailable(
                f"{len(missing)} of {len(blocks)} blocks of the base are not at this site, such as "
                f"{', '.join(names[:3])}{said}. Add them with `{COMMAND}`, or name their folder in base_sources",
                tuple(faults),
            )
        return spans

    def _from_folder(self, folder: Path, missing: Mapping[str, Block], faults: list[str]) -> dict[str, Span]:
        base = BaseFolder.open(folder)
        digests = {block.name: digest for digest, block in missing.items()}
        found, lacking = base.find(missing.values(), digests)
        if lacking:
            faults.append(f"{folder}: {base.explain(lacking)}")
        return {
            digests[each.block.name]: each.span
            or self.cache.keep(digests[each.block.name], [each.data()], each.block.nbytes)
            for each in found
        }

    def _from_mirror(self, url: str, missing: Mapping[str, Block], check: Callable[[], None]) -> dict[str, Span]:
        found: dict[str, Span] = {}
        verify = self.tls if self.tls is not None else True
        with httpx.Client(verify=verify, timeout=MIRROR_SECONDS, follow_redirects=False) as client:
            for digest, block in missing.items():
                check()
                with client.stream("GET", f"{url.rstrip('/')}/{digest.replace(':', '-')}") as response:
                    if response.status_code == httpx.codes.NOT_FOUND:
                        continue
                    response.raise_for_status()
                    found[digest] = self.cache.keep(digest, _checked(response, check), block.nbytes)
        return found


def _checked(response: httpx.Response, check: Callable[[], None]) -> Iterator[bytes]:
    for piece in response.iter_raw():
        check()
        yield piece
