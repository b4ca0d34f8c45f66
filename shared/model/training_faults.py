"""Settings of local training that a run's model cannot have, checked at the run's creation and at each worker."""

from collections.abc import Iterator

from tessera.shared.model.block_rates import rate_faults
from tessera.shared.model.dataset_schema import PIXELS, TAKES
from tessera.shared.model.selectors import EVERYTHING, INSERTED, trainable_blocks
from tessera.shared.model.spec import Model
from tessera.shared.model.training_loss import loss_faults
from tessera.shared.run_settings import Training


def training_faults(training: Training, model: Model) -> Iterator[tuple[str, str]]:
    """Yield each such setting, with the reason and the remedy."""
    yield from loss_faults(training, model)
    if training.full_fine_tuning and not any(block.role in INSERTED for block in model.blocks):
        yield "full_fine_tuning", "is for a model with adapters or prompts, and this one trains whole: leave it out"
    inserted = trainable_blocks(model.blocks, model.external, trains_head=training.loss is None)
    trainable = EVERYTHING if training.full_fine_tuning else inserted
    frozen = {block.role for block in model.blocks} - {block.role for block in model.blocks if trainable.holds(block)}
    for role in sorted(frozen & training.rates.keys()):
        yield "rates", f"sets one for {role} blocks, which are frozen beside adapters or prompts: leave it out"
    yield from (("rates", said) for said in rate_faults(training, model.blocks))
    if training.augments and PIXELS not in TAKES.get(model.head, (PIXELS,)):
        kind = f"{model.config['model_type']} for {model.head}"
        yield "augmentation", f"changes images, and this {kind} takes none: leave it out, or make a model of images"
