"""Exports from a coordinator that is not trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from tessera.shared.client.export import export_file, export_folder
from tessera.shared.model.spec import Model
from tests.support.coordinator import LiveCoordinator, refusing
from tests.support.federation import small_model, start_run, values

MODEL = small_model()


UNSAFE: dict[str, Any] = {
    "auto_map": {"AutoModel": "evil.py"},
    "attn_implementation": "evil/kernel",
    "_name_or_path": "evil/model",
    "quantization_config": {"quant_method": "bitsandbytes"},
    "push_to_hub": True,
    "text_config": {"auto_map": {}},
}


def test_a_key_that_workers_refuse_neither_begins_a_run_nor_is_exported(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client("orchestrator")
    run = start_run(client, MODEL, values(MODEL))

    class Hostile:
        read_blob, export = client.read_blob, client.export

        def __init__(self, config: dict[str, Any]) -> None:
            self._said = MODEL.model_copy(update={"config": config})

        def model(self, digest: str) -> Model:
            return self._said

    for key, value in UNSAFE.items():
        config = {**MODEL.config, key: value}
        with refusing("invalid", "no worker accepts"):
            start_run(client, MODEL.model_copy(update={"config": config}), values(MODEL))
        with refusing("invalid", "no worker accepts"):
            export_folder(Hostile(config), run, tmp_path / "out", 0, lambda _: None)
        assert not (tmp_path / "out").exists()


def test_an_export_longer_than_the_models_table_is_given_up(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client("orchestrator")
    run = start_run(client, MODEL, values(MODEL))
    export_file(client, run, tmp_path / "whole", 0, lambda _: None)
    sent = 0

    class Endless:
        model, read_blob = client.model, client.read_blob

        def export(self, run_id: str, file: BinaryIO, number: int | None = None, progress: Any = None) -> None:
            nonlocal sent
            while True:
                file.write(bytes(100))
                sent += 100
                progress(100)

    with refusing("invalid", "longer than the"):
        export_file(Endless(), run, tmp_path / "out", 0, lambda _: None)
    assert sent <= (tmp_path / "whole").stat().st_size + 100
    assert not (tmp_path / "out").exists()
