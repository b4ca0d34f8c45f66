"""The parts of a model that a command's options describe."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from safetensors import safe_open

from tessera.shared.client.client import Client
from tessera.shared.client.run_versions import find_start
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.model.config_safety import TARGET_SCALE, unsafe_settings
from tessera.shared.model.dataset_schema import MULTI_LABEL, REGRESSION, Problem
from tessera.shared.model.spec import WEIGHTS_FILE, Float32Role, Fusion, Head, Lora, Prompts

if TYPE_CHECKING:
    import torch
    import transformers

    from tessera.worker.model import block_map, build, config
    from tessera.worker.model.pretrained import Config
else:
    torch = DeferredModule("torch")
    transformers = DeferredModule("transformers")
    block_map = DeferredModule("tessera.worker.model.block_map")
    build = DeferredModule("tessera.worker.model.build")
    config = DeferredModule("tessera.worker.model.config")

Asks = Literal["local", "global"]
Dtype = Literal["float32", "bfloat16", "float16"]

MappingOption = Annotated[
    Path | None, typer.Option("--mapping", help="A TOML file that describes attention of an unknown layout.")
]


def caption_ids(caption: str | None, source: str) -> list[int] | None:
    """Return a caption's tokens without start and end, by the tokenizer of a folder or a name on the hub.

    Raises ValueError.
    """
    if caption is None:
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as fault:  # each class of tokenizer fails in its own way
        raise ValueError(f"--text-prompt-from needs a tokenizer, and {source} has none that can be loaded") from fault
    ids = tokenizer(caption, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError("the caption for the text prompts has no tokens")
    return list(ids)


VISION = "prompts.vision"


def vision_start(source: str | None, client: Callable[[], Client]) -> torch.Tensor | None:
    """Return the vision prompts of a safetensors file, of a model folder, or of `RUN[@VERSION]` at the coordinator,
    [tokens, width]. Raises ValueError, and as `find_start` does."""
    if source is None:
        return None
    path = Path(source)
    if not path.exists():
        if path.suffix == ".safetensors" or path.name != source:
            raise ValueError(f"--vision-prompt-from: there is no file or folder {source}")
        return _vision_of_version(client(), source)
    with safe_open(path / WEIGHTS_FILE if path.is_dir() else path, "pt") as file:
        names = list(file.keys())
        name = names[0] if len(names) == 1 else VISION
        if name not in names:
            raise ValueError(f"--vision-prompt-from: {source} has {len(names)} tensors, and none is called {VISION}")
        found: torch.Tensor = file.get_tensor(name)
    if found.ndim != 2 or not len(found) or not bool(found.isfinite().all()):
        raise ValueError(
            f"--vision-prompt-from: {name} of {source} has the shape {list(found.shape)}, and a matrix of finite "
            "numbers is needed, a row for each token"
        )
    return found


def _vision_of_version(client: Client, named: str) -> torch.Tensor:
    run, version, _ = find_start(client, named)
    block = client.model(run.spec.model).by_name.get(VISION)
    if block is None:
        raise ValueError(f"--vision-prompt-from: the model of run {run.spec.name} has no vision prompts")
    raw = client.read_blob(client.manifest(version.digest).blocks[VISION], block.nbytes)
    dtype = next(kind for kind, name in block_map.DTYPES.items() if name == block.dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(block.shape)


def prompts_from(
    vision: int,
    text: int | None,
    started: torch.Tensor | None,
    caption: list[int] | None,
    asks: Asks | None,
    heads: int | None,
    depth: int = 1,
) -> Prompts | None:
    """Return the prompts of the options, or None without any. Raises ValueError for options that do not fit."""
    if heads is not None and not asks:
        raise ValueError("--fusion-heads needs --prompt-fusion: a fusion that stays at its site has the run's heads")
    if caption is not None and text is not None and text != len(caption):
        raise ValueError(
            f"the caption has {len(caption)} tokens: leave --text-prompts out, or set it to {len(caption)}"
        )
    if started is not None and vision not in (0, len(started)):
        raise ValueError(
            f"the vision prompts to start from are {len(started)} tokens: leave --vision-prompts out, or set it to "
            f"{len(started)}"
        )
    vision = vision if started is None else len(started)
    text = text or 0 if caption is None else len(caption)
    if not vision and not text:
        if asks:
            raise ValueError("--prompt-fusion needs --vision-prompts or --text-prompts")
        if depth > 1:
            raise ValueError("--prompt-depth needs --vision-prompts or --text-prompts")
        return None
    if asks and depth > 1:
        raise ValueError("--prompt-fusion fuses prompts at the input of a tower: leave out --prompt-depth")
    fusion = Fusion(asks=asks, heads=heads or 8) if asks else None
    return Prompts(vision=vision, text=text, fusion=fusion, depth=depth)


def lora_from(rank: str | None, alpha: float | None, roles: str, *, dora: bool = False) -> Lora | None:
    """Return the adapters of the options, or None without a rank. Raises ValueError for options that do not fit."""
    if rank is None:
        if alpha is not None or dora:
            raise ValueError(f"{'--dora' if dora else '--lora-alpha'} needs --lora-rank")
        return None
    names = [name.strip() for name in roles.split(",") if name.strip()]
    try:
        ranks = sorted({int(each) for each in rank.split(",")})
    except ValueError:
        raise ValueError(f"--lora-rank is a number, or numbers separated by commas; not {rank!r}") from None
    whole, beside = ranks[-1], {"ranks": ranks} if len(ranks) > 1 else {}
    about = {"rank": whole, "alpha": alpha if alpha is not None else 2 * whole, "roles": names, "dora": dora}
    return Lora.model_validate(about | beside)


def float32_of(
    dtype: torch.dtype | str | None, head: Head, prompts: Prompts | None, lora: Lora | None
) -> tuple[Float32Role, ...]:
    """Return the roles that are float32 beside a base in this dtype: what is added, and a classifier."""
    if dtype not in (torch.bfloat16, torch.float16):
        return ()
    added: dict[Float32Role, object] = {"head": head.endswith("-classification"), "prompt": prompts, "adapter": lora}
    return tuple(role for role, there in added.items() if there)


OF_LABELS = ("num_labels", "id2label", "label2id", "problem_type", *TARGET_SCALE)
"""Keys of a config about its classes. The labels' dtype decides the loss where `problem_type` is left out."""


def labels_from(labels: str) -> Config:
    """Return the keys of a config for the number or the names of its classes. Raises ValueError."""
    if labels.isdecimal() and int(labels):
        return {"num_labels": int(labels)}
    try:
        (names,) = csv.reader([labels], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as fault:
        raise ValueError(f"--labels: {labels!r} is not a line of CSV: {fault}") from fault
    names = [name.strip() for name in names]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"--labels: {labels!r} is neither a number of classes nor two names or more, each once. A name with a "
            "comma stands in quotation marks"
        )
    return {"num_labels": len(names), "id2label": {str(number): name for number, name in enumerate(names)}}


def label_keys(problem: Problem | None, labels: str | None, mean: float | None, deviation: float | None) -> Config:
    """Return the keys of a config about a classifier's outputs, or none without options. Raises ValueError."""
    if problem != "regression":
        if (mean, deviation) != (None, None):
            raise ValueError("--target-mean and --target-deviation need --problem-type regression")
        if problem and labels is None:
            raise ValueError(f"--problem-type {problem} needs --labels")
        return {} if labels is None else labels_from(labels) | ({"problem_type": MULTI_LABEL} if problem else {})
    if labels is not None:
        raise ValueError("--problem-type regression has no classes: leave --labels out")
    if mean is None or deviation is None:
        raise ValueError(
            "--problem-type regression needs --target-mean and --target-deviation: about the mean and the standard "
            "deviation of the targets, by a source other than the sites' data; or 0 and 1 for targets as they are"
        )
    scale: Config = {"target_mean": mean, "target_deviation": deviation}
    if faults := unsafe_settings(scale):
        raise ValueError("; ".join(faults))
    return {"num_labels": 1, "problem_type": REGRESSION, **scale}


def decoder_from(settings: Config, head: Head) -> Config:
    """Return the key by which a model like BERT sees the tokens after each one or not, as the head needs it."""
    built = config.config_from(settings)
    needed = build.is_decoder_of(built, head)
    return {} if needed == getattr(built, "is_decoder", None) else {"is_decoder": needed}


def padding_from(settings: Config, head: Head, of_tokenizer: Callable[[], int | None]) -> Config:
    """Return the padding token of a decoder without one: its tokenizer's, with which data are padded.

    To classify a text, a decoder reads the last token that is no padding. Without a tokenizer it is the token that
    ends a text, or the first of several.
    """
    built = config.config_from(settings).get_text_config()
    if head != "text-classification" or getattr(built, "pad_token_id", None) is not None:
        return {}
    ends = getattr(built, "eos_token_id", None)
    end = next(iter(ends), None) if isinstance(ends, list) else ends
    own = of_tokenizer()
    found = end if own is None else own
    return {} if found is None else {"pad_token_id": found}
