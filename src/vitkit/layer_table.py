"""The layer table of any module: sizes, parameters, true multiply-adds and memory.

The module is copied to the meta device, where tensors have shapes and no values, and run once.
Multiply-adds come from `torch.utils.flop_counter`, which includes the products inside fused
attention; counting layer by layer misses them, and those of a fused qkv used by `F.linear`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitkit.errors import MODEL, ShapeError, check_type

FLOAT_BYTES = 4
TEXT_COLUMNS = ("layer (variable)", "input", "output")
NUMBER_COLUMNS = ("parameters", "trainable", "mult-adds")


@dataclass(frozen=True)
class LayerRow:
    """A module of the table.

    Attributes:
        name: the variable's path, such as `blocks.3.attn.qkv`; empty for the whole module.
        kind: its class.
        depth: level of nesting, 0 for the whole module.
        input_size: shape of its first input, `()` where it was not called.
        output_size: shape of its output, `()` where that is not one tensor.
        parameters: number of its parameters, children included.
        trainable: number of those that get gradients.
        mult_adds: multiply-adds of one forward pass, children included, biases not.
        bias_adds: additions of the biases of linear and convolution layers, children included.
    """

    name: str
    kind: str
    depth: int
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    parameters: int
    trainable: int
    mult_adds: int = 0
    bias_adds: int = 0


@dataclass(frozen=True)
class LayerTable:
    """All modules of a model, outermost first; `str()` formats them.

    Memory is for float32 and one forward and backward pass, in megabytes of 10^6 bytes.

    Attributes:
        rows: a row for each module, in the order of `named_modules`.
        input_mb: memory of the input.
        activation_mb: memory of the outputs of all layers with parameters, and of their gradients.
        parameter_mb: memory of the parameters.
    """

    rows: tuple[LayerRow, ...]
    input_mb: float
    activation_mb: float
    parameter_mb: float

    @property
    def total_mb(self) -> float:
        """The memory of input, activations and parameters together."""
        return self.input_mb + self.activation_mb + self.parameter_mb

    @property
    def parameters(self) -> int:
        """The parameters of the whole module."""
        return self.rows[0].parameters

    @property
    def mult_adds(self) -> int:
        """The multiply-adds of one forward pass of the whole module."""
        return self.rows[0].mult_adds

    def render(self, depth: int = 3, *, narrow: bool = False) -> Table:
        """Return a rich table of the modules at most `depth` deep.

        Equal modules in a row, such as the blocks of an encoder, are one row with the numbers of
        one of them: `EncoderBlock (0-11) x12`. `Identity`, which computes nothing, is left out.

        Args:
            depth: how many levels of modules to show.
            narrow: leave out frames, input sizes and the trainable parameters of each module, so
                that 80 columns suffice.
        """
        table = Table(
            title=self.rows[0].kind,
            title_justify="left",
            caption_justify="left",
            box=None if narrow else HEAVY_HEAD,
            pad_edge=not narrow,
            padding=(0, 1),
            collapse_padding=narrow,
        )
        for header in TEXT_COLUMNS + NUMBER_COLUMNS:
            if narrow and header in ("input", "trainable"):
                continue
            if header in NUMBER_COLUMNS:
                table.add_column(header, justify="right", no_wrap=True)
            else:
                table.add_column(header)
        for cells in self._shown(depth):
            table.add_row(*(cells[str(column.header)] for column in table.columns))
        table.caption = self._totals()
        return table

    def to_html(self, depth: int = 3) -> str:
        """Return an HTML table of the modules at most `depth` deep, with all columns."""
        columns = TEXT_COLUMNS + NUMBER_COLUMNS
        kinds = ['class="text-right"' if name in NUMBER_COLUMNS else "" for name in columns]
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
        rows = ""
        for cells in self._shown(depth):
            name = cells[columns[0]]
            indent = (len(name) - len(name.lstrip())) / 2
            style = f'style="padding-left: {0.5 + indent:g}em"'
            first = f'<th scope="row" {style}>{escape(name.strip())}</th>'
            others = zip(columns[1:], kinds[1:], strict=True)
            rest = "".join(f"<td {kind}>{escape(cells[column])}</td>" for column, kind in others)
            rows += f"<tr>{first}{rest}</tr>"
        totals = escape(self._totals()).replace("\n", "<br>")
        return (
            f'<div class="layer-table"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div><p>{totals}</p>"
        )

    def _repr_html_(self) -> str:
        """Show the table in a notebook, three levels deep."""
        return self.to_html()

    def _shown(self, depth: int) -> Iterator[dict[str, str]]:
        """Yield the cells of each row that a table of this depth has."""
        for row, count in _folded(self.rows):
            if row.depth <= depth and row.kind != "Identity":
                yield _cells(row, count)

    def _totals(self) -> str:
        """Return three lines: parameters, multiply-adds, memory."""
        model_row = self.rows[0]
        return (
            f"parameters {model_row.parameters:,}, trainable {model_row.trainable:,}\n"
            f"multiply-adds {model_row.mult_adds / 1e6:,.2f} M, and "
            f"{model_row.bias_adds / 1e6:,.2f} M additions of biases\n"
            f"memory: input {self.input_mb:.2f} MB, activations forward and "
            f"backward {self.activation_mb:.2f} MB, parameters {self.parameter_mb:.2f} MB, "
            f"together {self.total_mb:.2f} MB"
        )

    def __str__(self) -> str:
        """Format the table as plain text, three levels deep."""
        console = Console(width=120, color_system=None, force_jupyter=False, highlight=False)
        with console.capture() as captured:
            console.print(self.render())
        return captured.get()


def summary(module: nn.Module, input_size: Sequence[int] | None = None) -> LayerTable:
    """Return the layer table of a module, for one forward pass in eval mode.

    Args:
        module: any module with one float tensor as input; it does not change.
        input_size: shape of that tensor, such as (1, 3, 224, 224) for images; by default one
            image of the model's own `spec`.

    Raises:
        SettingError: not a module.
        ShapeError: no input size for a module without a spec, or one that does not fit the module.
    """
    check_type(module, nn.Module, "summary", MODEL)
    size = _input_size(module, input_size)
    # Hooks and counters go to a copy: the caller's module stays as it is.
    twin = _on_meta(module)
    sizes = _Sizes(twin)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            twin(torch.empty(*size, device="meta"))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ShapeError(
            f"{type(module).__name__} does not take an input of {size}: {reason}"
        ) from None
    counts = counter.get_flop_counts()
    root = type(twin).__name__
    rows = []
    for name, part in twin.named_modules():
        flops = sum(counts.get(f"{root}.{name}" if name else root, {}).values())
        row = replace(sizes.row(name, part), mult_adds=flops // 2)  # two operations each
        rows.append(replace(row, trainable=_trainable(module.get_submodule(name))))
    return LayerTable(
        rows=tuple(rows),
        input_mb=torch.Size(size).numel() * FLOAT_BYTES / 1e6,
        # each output, and its gradient
        activation_mb=2 * sizes.activations * FLOAT_BYTES / 1e6,
        parameter_mb=rows[0].parameters * FLOAT_BYTES / 1e6,
    )


def _on_meta(module: nn.Module) -> nn.Module:
    """Copy a module in eval mode with tensors that have shapes only; nothing is allocated."""
    tensors: dict[int, Tensor] = {id(t): t.detach().to("meta") for t in module.buffers()}
    # by identity, so that shared tensors stay shared in the copy
    for parameter in module.parameters():
        shape_only = parameter.detach().to("meta")
        tensors[id(parameter)] = nn.Parameter(shape_only, requires_grad=False)
    return copy.deepcopy(module, tensors).eval()


def _folded(rows: Sequence[LayerRow]) -> list[tuple[LayerRow, int]]:
    """Return the rows, runs of equal blocks merged into one row with their number."""
    folded: list[tuple[LayerRow, int]] = []
    start = 0
    while start < len(rows):
        end = _end(rows, start)
        count, following = 1, end
        # items of a list: their names are numbers
        if rows[start].name.rpartition(".")[2].isdigit():
            one = _without_prefix(rows[start:end])
            while one == _without_prefix(rows[following : _end(rows, following)]):
                count, following = count + 1, _end(rows, following)
        folded += [(rows[start], count), *_folded(rows[start + 1 : end])]
        start = following
    return folded


def _end(rows: Sequence[LayerRow], start: int) -> int:
    """Return the index after the last row inside the module of the row `start`."""
    end = start + 1
    while end < len(rows) and rows[end].depth > rows[start].depth:
        end += 1
    return end


def _without_prefix(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Return the rows of a module, with names relative to it."""
    return [replace(row, name=row.name.removeprefix(rows[0].name)) for row in rows]


def _cells(row: LayerRow, count: int) -> dict[str, str]:
    """Format a row of the table, by column; cells without a number are empty."""
    variable = row.name.rpartition(".")[2]
    title = "  " * row.depth + row.kind
    if count > 1:
        title += f" ({variable}-{int(variable) + count - 1}) x{count}"
    elif variable:
        title += f" ({variable})"
    cells = dict.fromkeys(NUMBER_COLUMNS, "")
    if row.parameters:
        cells["parameters"] = f"{row.parameters:,}"
        cells["trainable"] = f"{row.trainable:,}"
        if row.trainable == row.parameters:
            cells["trainable"] = "all"
    if row.mult_adds:
        cells["mult-adds"] = f"{row.mult_adds / 1e6:,.2f} M"
    sizes = {"input": _shape(row.input_size), "output": _shape(row.output_size)}
    return {"layer (variable)": title, **sizes, **cells}


def _trainable(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters() if p.requires_grad)


class _Sizes:
    """Shapes of inputs and outputs of every module, recorded in one forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._inputs: dict[nn.Module, tuple[int, ...]] = {}
        self._outputs: dict[nn.Module, tuple[int, ...]] = {}
        self.activations = 0
        for part in module.modules():
            part.register_forward_hook(self._record)

    def _record(self, part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # If a module is called several times, the sizes of the last call are shown.
        first = inputs[0] if inputs else None
        self._inputs[part] = tuple(first.shape) if isinstance(first, Tensor) else ()
        self._outputs[part] = tuple(output.shape) if isinstance(output, Tensor) else ()
        # The innermost layers with parameters, as torchinfo counts.
        own = next(part.parameters(recurse=False), None)
        if isinstance(output, Tensor) and own is not None and not list(part.children()):
            self.activations += output.numel()

    def row(self, name: str, part: nn.Module) -> LayerRow:
        parameters = list(part.parameters())
        return LayerRow(
            name=name,
            kind=type(part).__name__,
            depth=name.count(".") + 1 if name else 0,
            input_size=self._inputs.get(part, ()),
            output_size=self._outputs.get(part, ()),
            parameters=sum(p.numel() for p in parameters),
            # The copy has no gradients; `summary` counts these in the original.
            trainable=0,
            bias_adds=sum(self._bias_adds(inner) for inner in part.modules()),
        )

    def _bias_adds(self, part: nn.Module) -> int:
        if isinstance(part, nn.Linear | nn.Conv2d) and part.bias is not None:
            return torch.Size(self._outputs.get(part, (0,))).numel()
        return 0


def _input_size(module: nn.Module, requested: Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(requested, int):
        raise ShapeError(
            f"input_size {requested} is one number; pass a shape, such as (1, 3, {requested}, "
            f"{requested})"
        )
    if requested is not None:
        return tuple(requested)
    spec = getattr(module, "spec", None)
    if spec is None:
        raise ShapeError(
            f"{type(module).__name__} has no spec; pass input_size, such as (1, 197, 768)"
        )
    return (1, spec.in_channels, *spec.image_size)


def _shape(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
