"""The precision in which a worker keeps the base of a task's model."""

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.model.spec import Model
from tessera.worker.model.four_bits import four_bit_tensors
from tessera.worker.model.layouts import MappingFile
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.model_cache import Built

REMEDY = "remove base_bits from [compute] in this worker's settings, or use the method lora"


def matrices_in_four_bits(
    run: TaskRun, document: Model, mapping: MappingFile | None, last: Built | None
) -> frozenset[str]:
    """Return the names of the matrices to keep in 4 bits, if the worker's settings say so; those of `last`, if given.

    Raises UnsupportedRun for a task that needs them as they are.
    """
    if run.env.setup.compute.base_bits is None:
        return frozenset()
    if not document.lora:
        raise UnsupportedRun(f"this worker keeps bases in 4 bits beside adapters, and the model has none: {REMEDY}")
    names, plan = last.four_bits if last else four_bit_tensors(document, mapping), run.task.plan
    matrices = {block.name for block in document.blocks if block.tensor in names}
    # An evaluation trains none of the blocks that its plan names.
    selected = (("trains", plan.train), ("uploads", plan.upload)) if run.task.kind == "train" else ()
    for asked, selector in selected:
        if touched := sorted(matrices.intersection(block.name for block in selector.resolve(document.blocks))):
            raise UnsupportedRun(
                f"the plan {asked} {len(touched)} blocks of a base that this worker keeps in 4 bits, such as "
                f"{', '.join(touched[:3])}: {REMEDY}"
            )
    if lacking := sorted(matrices.difference(block.name for block in plan.fetch.resolve(document.blocks))):
        raise UnsupportedRun(
            f"the plan leaves {len(lacking)} blocks of the base random, such as {lacking[0]}, and this worker keeps "
            f"them in 4 bits: {REMEDY}"
        )
    return names
