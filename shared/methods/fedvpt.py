"""FedVPT, deep: every worker trains prompts of a frozen dual encoder at the input of several layers, and the server
averages them.

VPT-Deep, Jia et al. 2022, Visual Prompt Tuning, arXiv 2203.12119, equations (7) and (8), under FedAvg. With `x_i` the
class token and `E_i` the patches after layer `L_i`, and `P_i` [tokens, width] the prompts of layer i + 1,

    [x_i, _, E_i] = L_i([x_(i-1), P_(i-1), E_(i-1)])    for the first `depth` layers

so that the output at the places of the prompts is dropped where the next layer has its own. The paper gives prompts
to all layers of an image tower; here the model's depth says how many have them, and the layers after those pass the
last prompts on. The paper trains a classifier beside the prompts; here the classes are texts. `modalities` adds deep
prompts of the text tower, which the paper does not have, or takes those alone. PromptFL is the method for prompts at
the input alone.
"""

from pydantic import Field

from tessera.shared.methods.base import Method, UnsupportedRun
from tessera.shared.methods.promptfl import PromptCoordinator, PromptFLSettings
from tessera.shared.model.selectors import Selector, named
from tessera.shared.model.spec import Modality


class FedVPTSettings(PromptFLSettings):
    modalities: tuple[Modality, ...] = Field(
        default=("vision",),
        min_length=1,
        max_length=2,
        description="towers whose prompts train; other prompts are frozen",
    )


class FedVPTCoordinator(PromptCoordinator[FedVPTSettings]):
    def _prompts(self) -> Selector:
        """Return the prompts of the towers, at all layers. Raises UnsupportedRun for a tower without deep prompts."""
        there = {block.name for block in self.run.blocks}
        modalities = self.settings.modalities
        if absent := [modality for modality in modalities if f"prompts.deep.{modality}" not in there]:
            flags = " ".join(f"--{modality}-prompts N" for modality in absent)
            raise UnsupportedRun(
                f"the model has no deep {' and '.join(absent)} prompts: create it with `tessera model init {flags} "
                "--prompt-depth D`, or choose promptfl for prompts at the input alone"
            )
        return named(
            [name for modality in modalities for name in (f"prompts.{modality}", f"prompts.deep.{modality}")]
        )


METHOD = Method(
    name="fedvpt",
    good_for="image and text pairs whose images differ from those that the model has seen. The model needs prompts "
    "in several layers: `tessera model init --vision-prompts 8 --prompt-depth 12`",
    sends="the prompts of each layer, tens to hundreds of kilobytes",
    settings=FedVPTSettings,
    coordinator=FedVPTCoordinator,
    source="Jia et al., Visual Prompt Tuning, arXiv 2203.12119, equation (7), under FedAvg",
)
