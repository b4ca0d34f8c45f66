"""Refusals of settings that do not go with secure sums or differential privacy.

The coordinator makes them when a run is created, and each site again before it trains: a coordinator that does not
would learn what the settings are to hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tessera.shared.aggregation.mean import Normalization
from tessera.shared.api.secure_sums import SecureSums
from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.run_settings import ClientPrivacy, Privacy, Training
from tessera.shared.secure_sums.messages import NOISE_BITS
from tessera.shared.updates.codecs import pipeline

OTHER_CODEC = "masked updates are integers: leave it out, or set secure_sums.bits"


class CommonSettings(Protocol):
    """The settings that a run and its tasks have in common, as far as refusals read them."""

    @property
    def training(self) -> Training: ...
    @property
    def privacy(self) -> Privacy | None: ...
    @property
    def client_privacy(self) -> ClientPrivacy | None: ...
    @property
    def secure_sums(self) -> SecureSums | None: ...
    @property
    def codec(self) -> str: ...
    @property
    def upload_budget(self) -> int | None: ...
    @property
    def upload_seconds(self) -> float | None: ...
    @property
    def normalization(self) -> Normalization: ...


def check_settings(
    settings: CommonSettings, beside_sums: Mapping[str, str] | None = None, beside_client: Sequence[str] = ()
) -> None:
    """Raise UnsupportedRun for settings that do not go with secure sums or differential privacy.

    `beside_sums` has the faults of settings that no task has, by setting; `beside_client` the changes without which
    the run cannot have client-level privacy.
    """
    if settings.secure_sums and (unfit := _unfit_for_sums(settings) | dict(beside_sums or {})):
        raise UnsupportedRun(
            "secure_sums does not go with " + "; ".join(f"{name}: {why}" for name, why in unfit.items())
        )
    _check_privacy(settings)
    if (client := settings.client_privacy) is None:
        return
    if changes := [*(["set normalization to cohort"] if settings.normalization != "cohort" else []), *beside_client]:
        raise UnsupportedRun(
            "client_privacy bounds each site by its clip_norm over a fixed number of sites, and by nothing else that "
            f"depends on updates: {'; '.join(changes)}"
        )
    if client.honest_sites is None:
        return
    if settings.secure_sums is None:
        raise UnsupportedRun(
            "client_privacy.honest_sites is for secure_sums, in which sites add the noise; here the coordinator "
            "does: leave it out"
        )
    if client.honest_sites > (quorum := settings.secure_sums.quorum):
        raise UnsupportedRun(
            f"client_privacy.honest_sites is {client.honest_sites}, but a sum may be over only {quorum} sites "
            "(secure_sums.quorum): lower it, or raise the quorum"
        )


def _unfit_for_sums(settings: CommonSettings) -> dict[str, str]:
    """Return the settings with which no secure sum can be taken or kept, each with the reason and the remedy."""
    sums, client = settings.secure_sums, settings.client_privacy
    unfit = {
        "normalization": (
            settings.normalization == "inverse-probability",
            "which blocks a site sends is part of the terms: divide by participants or cohort",
        ),
        "client_privacy.clip_quantile": (
            client is not None and client.clip_quantile is not None,
            "no party counts the updates within a norm: leave it out, and set clip_norm to a usual update's norm",
        ),
        "codec": (not pipeline.parse(settings.codec).lossless, OTHER_CODEC),
        "upload_budget": (settings.upload_budget is not None, "masked updates do not shrink: leave it out"),
        "upload_seconds": (settings.upload_seconds is not None, "masked updates do not shrink: leave it out"),
        "client_privacy": (
            client is not None and sums is not None and sums.bits != NOISE_BITS,
            f"noise needs {NOISE_BITS} bits: leave out secure_sums.bits",
        ),
    }
    return {name: why for name, (is_set, why) in unfit.items() if is_set}


def _check_privacy(settings: CommonSettings) -> None:
    """Raise UnsupportedRun for training that differential privacy of examples does not cover."""
    if settings.privacy and settings.training.precision == "float16":
        raise UnsupportedRun("privacy does not go with float16, whose scaled losses are not clipped: use bfloat16")
    if settings.privacy and settings.training.gradient_checkpointing:
        raise UnsupportedRun(
            "privacy does not go with training.gradient_checkpointing, with which gradients of single examples "
            "cannot be computed together: leave it out"
        )
