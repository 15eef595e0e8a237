"""Names used by teaching notebooks and other libraries, with their names in vitkit."""

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from vitkit.errors import SettingError, SpecError


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return each of the names -> what they stand for, of a table of the opposite."""
    return {name: ours for ours, names in table.items() for name in names.split()}


def _fields(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(ours.split()) for name, ours in _by_name(table).items()}


KEYWORDS = _fields(
    {
        "width": "dim d_model emb_dim emb_size embed_size embedding_dim hidden_d hidden_dim "
        "hidden_size latent_size",
        "depth": "n_blocks n_layers num_blocks num_layers num_hidden_layers num_transformer_layers",
        "num_heads": "heads n_heads nhead num_attention_heads",
        "head_width": "dim_head head_dim",
        "mlp_width": "dim_feedforward ff_dim intermediate_size mlp_dim mlp_size",
        "in_channels": "channels n_channels num_channels",
        "image_size": "input_size",
        "num_classes": "n_classes num_labels",
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "pooling": "pool",
        "position_dropout": "emb_dropout embedding_dropout",
        "attention_dropout": "attn_dropout attention_probs_dropout_prob",
        "attention_dropout projection_dropout mlp_dropout": "dropout",
        "position_dropout projection_dropout mlp_dropout": "hidden_dropout_prob",
    }
)
"""Keyword -> the fields of `ViTSpec` that take its value. `dropout` is that of vit-pytorch and of
torch's `TransformerEncoderLayer`: on attention weights, after the projection, and in the MLP."""

TIMM_KEYWORDS = _fields(
    {
        "image_size": "img_size",
        "in_channels": "in_chans",
        "width": "embed_dim",
        "mlp_width": "mlp_ratio",
        "pooling": "global_pool pool_include_prefix",
        "norm_before_pool": "fc_norm use_fc_norm",
        "num_registers": "reg_tokens num_reg_tokens",
        "positions_cover_prefix": "no_embed_class",
        "positions": "pos_embed",
        "embedding_norm": "pre_norm use_pre_transformer_norm",
        "layer_scale": "init_values",
        "activation": "act_layer",
        "norm": "norm_layer",
        "initialisation": "weight_init",
        "head_dropout": "drop_rate",
        "position_dropout": "pos_drop_rate",
        "patch_dropout": "patch_drop_rate",
        "projection_dropout mlp_dropout": "proj_drop_rate",
        "attention_dropout": "attn_drop_rate",
        "drop_path": "drop_path_rate",
    }
)
"""timm's keyword -> the fields that it decides (timm 1.0.31, models/vision_transformer.py's
`VisionTransformer` and models/eva.py's `Eva`). Keywords with the same name in both, such as
`depth`, `num_heads`, `patch_size` and `class_token`, are not listed."""
OTHER_FIELDS = TIMM_KEYWORDS | KEYWORDS
POOLINGS = {"token": "cls", "avg": "mean", "map": "map"}
"""`global_pool` -> pooling of a spec."""
_VALUES: dict[str, Mapping[Any, Any]] = {
    "pos_embed": {"learn": "learned", "none": "none", "": "none"},
    "norm_layer": {"layernorm": "layer", "rmsnorm": "rms"},
    "weight_init": {"": "timm", "jax": "jax", "jax_nlhb": "jax"},
    "global_pool": POOLINGS,
}
"""Keyword -> timm's value -> ours; values of the other keywords are the same in both."""
_NEGATED = ("fc_norm", "use_fc_norm", "no_embed_class")
"""Keywords that are true where the field is false."""
_ALWAYS: dict[str, Any] = {
    "dynamic_img_size": True,  # a ViT takes any size that the patch divides
    "strict_img_size": False,
    "dynamic_img_pad": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "proj_bias": True,
    "fix_init": False,
}
"""Keyword without a field -> its only possible value."""

TRANSFORMER = _by_name(
    {
        "width": "dim d_model dim_model embedding_dim",
        "num_heads": "heads nhead n_heads",
        "encoder_depth": "num_encoder_layers",
        "decoder_depth": "num_decoder_layers",
        "mlp_width": "dim_feedforward",
        "norm_eps": "layer_norm_eps",
        "source_vocabulary": "src_vocab_size",
        "target_vocabulary": "tgt_vocab_size",
    }
)
"""Keyword of a Transformer elsewhere -> the argument of `vitkit.Transformer`."""

CLASSES = _by_name(
    {
        "ViT": "VisionTransformer ViTForImageClassification",
        'ViT(positions="sincos_2d", pooling="mean", class_token=False)': "SimpleViT",
        "ViT(num_classes=0)": "ViTModel",
        "ViTSpec": "ViTConfig",
        "ViT(distillation_token=True)": "DistillableViT",
        "Encoder": "TransformerEncoder",
        "EncoderBlock": "TransformerEncoderBlock TransformerEncoderLayer TransformerBlock "
        "EncoderLayer Block Residual",
        "MultiHeadSelfAttention": "MSA Attention AttentionHead SelfAttention VisionAttention "
        "MultiheadSelfAttentionBlock",
        "MultiHeadSelfAttention or CrossAttention": "MultiHeadAttention MultiheadAttention",
        "MLP": "FeedForward MLPBlock Mlp feed_forward",
        "PatchEmbedding": "Embeddings PatchEmbed",
        "Transformer": "TransformerDecoder TransformerDecoderLayer",
        "models.embedding.sincos_1d": "position_encoding get_positional_embeddings "
        "PositionalEncoding",
        "models.embedding.patchify": "patchify",
        'create_model("vit_base_patch16_224")': "vit_b16 vit_b_16",
        'create_model("vit_cifar_patch4_32")': "vit_tiny",
    }
)
"""Class or function elsewhere -> what to write after `vitkit.`."""

AMBIGUOUS: dict[str, str] = {
    "vit_tiny": "write 'vit_cifar_patch4_32' for the 8.47 M parameters of the CIFAR-10 notebook, "
    "'vit_tiny_patch16_224' for timm's",
}
"""Model that several programs give another meaning -> what to write."""

TOKEN_MERGING = "examples/research/token_merging.py"
TEST_TIME_REGISTERS = "examples/research/test_time_registers.py"
MOVED: dict[str, str] = {
    "merge": TOKEN_MERGING,
    "merge_tokens": TOKEN_MERGING,
    "find_register_neurons": TEST_TIME_REGISTERS,
    "measure_registers": TEST_TIME_REGISTERS,
    "test_time_registers": TEST_TIME_REGISTERS,
    "truth_report": "vitkit.faithfulness_report",
    "TruthReport": "vitkit.FaithfulnessReport",
    "TruthScore": "vitkit.Faithfulness",
}
"""Function or keyword that has left the package -> the file of the repository that has it now, or
that has another name -> the new one."""

GONE = {
    "allow_slower": "; a slower export is not refused any more: leave it out",
    "plot_attention": "; draw the maps of a Record by matplotlib: plt.imshow(maps[layer][0][head])",
    "animate_explanation": "; explain each layer (layer=), or draw all by plot_attention_sheet",
}
"""Function or keyword that has left the package -> what to do in its place."""

SIZES = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}
_SHORT = re.compile(
    rf"(?:vit)?[-_ ]?({'|'.join([*SIZES.values(), *SIZES])})[-_/ ]*(\d+)(?:[-_](\d+))?",
    flags=re.IGNORECASE,
)


def usual_name(name: str, known: Iterable[str]) -> str:
    """Return timm's name of a model that is written as in the papers; other names as they are.

    Args:
        name: such as `ViT-B/16`, `vit_b16`, `vit_b_16`, `B/16` or `ViT-L_16-384`.
        known: names that exist; they mean themselves, and no other is returned.

    Raises:
        SettingError: a name that means different models elsewhere.

    >>> usual_name("ViT-B/16", ["vit_base_patch16_224"])
    'vit_base_patch16_224'
    """
    if name in AMBIGUOUS:
        raise SettingError(f"there is no model {name!r}; {AMBIGUOUS[name]}")
    known = set(known)
    short = _SHORT.fullmatch(name)
    if name in known or short is None:
        return name
    size, patch, pixels = short.groups(default="224")
    usual = f"vit_{SIZES.get(size.lower(), size.lower())}_patch{patch}_{pixels}"
    if usual in known:
        return usual
    return name


def refuse_transformer_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise `TypeError` for what was passed to `Transformer` beyond its arguments, if anything.

    The message has the name that `Transformer` has for it.
    """
    for keyword in keywords:
        hint = ""
        if keyword in TRANSFORMER:
            hint = f"; write {TRANSFORMER[keyword]}="
        raise TypeError(f"Transformer has no argument {keyword!r}{hint}")


def refuse_moved_keywords(keywords: Iterable[str]) -> None:
    """Raise `TypeError` for what was passed to a function beyond its arguments, if anything.

    The message says where a keyword of `MOVED` is now.
    """
    for keyword in keywords:
        where = ""
        if keyword in MOVED:
            where = f"; it is in {MOVED[keyword]} now"
        raise TypeError(f"there is no argument {keyword!r}{where or GONE.get(keyword, '')}")


def translate_keywords(keywords: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keywords of timm and other libraries into fields of a spec; others stay.

    Args:
        keywords: of `create_model`: timm's, those of `other_names.KEYWORDS`, fields of `ViTSpec`.
        base: the fields of the named model, which decide what the keywords leave open, as timm's
            defaults do: `embed_dim` alone keeps the ratio of the MLP's width, and `global_pool`
            moves the last norm.

    Raises:
        SpecError: a field under two names, or a value that no ViT of vitkit has.

    >>> translate_keywords({"embed_dim": 96, "depth": 2}, {"width": 192, "mlp_width": 768})
    {'width': 96, 'depth': 2, 'mlp_width': 384}
    """
    theirs, fields = _split(keywords)
    if "embed_dim" in theirs or "mlp_ratio" in theirs:
        fields.setdefault("mlp_width", _mlp_width(theirs, fields, base))
    if "global_pool" in theirs or "pool_include_prefix" in theirs:
        fields |= _pooling_fields(theirs, fields, base)
    if "pre_norm" in theirs or "use_pre_transformer_norm" in theirs:
        fields.setdefault("patch_bias", not fields["embedding_norm"])
    if theirs.get("weight_init") == "jax_nlhb":
        classes = fields.get("num_classes", base["num_classes"])
        fields.setdefault("head_bias", -math.log(classes) if classes else 0.0)
    return fields


def _split(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return timm's keywords, and the fields that one keyword decides alone."""
    if "checkpoint_path" in keywords:
        raise SpecError("checkpoint_path does not exist in vitkit; pass pretrained=PATH")
    theirs, fields, decided_by = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for keyword, value in keywords.items():
        if keyword in _ALWAYS and value != _ALWAYS[keyword]:
            only = f"{keyword}={_ALWAYS[keyword]!r}"
            raise SpecError(f"{keyword}={value!r}: only {only} exists in vitkit")
        if keyword in TIMM_KEYWORDS and value is not None:  # timm takes None as not given
            theirs[keyword] = value
        elif keyword in TIMM_KEYWORDS or keyword in _ALWAYS:
            continue
        # it completes global_pool
        if keyword == "pool_include_prefix" and "pooling" not in keywords:
            continue
        for name in OTHER_FIELDS.get(keyword, (keyword,)):
            if name in decided_by:
                both = f"{decided_by[name]} and {keyword}"
                raise SpecError(f"{both} both decide {name}; pass one of them")
            decided_by[name] = keyword
            if keyword != "mlp_ratio":
                fields[name] = field_value(keyword, value)
    return theirs, fields


def field_value(keyword: str, value: Any) -> Any:
    """Return the value of a field that a keyword decides alone.

    Raises:
        SpecError: a value that no ViT of vitkit has.
    """
    if keyword in _NEGATED:
        return not value
    values = _VALUES.get(keyword)
    if values is None:
        return value
    if not isinstance(value, str) or value not in values:
        more = ""
        if keyword == "global_pool" and value == "":
            more = "; all tokens are those of model.forward_features(images)"
        known = ", ".join(map(repr, values))
        raise SpecError(f"{keyword}={value!r} does not exist in vitkit; it has {known}{more}")
    return values[value]


def _mlp_width(
    theirs: Mapping[str, Any], fields: Mapping[str, Any], base: Mapping[str, Any]
) -> int:
    """Return M = int(D * mlp_ratio); timm's ratio counts both halves of a packed SwiGLU."""
    width = fields.get("width", base["width"])
    ratio = theirs.get("mlp_ratio")
    # `Integral` and `Real`, as sizes may be numpy's numbers.
    if not isinstance(width, Integral):
        return 1  # the spec refuses the width
    if ratio is None:  # in whole numbers, as a quotient would be rounded
        return int(width) * base["mlp_width"] // int(base["width"])
    if not isinstance(ratio, Real) or not 0 < float(ratio) < math.inf:
        raise SpecError(f"mlp_ratio={ratio!r}: must be a number above 0")
    mlp_width = int(int(width) * float(ratio))
    if fields.get("mlp", base.get("mlp")) == "swiglu_packed":
        return mlp_width // 2  # gate and value
    return mlp_width


def _pooling_fields(
    theirs: Mapping[str, Any], fields: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the pooling, and the place of the last norm that timm derives from it."""
    pooling = fields.get("pooling", base["pooling"])
    include_prefix = theirs.get("pool_include_prefix", base["pooling"] == "mean_all")
    if pooling == "mean" and include_prefix:
        pooling = "mean_all"
    elif pooling == "mean_all" and not include_prefix:
        pooling = "mean"
    decided = {"pooling": pooling}
    # A model that does not follow the rule states fc_norm, which is kept.
    follows_rule = base["norm_before_pool"] != base["pooling"].startswith("mean")
    if "global_pool" in theirs and "norm_before_pool" not in fields and follows_rule:
        decided["norm_before_pool"] = not pooling.startswith("mean")
    return decided
