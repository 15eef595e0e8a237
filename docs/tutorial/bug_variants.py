"""The trainings of chapter 14: chapter 0's model right, with each bug, and with each part removed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from buggy_vit import BuggyViT
from torch import Tensor, nn
from torch.nn import functional as F

DROPOUT, DECAY = 0.1, 0.1
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "sgd": (0.03, 0.1, 0.3)}
"""The learning rates that are tried with every variant, by its optimizer."""


@dataclass(frozen=True)
class Variant:
    """One way to train chapter 0's model.

    Attributes:
        says: what is different, in a few words.
        notebook: where it came from: A to E; "" for references and ablations.
        bugs: the switches that are on; the variant's own name where absent.
        against: the variant that it is compared with.
        positions: "learned" or "sines".
        dropout: rate of dropout after the positions and after each dense layer but qkv.
        optimizer: "adamw" or "sgd".
    """

    says: str
    notebook: str = ""
    bugs: frozenset[str] = frozenset()
    against: str = "correct"
    positions: str = "learned"
    dropout: float = 0.0
    optimizer: str = "adamw"

    def model(self, **sizes: int) -> BuggyViT:
        """Create the model, with random weights; `sizes` replace those of `buggy_vit`."""
        return BuggyViT(
            self.bugs, positions=self.positions, dropout=self.dropout, **sizes
        )

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch."""
        if "double_softmax" in self.bugs:  # E: the model ends in a softmax, too
            outputs = outputs.softmax(-1)
        loss = F.cross_entropy(outputs, labels)
        if "loss_divided" in self.bugs:  # E: the loss is a mean already
            loss = loss / len(labels)
        return loss

    def optimize(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """Create the optimizer of the weights that the model has registered."""
        weights = model.parameters()
        if self.optimizer == "sgd":
            return torch.optim.SGD(weights, lr=rate, momentum=0.9)
        if "coupled_decay" in self.bugs:  # A: the decay is added to the gradient
            return torch.optim.Adam(weights, lr=rate, weight_decay=DECAY)
        return torch.optim.AdamW(weights, lr=rate, weight_decay=DECAY)

    def prepare_to_evaluate(self, model: nn.Module) -> None:
        """Turn dropout off."""
        if "no_eval" not in self.bugs:  # E: eval() is never called
            model.eval()


def _bug(name: str, notebook: str, says: str, **others: object) -> dict[str, Variant]:
    return {name: Variant(says, notebook, frozenset([name]), **others)}  # type: ignore[arg-type]


DROPPED = {"dropout": DROPOUT, "against": "dropout"}
SINES = {"positions": "sines", "against": "sines"}
SGD = {"optimizer": "sgd", "against": "sgd"}
VARIANTS: dict[str, Variant] = {
    "correct": Variant("chapter 0's model, AdamW"),
    "dropout": Variant("the same with dropout 0.1", dropout=DROPOUT),
    "sines": Variant("the same with fixed sine positions", positions="sines"),
    "sgd": Variant("the same with SGD", optimizer="sgd"),
    # Eq. 1
    **_bug("reshape", "E", "strips of pixels instead of patches"),
    **_bug("ones", "A", "class token and positions start at ones"),
    **_bug("large_normal", "A", "class token and positions start at N(0, 1)"),
    **_bug("zero_positions", "B", "positions start at zero"),
    **_bug("uniform_class_token", "E", "class token starts at U(0, 1)"),
    **_bug("xavier", "C", "Xavier for tokens, positions and fused qkv"),
    **_bug("exponent_zero", "E", "sines: exponent always 0", **SINES),
    # Eq. 2
    **_bug("one_head", "B", "heads never split, scaled as if they were"),
    **_bug("no_root", "D", "scores not divided by the root of d"),
    **_bug("careless_dropout", "B", "F.dropout(weights): p = 0.5, always on"),
    **_bug("sliced_heads", "E", "heads see their own slice, no output matrix"),
    **_bug("heads_in_a_list", "E", "heads in a Python list, never trained"),
    **_bug("no_projection_dropout", "A, D", "dropout: none after attention", **DROPPED),
    # Eq. 3
    **_bug("joint_norm", "E", "LayerNorm over tokens and width together"),
    **_bug("one_layer_mlp", "E", "an MLP of one layer"),
    **_bug("relu", "E", "the argument `activation` ignored: ReLU"),
    # Eq. 4, loss, optimizer, evaluation
    **_bug("no_final_norm", "E", "no norm before the head"),
    **_bug("double_softmax", "E", "softmax in the model and in the loss"),
    **_bug("loss_divided", "E", "loss divided by the batch size twice"),
    "loss_divided_sgd": Variant(
        "SGD: loss divided by the batch size twice",
        "E",
        frozenset(["loss_divided"]),
        **SGD,
    ),
    **_bug("coupled_decay", "A", "Adam with weight decay instead of AdamW"),
    **_bug("no_eval", "E", "dropout: evaluated without eval()", **DROPPED),
    "notebook_e": Variant(
        "ten bugs of notebook E at once",
        "E",
        frozenset(
            {
                "reshape",
                "uniform_class_token",
                "exponent_zero",
                "sliced_heads",
                "heads_in_a_list",
                "joint_norm",
                "one_layer_mlp",
                "no_final_norm",
                "double_softmax",
                "loss_divided",
            }
        ),
        **SINES,
    ),
    # Ablations
    **_bug("no_positions", "", "ablation: no positions"),
    **_bug("no_residual", "", "ablation: no residual connections"),
    **_bug("no_norm", "", "ablation: no LayerNorm"),
}
"""Every variant of the measurements: four references, the bugs, three ablations."""


def _with_sines(bug: str) -> dict[str, Variant]:
    says = f"sines: {VARIANTS[bug].says}"
    return {f"{bug}_sines": Variant(says, "E", frozenset([bug]), **SINES)}  # type: ignore[arg-type]


FOLLOW_UPS: dict[str, Variant] = {
    "sines": VARIANTS["sines"],
    **_with_sines("joint_norm"),
    **_with_sines("reshape"),
    **_with_sines("one_layer_mlp"),
}
"""Three bugs again, in a model whose positions do not have to be learned."""
