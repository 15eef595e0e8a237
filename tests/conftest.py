"""What every test needs before anything else is imported."""

from __future__ import annotations

import torch

# torchvision's wheel does not import beside a CPU-only torch until these operators are declared.
# timm, a peer of the parity tests, imports torchvision; vitkit never does.
_operators = torch.library.Library("torchvision", "DEF")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
