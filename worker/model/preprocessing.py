"""Tokenizer and image processor of a pretrained model, as the files that travel with a run."""

from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel

from tessera.shared.model.preprocessing import FileName, ProcessorSettings, TokenizerSettings, require_file

UNLIMITED = 1 << 40
"""Transformers writes lengths above this for a tokenizer without a limit."""


def files_of(source: str, model: PreTrainedModel) -> tuple[dict[FileName, bytes], list[str]]:
    """Return the files beside a config, by name, and a sentence for each that cannot travel.

    Raises Invalid for a file that exceeds its limit.
    """
    files: dict[FileName, bytes] = {}
    notes: list[str] = []
    if tokenizer := _loaded(AutoTokenizer, source):
        rows = model.get_input_embeddings()
        known = getattr(rows, "num_embeddings", None)
        highest = max(tokenizer.get_vocab().values(), default=-1)
        if not set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens):
            notes.append("no tokenizer with a vocabulary lies beside the config: exports will have none")
        elif not tokenizer.is_fast:
            notes.append("the tokenizer has no tokenizer.json and is not carried: save its fast version there")
        elif known is not None and highest >= known:
            notes.append(f"the tokenizer has token {highest}, the model only {known} embeddings: it is not carried")
        else:
            files["tokenizer.json"] = tokenizer.backend_tokenizer.to_str().encode()
            files["tokenizer_config.json"] = _settings(TokenizerSettings, _tokenizer_values(tokenizer))
    if processor := _loaded(AutoImageProcessor, source):
        files["preprocessor_config.json"] = _settings(ProcessorSettings, processor.to_dict())
    for name, raw in files.items():
        require_file(name, raw)
    return files, notes


def _loaded(auto: Any, source: str) -> Any:
    """Return the tokenizer or processor of a folder or a name on the hub; None if it has none that can be loaded."""
    try:
        return auto.from_pretrained(source, trust_remote_code=False)
    except Exception:  # noqa: BLE001  (each class fails in its own way, and most models lack one of the two)
        return None


def _tokenizer_values(tokenizer: Any) -> dict[str, Any]:
    names = TokenizerSettings.model_fields.keys() - {"tokenizer_class"}
    values = {name: getattr(tokenizer, name, None) for name in names}
    return {**values, "model_max_length": min(tokenizer.model_max_length, UNLIMITED)}


def _settings(kind: type[TokenizerSettings | ProcessorSettings], values: dict[str, Any]) -> bytes:
    """Return the settings of known keys alone."""
    plain = {name: value for name, value in values.items() if name in kind.model_fields and value is not None}
    return (kind.model_validate(plain).model_dump_json(indent=1, exclude_none=True) + "\n").encode()
