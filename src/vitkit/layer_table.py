"""The layer table of any module: sizes, parameters, true multiply-adds and memory.

The module is copied to the meta device, where tensors have shapes and no values, and run once.
Multiply-adds come from `torch.utils.flop_counter`, which includes the products inside fused
attention; counting layer by layer misses them, and those of a fused qkv used by `F.linear`.
"""

import copy
import math
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
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
        rows = ""
        for cells in self._shown(depth):
            name, *sizes = [cells[column] for column in TEXT_COLUMNS]
            indent = (len(name) - len(name.lstrip())) / 2
            rows += f'<tr><th scope="row" style="padding-left: {0.5 + indent:g}em">'
            rows += f"{escape(name.strip())}</th><td>{sizes[0]}</td><td>{sizes[1]}</td>"
            for column in NUMBER_COLUMNS:
                rows += f'<td class="text-right">{cells[column]}</td>'
            rows += "</tr>"
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
    shapes: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    activations = []

    def record(part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # If a module is called several times, the sizes of the last call are shown.
        shapes[part] = _shape(next(iter(inputs), None)), _shape(output)
        # The innermost layers with parameters, as torchinfo counts.
        own = list(part.parameters(recurse=False))  # a bias that is missing is not among them
        if isinstance(output, Tensor) and own and not part._modules:
            activations.append(output.numel())

    def bias_adds(part: nn.Module) -> int:
        if isinstance(part, nn.Linear | nn.Conv2d) and part.bias is not None and part in shapes:
            return math.prod(shapes[part][1])
        return 0

    for part in twin.modules():
        part.register_forward_hook(record)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            twin(torch.empty(*size, device="meta"))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ShapeError(
            f"{type(module).__name__} does not take an input of {size}: {reason}"
        ) from None
    counts, root = counter.get_flop_counts(), type(twin).__name__
    rows = []
    for name, part in twin.named_modules():
        flops = counts.get(f"{root}.{name}" if name else root, {})
        # the copy has no gradients
        parameters = list(module.get_submodule(name).parameters())
        row = LayerRow(
            name=name,
            kind=type(part).__name__,
            depth=len(name.split(".")) if name else 0,
            input_size=shapes.get(part, ((), ()))[0],
            output_size=shapes.get(part, ((), ()))[1],
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            mult_adds=sum(flops.values()) // 2,  # two operations each
            bias_adds=sum(map(bias_adds, part.modules())),
        )
        rows.append(row)
    return LayerTable(
        rows=tuple(rows),
        input_mb=math.prod(size) * FLOAT_BYTES / 1e6,
        # each output, and its gradient
        activation_mb=2 * sum(activations) * FLOAT_BYTES / 1e6,
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
    sizes = [" x ".join(map(str, size)) for size in (row.input_size, row.output_size)]
    return dict(zip(TEXT_COLUMNS, [title, *sizes], strict=True)) | cells


def _input_size(module: nn.Module, requested: Sequence[int] | None) -> tuple[int, ...]:
    spec = getattr(module, "spec", None)
    if requested is None and spec is not None:
        return (1, spec.in_channels, *spec.image_size)
    if requested is None or isinstance(requested, int):
        problem = f"{type(module).__name__} has no spec"
        if requested is not None:
            problem = f"input_size {requested} is one number"
        raise ShapeError(f"{problem}; pass input_size, a shape such as (1, 197, 768)")
    return tuple(requested)


def _shape(tensor: Any) -> tuple[int, ...]:
    if isinstance(tensor, Tensor):
        return tuple(tensor.shape)
    return ()
