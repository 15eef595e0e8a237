"""The head of a pretrained model for the classes of the data: kept, reordered or replaced."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from vitkit.data.datasets.class_names import match_classes
from vitkit.models.interface.classifier import is_of_head
from vitkit.weights.adapt import adapt
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.converting.resized_model import rebuilt


def head_for_classes(stored: Checkpoint, classes: tuple[str, ...]) -> tuple[Checkpoint, str]:
    """Return the checkpoint with a head for these classes, and notes on the changes."""
    old, count = stored.model.spec.num_classes, len(classes)
    if stored.classes == classes:
        return stored, f"the head is kept: its {count} classes are the data's"
    match = match_classes(classes, stored.classes)
    if len(stored.classes) == count and not match.unknown:
        # in the note, so the file has no line on an adapted head
        reordered = replace(adapt(stored, classes=classes), metadata=stored.metadata)
        return reordered, f"the head is kept: its {count} classes are reordered to the data's order"
    change = f"the checkpoint has no head; the new one has {count} classes"
    if old:
        change = f"the head of {old} classes is replaced by one of {count}"
    if stored.model.spec.representation_width:
        change += ", without the tanh layer"
    return with_fresh_head(stored, count), f"{change}; its initial weights are zero"


def with_fresh_head(stored: Checkpoint, count: int) -> Checkpoint:
    """Return the checkpoint with a head of zeros for `count` classes.

    As the ViT paper fine-tunes (arXiv 2010.11929, Sec. 3.2): the whole head of pre-training goes,
    its tanh layer too, and the new one is a D x K matrix of zeros.
    """
    model = stored.model
    if model.spec.representation_width is not None:
        spec = model.spec.replace(representation_width=None, num_classes=0)
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if not name.startswith("pre_logits.") and not is_of_head(name)
        }
        stored = replace(stored, model=rebuilt(model, spec, state), classes=())
    headless = replace(adapt(stored, num_classes=0), classes=())
    fresh = adapt(headless, num_classes=count)
    for name, parameter in fresh.model.named_parameters():
        if is_of_head(name):
            nn.init.constant_(parameter, fresh.model.spec.head_bias if "bias" in name else 0.0)
    return replace(fresh, metadata=stored.metadata)
