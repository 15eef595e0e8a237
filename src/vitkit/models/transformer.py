"""The original Transformer: "Attention Is All You Need" (arXiv 1706.03762), Sec. 3."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitkit.errors import SettingError, ShapeError, SpecError
from vitkit.models.attention import Context, CrossAttention, MultiHeadSelfAttention
from vitkit.models.embedding import sincos_1d
from vitkit.models.encoder import Encoder
from vitkit.models.initialisation import FUSED
from vitkit.models.layers import MLP, eval_mode
from vitkit.models.record import Record
from vitkit.other_names import refuse_transformer_keywords
from vitkit.shapes import Tokens

Memory = Float[Tensor, "B S D"]


class DecoderBlock(nn.Module):
    """z + MSA(LN(z)), then z + CA(LN(z), memory), then z + MLP(LN(z)); keywords of EncoderBlock."""

    def __init__(
        self, width: int, mlp_width: int, *, activation: str, norm_eps: float, mlp_dropout: float,
        **heads: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, norm_eps) for _ in range(3))
        self.attn = MultiHeadSelfAttention(width, **heads)
        self.cross_attn = CrossAttention(width, **heads)
        self.mlp = MLP(width, mlp_width, activation=activation, dropout=mlp_dropout)

    def forward(self, z: Tokens, memory: Memory, own: Context, across: Context) -> Tokens:
        z = z + self.attn(self.norm1(z), own)
        z = z + self.cross_attn(self.norm2(z), memory, across)
        return z + self.mlp(self.norm3(z))


class PostNormDecoderBlock(DecoderBlock):
    """LN(z + MSA(z)), then LN(z + CA(z, memory)), then LN(z + MLP(z)): Sec. 3.1."""

    def forward(
        self, z: Tokens, memory: Memory, own: Context, across: Context
    ) -> Tokens:  # fmt: skip
        z = self.norm1(z + self.attn(z, own))
        z = self.norm2(z + self.cross_attn(z, memory, across))
        return self.norm3(z + self.mlp(z))


class Transformer(nn.Module):
    """Source (B, S, D) or ids (B, S), target (B, T, D) or ids (B, T) -> (B, T, D) or (B, T, V).

    With `positions=False, output_projection=False` it is torch.nn.Transformer(batch_first=True).
    Initial matrices are Xavier uniform as there, biases 0, embeddings N(0, D^-0.5) (tensor2tensor).

    Args:
        width, num_heads, head_width, encoder_depth, decoder_depth: D, k, h (default D / k), L, L.
        mlp_width, activation, norm, norm_eps: M, as for `MLP`, `post` (as there) or `pre`, epsilon.
        source_vocabulary, target_vocabulary: V, to give ids (embedded times sqrt(D), Sec. 3.4).
        dropout: rate on inputs and attention weights, and after each layer of attention and MLP.
        positions: whether `sincos_1d` is added to both inputs, for any length (Sec. 3.5).
        final_norm: whether a norm ends both stacks; torch has them, the paper has not.
        output_projection: whether a last linear layer leads to V, or to D without a vocabulary.

    Raises:
        SpecError: an unknown norm or activation, or num_heads does not divide width.
    """

    def __init__(
        self, width: int = 512, num_heads: int = 8, *, head_width: int | None = None,
        encoder_depth: int = 6, decoder_depth: int = 6, mlp_width: int = 2048,
        activation: str = "relu", norm: str = "post", norm_eps: float = 1e-5,
        source_vocabulary: int | None = None, target_vocabulary: int | None = None,
        dropout: float = 0.1, positions: bool = True, final_norm: bool = True,
        output_projection: bool = True, **other_names: Any,
    ) -> None:  # fmt: skip
        refuse_transformer_keywords(other_names)
        super().__init__()
        if norm not in ("pre", "post"):
            raise SpecError(f"norm {norm!r} is none of pre, post")
        self.width, self.positions, self.drop = width, positions, nn.Dropout(dropout)
        sizes = self.vocabularies = {"source": source_vocabulary, "target": target_vocabulary}
        self.embed = nn.ModuleDict({k: nn.Embedding(v, width) for k, v in sizes.items() if v})
        shared: dict[str, Any] = {
            "width": width, "num_heads": num_heads, "head_width": head_width, "norm_eps": norm_eps,
            "mlp_width": mlp_width, "activation": activation, "attention_dropout": dropout,
            "projection_dropout": dropout, "mlp_dropout": dropout,
        }  # fmt: skip
        stack = {**shared, "final_norm": final_norm}
        self.encoder = Encoder(depth=encoder_depth, block=f"{norm}_norm", **stack)
        self.decoder = Encoder(depth=0, **stack)  # a stack and its norm, for the decoder's blocks
        block = DecoderBlock if norm == "pre" else PostNormDecoderBlock
        self.decoder.blocks.extend(block(**shared) for _ in range(decoder_depth))
        out = target_vocabulary or width
        self.head = nn.Linear(width, out) if output_projection else nn.Identity()
        for name, parameter in self.named_parameters():
            if name.startswith("embed"):
                nn.init.normal_(parameter, std=width**-0.5)
            elif parameter.ndim == 2:
                for matrix in parameter.data.chunk(FUSED.get(name.split(".")[-2], 1)):
                    nn.init.xavier_uniform_(matrix)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, source: Tensor, target: Tensor, *, source_mask: Tensor | None = None,
        target_mask: Tensor | None = None, source_record: Record | None = None,
        target_record: Record | None = None,
    ) -> Float[Tensor, "B T _"]:  # fmt: skip
        """Predict the successor of each target token, before any softmax, from no later token.

        Masks are bool, (B, S) and (B, T), True at a real token: torch.nn.Transformer's mean the
        opposite. Padding may hold anything: it is read as zeros (id 0), and looked at by itself
        alone; a memory of nothing else counts as zeros. `target_record` has `cross_attention` too.

        Raises:
            ShapeError: an input or mask of another kind or shape than expected.
            SettingError: an id outside the vocabulary, or a record of a layer that is not there.
        """
        memory = self.encode(source, source_mask, source_record)
        return self.decode(target, memory, target_mask, source_mask, target_record)

    def encode(
        self, source: Tensor, source_mask: Tensor | None = None, source_record: Record | None = None
    ) -> Memory:
        """Return the memory (B, S, D); arguments and errors as for `forward`."""
        z, looks = self._read("source", source, source_mask)
        return self.encoder(z, source_record, Context(mask=looks))

    def decode(
        self, target: Tensor, memory: Tensor, target_mask: Tensor | None = None,
        source_mask: Tensor | None = None, target_record: Record | None = None,
    ) -> Float[Tensor, "B T _"]:  # fmt: skip
        """Return the output of `forward`, from a memory (B, S, D) of `encode`; errors as there."""
        z, looks = self._read("target", target, target_mask)
        length, across, record = z.shape[1], Context(), target_record or Record()
        if memory.shape != (expected := (z.shape[0], memory.shape[1], self.width)):
            raise ShapeError(f"memory: expected {expected}, got {tuple(memory.shape)}")
        causal = z.new_ones(length, length, dtype=torch.bool).tril()  # no later token is seen
        own = Context(mask=causal if looks is None else causal & looks)
        if source_mask is not None:
            memory = _blank("source_mask", memory, source_mask)
            keys = source_mask | ~source_mask.any(1, keepdim=True)  # all if a row is padding only
            across = Context(mask=keys[:, None, None].expand(-1, 1, length, -1))  # B 1 T S
        record.begin(len(self.decoder.blocks), cross=True)
        for layer, block in enumerate(self.decoder.blocks):
            attend, attend_across = record.attend(layer), record.attend_across(layer)
            z = block(z, memory, own._replace(attend=attend), across._replace(attend=attend_across))
            record.keep(layer, z)
        return self.head(self.decoder.norm(z))

    @torch.no_grad()
    def generate(
        self, source: Tensor, start: int, end: int, *, max_length: int | None = None,
        source_mask: Tensor | None = None,
    ) -> Int[Tensor, "B _"]:  # fmt: skip
        """Decode greedily: ids (B, n) after `start`; eval mode, no gradients, errors as `forward`.

        Ends when all rows have, filled up with `end` (-1: never), or at `max_length` (S + 50).
        """
        if "target" not in self.embed or isinstance(self.head, nn.Identity):
            raise SettingError("generate needs a target_vocabulary and an output_projection to it")
        if end >= (count := self.vocabularies["target"] or 0):
            raise SettingError(
                f"end {end} is not an id; expected 0 to {count - 1}, or -1 to never end"
            )
        with eval_mode(self):
            memory = self.encode(source, source_mask)
            ids = torch.full((memory.shape[0], 1), start, device=memory.device)
            for _ in range(source.shape[1] + 50 if max_length is None else max_length):
                ended = (ids[:, 1:] == end).any(1, keepdim=True)
                if ended.all():
                    break
                logits = self.decode(ids, memory, source_mask=source_mask)[:, -1:]  # of the last
                ids = torch.cat([ids, logits.argmax(-1).masked_fill(ended, end)], dim=1)
        return ids[:, 1:]

    def _read(self, name: str, inputs: Tensor, real: Tensor | None) -> tuple[Tokens, Tensor | None]:
        """Return tokens (B, T, D), and their mask: each attends to itself and to real ones."""
        count, looks = self.vocabularies[name], None
        expected = f"ids (B, T) in 0..{count - 1}" if count else f"floats (B, T, {self.width})"
        fits = inputs.ndim == 2 if count else inputs.shape[2:] == (self.width,)
        if not fits or inputs.is_floating_point() == bool(count):
            raise ShapeError(
                f"{name}: expected {expected}, got {inputs.dtype} {tuple(inputs.shape)}"
            )
        if real is not None:
            inputs = _blank(f"{name}_mask", inputs, real)
            looks = real[:, None, None] | torch.eye(real.shape[1], device=real.device).bool()
        if count and not torch.compiler.is_compiling() and ((inputs < 0) | (inputs >= count)).any():
            raise SettingError(f"{name}: expected {expected}, got {inputs.min()}..{inputs.max()}")
        z = self.embed[name](inputs.long()) * self.width**0.5 if count else inputs  # Sec. 3.4
        if self.positions:
            z = z + sincos_1d(z.shape[1], self.width)[:, : self.width].to(z)
        return self.drop(z), looks


def _blank(name: str, inputs: Tensor, real: Tensor) -> Tensor:
    if (real.dtype, real.shape) != (torch.bool, size := tuple(inputs.shape[:2])):
        raise ShapeError(f"{name}: expected bool {size}, got {real.dtype} {tuple(real.shape)}")
    return inputs.masked_fill(~real.reshape(*size, *(1,) * (inputs.ndim - 2)), 0)
