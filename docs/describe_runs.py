"""The reference of a run's file, as it is committed: `python -m docs.describe_runs > docs/runs.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel

from tessera.shared.aggregation.robust import Robust
from tessera.shared.aggregation.server_optimizer import ServerOptimizer
from tessera.shared.api.runs import Cohort, Evaluation, RunSpec
from tessera.shared.api.secure_sums import SecureSums
from tessera.shared.cli.run_keys import Key, keys_of
from tessera.shared.client.run_file import UPLOADED
from tessera.shared.diagnostics import toml
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import Match
from tessera.shared.run_settings import ClientPrivacy, Privacy, Training

PREAMBLE = """\
# A run's file

To write a run's file for a method, with the meaning and the default of each key, and then start the run:

<!-- not run: it needs a coordinator; the quickstart runs these commands -->
```sh
tessera run init fedavg --out run.toml
tessera run preview run.toml --model model
tessera run create run.toml --model model
```

The file is TOML. Keys that it leaves out have their defaults, and unknown keys are refused with the nearest name.
A run is also refused for a value, other than the default, that would have no effect: `momentum` with AdamW,
`patience` without an automatic warm-up, or a codec for a method that sends nothing.
`--set cohort.quorum=2` changes a key for one command. With `--set method.name=fedprox` the file's
`[method.settings]` are dropped, with a note: another method starts from its own defaults. A smallest file:

```toml
name = "first"
dataset = "digits"
rounds = 10

[method]
name = "fedavg"

[evaluation]
sites = true
```

`tessera simulate` reads the same keys, and a table `[simulation]` ([simulating.md](simulating.md#settings)); there
`name` and `dataset` are optional. The same keys as JSON, with `model` and `version`, create a run over HTTP
([protocol.md](protocol.md)).

This page is made from the models that check the file, by `python -m docs.describe_runs > docs/runs.md`; a test
compares the two. A default of `none` cannot be written in the file: leave the key out.

## Changing a live run

<!-- not run: it needs a coordinator -->
```sh
tessera run change RUN --set rounds=20 --set cohort.quorum=2 --set cohort.deadline_seconds=7200
```

A running or paused run may change these three settings, here, on its page, or by `PATCH /v1/runs/{id}`. The next
round has them; the open round keeps what its sites agreed to, and only waits longer if the deadline is longer. The
coordinator's audit has the old and the new values and who changed them (`run.change`). With `rounds` set to the
number of the open round, the run completes after it; fewer are refused.

| a run with | cannot change | because |
|---|---|---|
| `[secure_sums]` | any of them | they are in the terms that helpers and sites agreed on |
| `[privacy]` or `[client_privacy]` | `rounds` | the noise is computed for all rounds |
| `training.schedule` or `training.warmup` | `rounds` | the learning rate runs over all rounds |
| a method whose stages follow from it, as FedFrozen's automatic warm-up | `rounds` | its `check_rounds` says so |

The refusal names the command that starts a new run from the last version, `tessera run create --from RUN`. A site
with `approve_runs` is asked again, and the request begins with what changed; without, its worker goes on. A run that
changes back goes on there under the earlier approval, unless the site declined it.
"""

TRAINING = """\
Local training at each worker, the same for all methods.

A round is `epochs` passes at each site, or `steps` steps, which go on over the examples in a new order where a pass
ends. A site's `max_epochs` counts steps as its epochs, rounded up. Phases with epochs of their own, such as those of
FedRep's `head_epochs`, keep them.

The schedule runs over the `rounds` of the run. At step s, from 0, of the S steps of a phase in round r, the
progress of the run is `(r - 1 + s / S) / rounds`. So the schedule continues where it was after a restart, and sites
with different numbers of steps end a round at about the same rate. A personal model is trained through the whole
schedule each time that it is evaluated.

In a model with adapters these and the head train, and in a model with prompts these, by every method; the base is
frozen and is never sent. `full_fine_tuning = true` trains the base too. It is part of the terms that a site approves,
and the request says so. A run is refused if the method then has nothing left to train, to keep or to freeze.

`rates = { head = 10, adapter = 0.5 }` multiplies the learning rate of the blocks of a role; the schedule scales all
rates alike. The roles are those in the model's `blocks.json`; roles that share a fused tensor, such as the query, key
and value of GPT-2, need the same rate. `private` is for modules that a method adds at a site; a method's own
`private_learning_rate` has precedence. SCAFFOLD, which computes gradients from steps, refuses `rates`.

`gradient_checkpointing` keeps only the inputs of a model's layers and computes the rest again in the backward pass.
Gradients keep their bits. Use it where a single example does not fit a site's GPU. It is refused for models whose
layers cannot be computed again, and for private runs.

`label_smoothing` and `class_weights` change the loss that training minimizes and reports, before a method adds its
own term. Losses of evaluations, and scores of layers, are of the model's own loss, so that runs can be compared.
Smoothing takes a model whose labels are classes or tokens: classifiers and language models, but neither `contrastive`
models nor models that learn numbers or several labels at once. Weights take a classifier of examples or of tokens. A
worker refuses a model with a further term in its own loss.

The loss of a batch is the sum of its labels' weighted losses over the sum of their weights, as in torch, also where
a worker trains the batch in pieces. `class_weights = [1.0, 4.0]` follows the order of the classes, and
`class_weights = { tumour = 4.0 }` the names in the model's `id2label`. Under differential privacy that sum would mix
the labels of the other examples into each gradient. There an example's loss is divided by the mean weight of all
classes, and by the number of its own labels; its gradient is then clipped, which bounds a rare class as any other.

`[training.augmentation]` changes images at random while they train: by `crop`, `crop_padding`, the flips,
`rand_augment`, and then the colours, in this order. Each image is changed by itself, by other draws in each pass,
and alike for any number of loaders and devices. Evaluations, held-out images and scores of layers see the images as
they are; fine-tuning for a personal evaluation is training. The changes are of the image as the data set's `size`
or `processor` prepares it, so a crop enlarges fewer pixels. RandAugment has the operations and strengths of
torchvision. On greyscale images `saturation` and `hue` change nothing. Leave flips out if left and right decide a
class, or if the text of a class mentions them. Changes of colours need images of the kinds `images`, `imagetext` or
`digits`, whose black and white are known. Workers need the extra `augmentation`; a worker without it is offered no
such run.

With `keep_moments` a site continues each block with the moments of the last merged round in which it trained it.
They stay in the site's vault, are removed with it, and take twice the size of the trained weights with `adamw`. A
site that joins, and a block that trains for the first time, start with new ones. Fine-tuning for a personal
evaluation always starts with new moments. FedNova refuses them with `sgd`. Under differential privacy they cost no
more, since they derive from noisy gradients.
"""

TABLES: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("cohort", Cohort, "The participants and time limits of a round; [glossary.md](glossary.md) defines the terms."),
    ("training", Training, TRAINING),
    ("evaluation", Evaluation, "[evaluation.md](evaluation.md) describes who measures, and what leaves a site."),
    (
        "privacy",
        Privacy,
        "Differential privacy of what each worker sends ([privacy.md](privacy.md)). Without the table there is none.",
    ),
    (
        "client_privacy",
        ClientPrivacy,
        "Noise for [whole sites](privacy.md#whole-sites), with normalization = cohort; by the sites in secure sums.",
    ),
    (
        "secure_sums",
        SecureSums,
        "Secure aggregation: the coordinator learns sums over sites alone ([secure-sums.md](secure-sums.md)).",
    ),
)

UNIONS: tuple[tuple[str, str, Any, str], ...] = (
    (
        "server_optimizer",
        "kind",
        ServerOptimizer,
        "The step that the coordinator takes along the merged update ([methods.md](methods.md)).",
    ),
    ("robust", "rule", Robust, "The rule that merges updates ([robustness.md](robustness.md))."),
)


BLOCKS = """
## Blocks

Some methods take a list of tables, each of which selects the blocks that meet all of its conditions, as in
`private = [{ roles = ["head"] }, { layers = [0, 1] }]`.

"""


def document() -> str:
    """Return the page, with a line break at its end."""
    inner = {*(name for name, *_ in TABLES), *(name for name, *_ in UNIONS), *UPLOADED}
    top = [key for key in keys_of(RunSpec) if key.name.partition(".")[0] not in {*inner, "method"}]
    parts = [PREAMBLE, "\n## Top of the file\n\n", *_table(top)]
    parts += ["\n## `[method]`\n\n", *_table(keys_of(MethodSpec))]
    for name, model, said in TABLES:
        parts += [f"\n## `[{name}]`\n\n{said}\n\n", *_table(keys_of(model))]
    for name, tag, union, said in UNIONS:
        parts += [f"\n## `[{name}]`\n\n{said} The key `{tag}` chooses, and decides which other keys there are.\n\n"]
        parts += _members(tag, union)
    parts += [
        "\n## Settings of each method\n\n",
        "In the table `[method.settings]`. [methods.md](methods.md) describes the methods.\n",
    ]
    for name, method in sorted(methods().items()):
        parts += [f"\n### `{name}`\n\n{method.source[:1].upper()}{method.source[1:]}.\n\n"]
        parts += _table(keys_of(method.settings))
        if method.training:
            required = " and ".join(f"`training.{key} = {toml(value)}`" for key, value in method.training.items())
            parts.append(f"\nIt requires {required}.\n")
    parts += [BLOCKS, *_table(keys_of(Match))]
    return "".join(parts)


def _members(tag: str, union: Any) -> Iterator[str]:
    """Yield a row for each key of each member of a tagged union; one without keys has a row of its own."""
    yield f"| `{tag}` | key | type | default | meaning |\n|---|---|---|---|---|\n"
    for model in get_args(get_args(union)[0]):
        chosen = toml(model.model_fields[tag].default)
        own = [key for key in keys_of(model) if key.name != tag]
        for key in own:
            yield f"| `{chosen}` {_row(key)}"
        if not own:
            yield f"| `{chosen}` | | | | {(model.__doc__ or '').strip().partition('.')[0]} |\n"


def _table(keys: Iterable[Key]) -> Iterator[str]:
    rows = [_row(key) for key in keys]
    yield "| key | type | default | meaning |\n|---|---|---|---|\n" if rows else "It has no settings.\n"
    yield from rows


def _row(key: Key) -> str:
    default = "required" if key.required else "none" if key.default is None else f"`{key.default}`"
    return f"| `{key.name}` | {key.kind} | {default} | {key.meaning.replace('|', chr(92) + '|')} |\n"


def main() -> None:
    sys.stdout.write(document())


if __name__ == "__main__":
    main()
