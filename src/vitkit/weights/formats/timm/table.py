"""The table between timm's names and ours, and the names by which its files are known."""

from __future__ import annotations

from vitkit.spec import ViTSpec
from vitkit.weights.files.source import Header
from vitkit.weights.formats.key_table import AS_IS, KeyTransform, Row, Table, TensorParts, row
from vitkit.weights.formats.timm.architecture import is_eva

FIRST_BLOCK = "blocks.0."
RESNET_NAMES = "patch_embed.backbone."
_DINO_NAMES = {
    "register_tokens",
    "storage_tokens",
    f"{FIRST_BLOCK}mlp.w12.weight",
    f"{FIRST_BLOCK}mlp.w1.weight",
}
"""Names that DINO's own files have beside timm's."""
# timm's `Eva` has LayerScale as parameters of the block, and two biases beside the matrix.
EVA_NAMES = {
    "ls1.gamma": "gamma_1",
    "ls2.gamma": "gamma_2",
    "attn.qkv.q_bias": "attn.q_bias",
    "attn.qkv.v_bias": "attn.v_bias",
}
"""Our name in a block -> that of timm's `Eva`."""
_IN_BLOCK = (
    "attn.qkv.{p}",
    "attn.q_norm.{p}",
    "attn.k_norm.{p}",
    "attn.proj.{p}",
    "norm1.{p}",
    "norm2.{p}",
    "mlp.fc1.{p}",
    "mlp.fc1_g.{p}",
    "mlp.fc1_x.{p}",
    "mlp.fc2.{p}",
)
_IN_POOL = ("latent", "q.{p}", "kv.{p}", "proj.{p}", "norm.{p}", "mlp.fc1.{p}", "mlp.fc2.{p}")
_AROUND_BLOCKS = (
    "cls_token",
    "dist_token",
    "reg_token",
    "pos_embed",
    "norm_pre.{p}",
    "norm.{p}",
    "fc_norm.{p}",
    "pre_logits.fc.{p}",
    "head.{p}",
    "head_dist.{p}",
)
_IGNORED = (
    ("mask_token", "stands for masked patches in MAE's pre-training"),
    ("decoder_*", "restores masked patches in MAE's pre-training"),
)
_IGNORED_POOL = ("attn_pool.*", "attention pooling, which this model does without")


def has_timm_names(header: Header) -> bool:
    """Return True for blocks with a fused `attn.qkv` behind a `patch_embed.proj`."""
    names = header.shapes.keys()
    if "mask_token" in names and "decoder_embed.weight" not in names:
        return False  # pre-training other than MAE's
    # DINO's files have the same names and more; they are a format of their own.
    needed = {"patch_embed.proj.weight", f"{FIRST_BLOCK}norm1.weight"}
    needed.add(f"{FIRST_BLOCK}attn.qkv.weight")
    return needed <= names and names.isdisjoint(_DINO_NAMES)


def _unfolded(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    """Turn old files' matrix of patches, channels first, into the kernel of a convolution."""
    return tuple(
        # (D, C P P) -> (D, C, P, P)
        part.reshape(len(part), -1, *spec.patch_size) if part.ndim == 2 else part
        for part in parts
    )


def timm_table(spec: ViTSpec) -> Table:
    """Return a table of equal names; `Eva` has a few of its own."""
    eva = is_eva(spec)
    same = [*_AROUND_BLOCKS, *(f"blocks.{{i}}.{part}" for part in _IN_BLOCK)]
    ignored: tuple[tuple[str, str], ...] = _IGNORED
    if spec.pooling == "map":
        same += [f"attn_pool.{part}" for part in _IN_POOL]
    else:
        ignored = (*_IGNORED, _IGNORED_POOL)
    # Only on the way in: files are written with the kernel of a convolution.
    kernel = KeyTransform(_unfolded, AS_IS.to_theirs)
    rows = [row("patch_embed.proj.{p}", "patch_embed.proj.{p}", kernel), *_resnet_rows(spec)]
    rows += [row(name, name) for name in same]
    for ours, eva_name in EVA_NAMES.items():
        rows.append(row(f"blocks.{{i}}.{eva_name if eva else ours}", f"blocks.{{i}}.{ours}"))
    return Table(tuple(rows), ignored)


def _resnet_rows(spec: ViTSpec) -> list[Row]:
    """Return the rows of a hybrid's stem; without stages, its root is the whole of it."""
    if spec.stem != "resnet":
        return []
    names = ["conv.weight", "norm.{p}", "stem.conv.weight", "stem.norm.{p}"]
    parts: list[str] = []
    for n in (1, 2, 3):
        parts += [f"conv{n}.weight", f"norm{n}.{{p}}"]
    parts += ["downsample.conv.weight", "downsample.norm.{p}"]
    for stage, units in enumerate(spec.resnet_layers):
        for unit in range(units):
            names += [f"stages.{stage}.blocks.{unit}.{part}" for part in parts]
    return [row(RESNET_NAMES + name, RESNET_NAMES + name) for name in names]
