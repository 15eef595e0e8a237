"""The encoder-decoder against torch's, its masks, its records and its greedy decoding."""

import math

import pytest
import torch
from noise import fill_with_noise
from torch import nn

from vitkit import Record, SettingError, ShapeError, SpecError, Transformer
from vitkit.models.attention import Context

AS_TORCH = {"positions": False, "output_projection": False}
START, END = 0, 1


def size(**settings) -> int:
    with torch.device("meta"):
        model = Transformer(**settings)
    return sum(parameter.numel() for parameter in model.parameters())


def small(**settings) -> Transformer:
    """Vectors of 24 in, vectors of 24 out, with noise in every parameter, in double precision."""
    shape = {"width": 24, "num_heads": 4, "encoder_depth": 2, "decoder_depth": 2, "mlp_width": 40}
    model = Transformer(**(shape | settings)).double().eval()
    fill_with_noise(model, std=0.3)
    return model


def writer(**settings) -> Transformer:
    """The same with 11 ids in and 13 ids out."""
    return small(source_vocabulary=11, target_vocabulary=13, **settings)


def vectors(batch: int, length: int, width: int = 24, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, width, generator=generator, dtype=torch.float64)


def ids(batch: int, length: int, below: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(below, (batch, length), generator=torch.Generator().manual_seed(seed))


def real(*lengths: int, of: int) -> torch.Tensor:
    """(B, of) bool, True in the first tokens of each row."""
    return torch.arange(of) < torch.tensor(lengths)[:, None]


def copy_weights(ours: Transformer, theirs: nn.Transformer) -> None:
    """torch's model gets our weights, name by name; strict."""
    state = {}
    for stack, blocks in (("encoder", ours.encoder), ("decoder", ours.decoder)):
        names = {"self_attn.out_proj": "attn.proj", "linear1": "mlp.fc1", "linear2": "mlp.fc2"}
        names |= {"norm1": "norm1", "norm2": "norm2"}
        if stack == "decoder":
            names |= {"norm3": "norm3", "multihead_attn.out_proj": "cross_attn.proj"}
        for layer, block in enumerate(blocks.blocks):
            for kind in ("weight", "bias"):
                layered = {name: getattr(block.get_submodule(m), kind) for name, m in names.items()}
                state |= {f"{stack}.layers.{layer}.{n}.{kind}": v for n, v in layered.items()}
                prefix = f"{stack}.layers.{layer}"
                state[f"{prefix}.self_attn.in_proj_{kind}"] = getattr(block.attn.qkv, kind)
                if stack == "decoder":
                    across = [getattr(block.cross_attn.q, kind), getattr(block.cross_attn.kv, kind)]
                    state[f"{prefix}.multihead_attn.in_proj_{kind}"] = torch.cat(across)
        state |= {f"{stack}.norm.{n}": p for n, p in blocks.norm.named_parameters()}
    theirs.load_state_dict({name: value.detach() for name, value in state.items()})


@torch.no_grad()
def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def causal(length: int) -> torch.Tensor:
    """torch's way: True where a token may NOT look."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def test_sizes():
    assert size(**AS_TORCH) == 44_140_544
    assert size(positions=False, final_norm=False) == 44_401_152
    # with biases everywhere; heads of 85 give 510 numbers, which `proj` leads back to 512
    assert size(num_heads=6, head_width=85, final_norm=False) == 44_327_316
    assert size(head_width=32, **AS_TORCH) == 44_140_544 - 18 * (4 * 256 * 512 + 3 * 256)
    with torch.device("meta"):
        torch_s = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
    assert sum(parameter.numel() for parameter in torch_s.parameters()) == 44_140_544


def test_the_notebook_s_shapes():
    source, target = torch.randn(64, 32, 512), torch.randn(64, 16, 512)
    for heads in ({"num_heads": 8}, {"num_heads": 6, "head_width": 85}):
        model = Transformer(encoder_depth=1, decoder_depth=1, **heads).eval()
        with torch.inference_mode():
            assert model(source, target).shape == (64, 16, 512)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")  # torch's, of pre-norm
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_it_equals_torch_s_with_masks_and_a_swapped_key_shows(norm, activation):
    ours = small(norm=norm, activation=activation, **AS_TORCH)
    theirs = nn.Transformer(
        24, 4, 2, 2, 40, activation=activation, batch_first=True, norm_first=norm == "pre"
    )
    theirs = theirs.double().eval()
    copy_weights(ours, theirs)
    source, target = vectors(3, 7), vectors(3, 5, seed=2)
    source_real, target_real = real(7, 4, 1, of=7), real(5, 5, 2, of=5)
    given = [source, target, source_real, target_real]
    before = [tensor.clone() for tensor in given]
    masks = {
        "tgt_mask": causal(5), "src_key_padding_mask": ~source_real,
        "tgt_key_padding_mask": ~target_real, "memory_key_padding_mask": ~source_real,
    }  # fmt: skip

    def difference() -> float:
        out = ours(source, target, source_mask=source_real, target_mask=target_real)
        return (out - theirs(source, target, **masks))[target_real].abs().max().item()

    assert difference() <= 1e-12
    block = ours.decoder.blocks[1]
    swaps = [
        (block.norm2.weight, block.norm3.weight),
        (block.norm1.bias, ours.encoder.blocks[1].norm1.bias),
        (block.cross_attn.q.weight, block.cross_attn.kv.weight[:24]),
        (block.cross_attn.kv.weight[:24], block.cross_attn.kv.weight[24:]),
        (block.attn.proj.weight, block.cross_attn.proj.weight),
        (ours.encoder.norm.weight, ours.decoder.norm.weight),
    ]
    for pair in swaps:  # the controls: each swap must show, and is taken back
        swap(*pair)
        assert difference() > 1e-3
        swap(*pair)
    assert difference() <= 1e-12
    assert all(map(torch.equal, given, before)), "the caller's tensors are left alone"


def test_ids_are_embedded_times_the_root_of_the_width_and_positions_are_added():
    model = writer(encoder_depth=0, final_norm=False)
    given = ids(2, 300, 11)
    read = model.encode(given)
    table = model.embed["source"].weight
    for place, number in ((0, 0), (7, 5), (299, 4), (299, 23)):
        angle = place / 10000 ** (2 * (number // 2) / 24)
        position = math.cos(angle) if number % 2 else math.sin(angle)
        expected = table[given[1, place], number] * math.sqrt(24) + position
        assert read[1, place, number].item() == pytest.approx(expected.item(), abs=1e-6)
    bare = writer(encoder_depth=0, final_norm=False, positions=False)
    torch.testing.assert_close(bare.encode(given), table[given] * math.sqrt(24))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("integers", [torch.int64, torch.int32, torch.uint8])
def test_any_type_of_float_and_of_ids(dtype, integers):
    model = writer().to(dtype)
    source, target = ids(2, 5, 11).to(integers), ids(2, 4, 13).to(integers)
    out = model(source, target, source_mask=real(5, 2, of=5))
    assert (out.dtype, out.shape) == (dtype, (2, 4, 13))
    torch.testing.assert_close(
        out, model(source.long(), target.long(), source_mask=real(5, 2, of=5))
    )


def test_every_tensor_is_made_where_the_inputs_are():
    model = small().to("meta")
    source, target = vectors(2, 5).to("meta"), vectors(2, 4).to("meta")
    masks = {"source_mask": real(5, 2, of=5), "target_mask": real(4, 1, of=4)}
    out = model(source, target, **{name: mask.to("meta") for name, mask in masks.items()})
    assert (out.device.type, out.shape) == ("meta", (2, 4, 24))


def test_vectors_and_ids_may_be_mixed_and_the_projection_left_out():
    assert small(target_vocabulary=13)(vectors(2, 5), ids(2, 4, 13)).shape == (2, 4, 13)
    assert small(source_vocabulary=11)(ids(2, 5, 11), vectors(2, 4)).shape == (2, 4, 24)
    assert writer(output_projection=False)(ids(2, 5, 11), ids(2, 4, 13)).shape == (2, 4, 24)
    assert small(width=25, head_width=3)(vectors(2, 5, 25), vectors(2, 4, 25)).shape == (2, 4, 25)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_no_output_depends_on_a_later_target(norm):
    model, source, target = small(norm=norm), vectors(2, 6), vectors(2, 8, seed=2)
    out = model(source, target)
    for place in range(8):
        changed = target.clone()
        changed[:, place] = vectors(2, 1, seed=3)[:, 0]
        other = model(source, changed)
        torch.testing.assert_close(other[:, :place], out[:, :place], rtol=0, atol=1e-12)
        assert ((other - out)[:, place:].abs().amax(dim=(0, 2)) > 1e-6).all()


def test_what_padding_holds_changes_nothing():
    model, mask = writer(), real(6, 3, 1, of=6)
    source, target = ids(3, 6, 11), ids(3, 5, 13)
    out = model(source, target, source_mask=mask, target_mask=real(5, 2, 4, of=5))
    source[~mask], target[~real(5, 2, 4, of=5)] = -100, 99  # ids that no vocabulary has
    again = model(source, target, source_mask=mask, target_mask=real(5, 2, 4, of=5))
    assert torch.equal(again, out)
    assert not torch.allclose(model(source.clamp(0, 10), target.clamp(0, 12)), out)  # the control

    floats, vectors_in = small(), vectors(3, 6)
    out = floats(vectors_in, vectors(3, 5, seed=2), source_mask=mask)
    vectors_in[~mask] = math.nan
    assert torch.equal(floats(vectors_in, vectors(3, 5, seed=2), source_mask=mask), out)


def test_a_padded_row_gives_what_the_row_gives_alone():
    model, source, target = writer(), ids(2, 6, 11), ids(2, 5, 13)
    masks = {"source_mask": real(6, 4, of=6), "target_mask": real(5, 3, of=5)}
    together = model(source, target, **masks)
    alone = model(source[1:, :4], target[1:, :3])
    torch.testing.assert_close(together[1:, :3], alone, rtol=0, atol=1e-12)
    bare = writer(positions=False)
    left = bare(source[1:], target[1:], target_mask=real(3, of=5).flip(1))
    alone = bare(source[1:], target[1:, 2:])
    torch.testing.assert_close(left[:, 2:], alone, rtol=0, atol=1e-12)
    all_real = model(source, target, source_mask=real(6, 6, of=6), target_mask=real(5, 5, of=5))
    torch.testing.assert_close(all_real, model(source, target), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_rows_of_padding_alone_and_padding_on_the_left_are_finite(norm):
    model, source, target = small(norm=norm), vectors(3, 6), vectors(3, 5, seed=2)
    source_mask, target_mask = real(6, 0, 4, of=6), real(5, 5, 2, of=5).flip(1)
    target_mask[0] = False
    masks = {"source_mask": source_mask, "target_mask": target_mask}
    record, target_record = Record(attention=[0, 1]), Record(attention=[0, 1], cross_attention=[0])
    out = model(source, target, **masks, source_record=record, target_record=target_record)
    out.sum().backward()
    maps = [*record.attention.values(), *target_record.attention.values()]
    for tensor in (out, *maps, target_record.cross_attention[0]):
        assert tensor.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    source[1] = math.nan  # a source of padding alone is a memory of zeros, whatever it holds
    assert torch.equal(model(source, target, **masks), out)
    memory = torch.zeros(1, 6, 24, dtype=torch.float64)
    torch.testing.assert_close(out[1:2], model.decode(target[1:2], memory), rtol=0, atol=1e-12)


def explicit(attention, q, k, mask):
    """softmax(q k^T / sqrt(h)) head by head, from projected queries and keys."""
    maps = []
    for head in range(attention.num_heads):
        part = slice(head * attention.head_width, (head + 1) * attention.head_width)
        scores = q[..., part] @ k[..., part].mT / math.sqrt(attention.head_width)
        maps.append(scores.masked_fill(~mask, -math.inf).softmax(dim=-1))
    return torch.stack(maps, dim=1)


def test_maps_are_the_explicit_softmax_of_each_layer():
    model, source, target = small(), vectors(2, 6), vectors(2, 4, seed=2)
    mask, lower = real(6, 3, of=6), ~causal(4)
    ours = Record(attention=[0, 1], tokens=[0])
    theirs = Record(attention=[-1], cross_attention=[1], tokens=[0, 1])
    plain = model(source, target, source_mask=mask)
    out = model(source, target, source_mask=mask, source_record=ours, target_record=theirs)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)
    assert set(theirs.attention) == set(theirs.cross_attention) == {1}

    block, z = model.encoder.blocks[1], ours.tokens[0]
    q, k, _ = block.attn.qkv(z).chunk(3, dim=-1)
    itself = torch.eye(6, dtype=torch.bool)
    expected = explicit(block.attn, q, k, mask[:, None] | itself)
    torch.testing.assert_close(ours.attention[1], expected, rtol=0, atol=1e-12)

    block, z = model.decoder.blocks[1], theirs.tokens[0]
    q, k, _ = block.attn.qkv(z).chunk(3, dim=-1)
    expected = explicit(block.attn, q, k, lower)
    torch.testing.assert_close(theirs.attention[1], expected, rtol=0, atol=1e-12)
    assert (theirs.attention[1][..., ~lower] == 0).all()

    memory = model.encode(source, source_mask=mask)
    q = block.cross_attn.q(block.norm1(z + block.attn(z, Context(mask=lower))))
    k, _ = block.cross_attn.kv(memory).chunk(2, dim=-1)
    expected = explicit(block.cross_attn, q, k, mask[:, None])
    torch.testing.assert_close(theirs.cross_attention[1], expected, rtol=0, atol=1e-12)
    assert (theirs.cross_attention[1][1, ..., 3:] == 0).all()
    torch.testing.assert_close(model.head(model.decoder.norm(theirs.tokens[1])), out)


def test_maps_can_be_narrowed_and_their_gradients_kept():
    model, source, target = small(), vectors(2, 6), vectors(2, 4, seed=2)
    mask = real(6, 3, of=6)
    whole = Record(cross_attention=[0], gradients=True)
    narrow = Record(cross_attention=[0], attention=[0], heads=[2], queries=[3, 1])
    model(source, target, source_mask=mask, target_record=narrow)
    model(source, target, source_mask=mask, target_record=whole).sum().backward()
    expected = whole.cross_attention[0].detach()[:, [2]][:, :, [3, 1]]
    torch.testing.assert_close(narrow.cross_attention[0].detach(), expected)
    assert narrow.attention[0].shape == (2, 1, 2, 4)
    assert whole.cross_attention[0].grad.abs().max() > 0


def test_a_record_of_what_is_not_there_is_refused():
    model, source, target = small(), vectors(2, 6), vectors(2, 4)
    with pytest.raises(SettingError, match=r"layer 2 does not exist; layers are 0 to 1"):
        model(source, target, target_record=Record(cross_attention=[2]))
    with pytest.raises(SettingError, match="the decoder of a Transformer"):
        model(source, target, source_record=Record(cross_attention=[0]))


def step_by_step(model, source, mask, end, steps):
    """argmax of forward's last place, again and again; what follows an end is the end."""
    target = torch.full((len(source), 1), START)
    for _ in range(steps):
        following = model(source, target, source_mask=mask)[:, -1].argmax(dim=-1)
        ended = (target[:, 1:] == end).any(dim=1)
        target = torch.cat([target, torch.where(ended, end, following)[:, None]], dim=1)
    return target[:, 1:]


def test_generate_is_the_argmax_of_forward_step_by_step():
    torch.manual_seed(0)
    model = Transformer(
        width=24, num_heads=4, encoder_depth=2, decoder_depth=2, mlp_width=40, norm="pre",
        source_vocabulary=11, target_vocabulary=13,
    )  # fmt: skip
    model, source, mask = model.eval(), ids(16, 6, 11), real(*range(1, 7), *[6] * 10, of=6)
    endless = model.generate(source, START, -1, max_length=9, source_mask=mask)
    assert torch.equal(endless, step_by_step(model, source, mask, -1, 9))
    assert endless.unique().numel() > 3
    without_mask = model.generate(source, START, -1, max_length=9)
    assert not torch.equal(without_mask[:6], endless[:6])  # the control: padding is not read
    assert torch.equal(without_mask[6:], endless[6:])

    counts = [int((endless[:, :-1] == end).any(dim=1).sum()) for end in range(13)]
    end = next(end for end, rows in enumerate(counts) if 0 < rows < 16)
    written = model.generate(source, START, end, max_length=9, source_mask=mask)
    assert torch.equal(written, step_by_step(model, source, mask, end, 9))
    assert written.dtype == torch.int64
    assert not torch.equal(written, endless)


def test_generate_stops_when_every_row_has_ended():
    model, source = writer(), ids(3, 4, 11)
    with torch.no_grad():
        model.head.bias[END] += 100.0
    assert model.generate(source, START, END).tolist() == [[END]] * 3
    with torch.no_grad():
        model.head.bias[END] -= 200.0
    assert model.generate(source, START, END).shape == (3, 4 + 50)
    assert model.generate(source, START, END, max_length=7).shape == (3, 7)
    assert model.generate(source, END, END, max_length=2).shape == (3, 2)  # a start is no end


def test_generate_runs_in_eval_mode_and_leaves_each_module_s_mode_as_it_was():
    model, source = writer(dropout=0.5), ids(4, 5, 11)
    graphs = []
    model.head.register_forward_hook(lambda _, given, out: graphs.append(out.requires_grad))
    expected = model.generate(source, START, END, max_length=8)
    assert graphs
    assert not any(graphs)
    model.train()
    model.encoder.eval()  # frozen, say
    modes = [module.training for module in model.modules()]
    assert torch.equal(model.generate(source, START, END, max_length=8), expected)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(SettingError):
        model.generate(source, 13, END)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("settings", [{}, {"target_vocabulary": 13, "output_projection": False}])
def test_generate_needs_ids_to_write(settings):
    with pytest.raises(SettingError, match="generate needs a target_vocabulary and an output"):
        small(**settings).generate(vectors(1, 3), START, END)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_gradients_reach_every_parameter(norm):
    model = writer(norm=norm, dropout=0.1).train()
    out = model(ids(3, 6, 11), ids(3, 5, 13), source_mask=real(6, 4, 2, of=6))
    (out * vectors(3, 5, 13, seed=3)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_dropout_is_of_training_alone_and_may_be_left_out():
    source, target = vectors(2, 5), vectors(2, 4, seed=2)
    dropping, none = small(), small(dropout=0.0)
    out = dropping(source, target)
    torch.testing.assert_close(none.train()(source, target), out)
    assert not torch.allclose(dropping.train()(source, target), out)


def test_initial_weights():
    model = Transformer(
        width=64, num_heads=4, encoder_depth=1, decoder_depth=1, mlp_width=128,
        source_vocabulary=1000, target_vocabulary=1000,
    )  # fmt: skip

    def bound(rows: int, columns: int) -> float:
        return math.sqrt(6 / (rows + columns))

    block = model.decoder.blocks[0]
    square = [*block.attn.qkv.weight.chunk(3), *block.cross_attn.kv.weight.chunk(2)]
    square += [block.cross_attn.q.weight, block.cross_attn.proj.weight, block.attn.proj.weight]
    square += model.encoder.blocks[0].attn.qkv.weight.chunk(3)
    bounds = [(matrix, bound(64, 64)) for matrix in square]
    bounds += [(block.mlp.fc1.weight, bound(64, 128)), (model.head.weight, bound(1000, 64))]
    for matrix, expected in bounds:
        assert 0.98 * expected < matrix.abs().max() <= expected
        assert matrix.std().item() == pytest.approx(expected / math.sqrt(3), rel=0.05)
    for name, parameter in model.named_parameters():
        if name.startswith("embed"):
            assert parameter.std().item() == pytest.approx(64**-0.5, rel=0.02)
        elif parameter.ndim == 1:
            assert (parameter == float(name.endswith("weight"))).all()


VECTORS, IDS = vectors(2, 5), ids(2, 4, 13)
WRONG_INPUTS = [
    (writer, VECTORS, IDS, r"source: expected ids \(B, T\) in 0\.\.10, got .*64 \(2, 5, 24\)"),
    (writer, VECTORS[..., 0], IDS, r"source: expected ids .*, got torch.float64 \(2, 5\)"),
    (writer, ids(2, 5, 11)[0], IDS, r"source: expected ids .*, got torch.int64 \(5,\)"),
    (small, VECTORS, IDS, r"target: expected floats \(B, T, 24\), got torch.int64 \(2, 4\)"),
    (small, VECTORS, vectors(2, 4, 23), r"target: .*, got torch.float64 \(2, 4, 23\)"),
    (small, VECTORS, IDS[..., None].expand(2, 4, 24), r"target: .*, got torch.int64 \(2, 4, 24\)"),
    (small, VECTORS, vectors(2, 4)[0], r"target: .*, got torch.float64 \(4, 24\)"),
    (writer, torch.tensor([[3, 4, 11]]), IDS[:1], r"source: .* 0\.\.10, got 3\.\.11$"),
    (writer, torch.tensor([[3, 4, -1]]), IDS[:1], r"source: .* 0\.\.10, got -1\.\.4$"),
    (small, vectors(3, 5), vectors(2, 4), r"memory: expected \(2, 5, 24\), got \(3, 5, 24\)"),
]


@pytest.mark.parametrize(("make", "source", "target", "message"), WRONG_INPUTS)
def test_inputs_of_another_kind_or_size(make, source, target, message):
    with pytest.raises((ShapeError, SettingError), match=message):
        make()(source, target)


def test_masks_and_memories_that_do_not_fit():
    model, source, target = small(), vectors(2, 5), vectors(2, 4)
    with pytest.raises(ShapeError, match=r"source_mask: expected bool \(2, 5\), got .*\(2, 4\)"):
        model(source, target, source_mask=real(4, 4, of=4))
    with pytest.raises(ShapeError, match=r"target_mask: expected bool .*, got torch.float32"):
        model(source, target, target_mask=torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=r"source_mask: expected bool \(2, 5\), got torch.bool"):
        model.decode(target, model.encode(source), source_mask=real(5, of=5))
    with pytest.raises(ShapeError, match=r"memory: expected \(2, 5, 24\), got \(2, 5, 20\)"):
        model.decode(target, vectors(2, 5, 20))


def test_models_that_cannot_exist():
    with pytest.raises(SpecError, match="norm 'middle' is none of pre, post"):
        small(norm="middle")
    with pytest.raises(SpecError, match=r"activation 'relo' is none of .*did you mean 'relu'"):
        small(activation="relo")
    with pytest.raises(SpecError, match="width 24 is not divisible by num_heads 5"):
        small(num_heads=5)
