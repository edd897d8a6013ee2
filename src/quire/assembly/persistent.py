"""`PersistentDecoder`: a dense decoder that runs a decode step of few rows, all layers and the head, as one kernel.

The kernel is kernels/persistent/. Steps that it does not take run layer by layer: prompts, draft tokens, more rows. To
the worker it is one more model, so it is captured, sampled from and observed like the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from quire.attention.base import ForwardBatch, KVLayer
from quire.kernels.persistent.launch import DecodeStep, Mailbox, compile_ahead
from quire.kernels.persistent.scales import scale_words
from quire.kernels.persistent.schedule import INT4_GROUP, TILE, DecoderSizes, Schedule, WeightFormat, takes
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.models.decoder import BriefSteps, DecoderModel
from quire.models.layouts import DecoderLayer, SelfAttention
from quire.models.spec import ModelSpec
from quire.quant.few_rows import FewRowsMatmul
from quire.quant.forms import Fp8Weight
from quire.quant.packed_codes import PackedCodesMatmul

log = logging.getLogger("quire")

# Measured on an H200, with models of up to 15 GB. Eight rows are faster layer by layer, and so are long contexts, for which
# attention layer by layer has better kernels.
_ROWS = (1, 2, 4)  # of a step; a kernel is compiled for each
_MOST_BYTES = 16 << 30  # of weights that a step reads
_MOST_CONTEXT = 4096  # tokens of all rows together
_GATE_UP = 2  # of `Kind` in parts.h


class PersistentDecoder:
    """A decoder whose small decode steps are one launch each.

    Args:
        model: the decoder, which `unsuited` takes.
        block_size: of the KV cache, in tokens.
        device: a Hopper GPU.
        when_loaded: runs an action once the model's weights are in place, as `Weights.when_loaded` does.
    """

    def __init__(
        self,
        model: DecoderModel,
        block_size: int,
        device: torch.device,
        when_loaded: Callable[[Callable[[], None]], None],
    ) -> None:
        self.layer_by_layer, self.spec = model, model.spec
        self._block_size, self._device = block_size, device
        self._sizes = decoder_sizes(model)
        self._layers = list(model.layers)  # all, whichever the model runs now
        self._scales = [
            [_kernel_scales(linear.multiply) for linear in _linears(each)] for each in self._layers
        ]
        if self._sizes.weights == "int4":
            when_loaded(self._fill_scales)
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        schedules = [Schedule(self._sizes, rows, block_size, blocks) for rows in _ROWS]
        schedules = [schedule for schedule in schedules if schedule.fits]
        self._mailbox = Mailbox(schedules, device)
        self._steps: dict[int, DecodeStep] = {}
        pool = ThreadPoolExecutor(len(_ROWS), "compile")
        self._binaries: dict[int, tuple[Schedule, Future[bytes]]] = {
            schedule.rows: (schedule, pool.submit(compile_ahead, schedule)) for schedule in schedules
        }
        pool.shutdown(wait=False)
        self.brief = BriefSteps(max(self._binaries, default=0), _MOST_CONTEXT)
        self._pointers: dict[tuple[int, ...], torch.Tensor] = {}  # by the addresses of the KV blocks
        self._logits: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # hidden states, and what follows from them
        )

    @property
    def attention_layers(self) -> Sequence[KVLayer]:
        return self.layer_by_layer.attention_layers

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.input_ids.shape[0]
        if not self._takes(batch, rows):
            return self.layer_by_layer(batch)
        pointers = self._layer_pointers(batch)
        if pointers is None:
            return self.layer_by_layer(batch)
        sizes, model = self._sizes, self.layer_by_layer
        hidden = torch.empty(rows, sizes.hidden, dtype=torch.bfloat16, device=self._device)
        logits = torch.empty(rows, sizes.vocab, dtype=torch.bfloat16, device=self._device)
        head = _numbers(_head_product(model)) if sizes.vocab else logits
        self._step(rows)(
            pointers, model.embed.table, model.norm.weight, head, batch.input_ids,
            batch.positions, batch.kv_slots, batch.slots, batch.block_table, model.ropes[0].table, hidden, logits,
            batch.block_table.stride(0), batch.kv[0][0].stride(0),
        )  # fmt: skip
        self._logits = (hidden, logits) if sizes.vocab else None
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of `hidden`, which the kernel has computed already if they are the last step's."""
        last, self._logits = self._logits, None
        return last[1] if last is not None and last[0] is hidden else self.layer_by_layer.logits(hidden)

    def _takes(self, batch: ForwardBatch, rows: int) -> bool:
        """Return whether the kernel runs a step: each row decodes one token, and there is a kernel for their number."""
        return (
            rows in self._binaries
            and (batch.brief or self.brief.has(rows, int(batch.seq_bounds.sum())))
            and rows == batch.seq_lens.shape[0]
            and batch.num_tokens is not None
            and bool((batch.num_tokens == 1).all())
            and batch.wanted is None
            and not batch.others
            and batch.block_size == self._block_size
        )

    def _fill_scales(self) -> None:
        """Put the scales of INT4 weights into the kernel's order, once the checkpoint is there."""
        for layer, scales in zip(self._layers, self._scales, strict=True):
            for kind, (linear, words) in enumerate(zip(_linears(layer), scales, strict=True)):
                product = linear.multiply
                assert words is not None and isinstance(product, PackedCodesMatmul)
                weight = product.weight
                words.copy_(scale_words(weight.scale, weight.zero, gated=kind == _GATE_UP))

    def _step(self, rows: int) -> DecodeStep:
        step = self._steps.get(rows)
        if step is None:
            schedule, binary = self._binaries[rows]
            step = self._steps[rows] = DecodeStep(schedule, binary.result(), self._mailbox, self._device)
        return step

    def _layer_pointers(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Return the addresses of weights and KV blocks, int64 [layers, 14]; None if they are new while capturing."""
        key = tuple(tensors[0].data_ptr() for tensors in batch.kv)
        found = self._pointers.get(key)
        if found is None and not torch.cuda.is_current_stream_capturing():
            rows = [_addresses(layer, batch.kv[i], self._scales[i]) for i, layer in enumerate(self._layers)]
            found = self._pointers[key] = torch.tensor(rows, dtype=torch.int64).to(self._device)
        return found


def unsuited(model: object, device: torch.device) -> str:
    """Return why the persistent kernel does not run a model; empty if it does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU"
    if type(model) is not DecoderModel or not all(_is_plain(layer) for layer in model.layers):
        return "it runs dense decoders of the Llama and Qwen families only"
    if _weight_format(model) is None:
        return "weights of layers must all be bf16, in one format of FP8, or INT4 with groups of 128"
    if unusual := _unusual(model.spec):
        return f"the model has {unusual}"
    if model.stage.count > 1 or model.head.parallel.size > 1:
        return "it runs on one GPU"
    if model.embed.table.dtype != torch.bfloat16:
        return "the embedding must be bf16"
    sizes = decoder_sizes(model)
    if (read := step_bytes(sizes)) > _MOST_BYTES:
        return f"its {read / 1e9:.1f} GB of weights exceed {_MOST_BYTES / 1e9:.1f} GB"
    return takes(sizes)


def step_bytes(sizes: DecoderSizes) -> int:
    """Return the bytes of weights that a decode step reads."""
    stages = {stage.name: stage.weight_bytes for stage in Schedule(sizes, 1, 1, 1).stages()}
    return stages.pop("head") + sizes.layers * sum(stages.values())


def decoder_sizes(model: DecoderModel) -> DecoderSizes:
    """Return the sizes of a decoder whose weights the kernel reads."""
    spec, weights = model.spec, _weight_format(model)
    assert weights is not None
    # The kernel reads heads in bf16 only. Without one it ends with the hidden states.
    vocab = spec.vocab_size if isinstance(_head_product(model), FewRowsMatmul) else 0
    return DecoderSizes(
        spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size, spec.num_layers,
        vocab, spec.norm_eps, spec.query_scale, spec.qk_norm, spec.qkv_bias,
        weights,
    )  # fmt: skip


def _unusual(spec: ModelSpec) -> str:
    """Return what the kernel does not compute; empty if there is nothing."""
    found = {
        "another norm than RMS": spec.norm != "rms",
        "another MLP than SwiGLU": spec.mlp != "gated" or spec.activation != "silu" or bool(spec.mlp_sizes),
        "windows": any(spec.windows),
        "layers without rotation": bool(spec.rotates) and not all(spec.rotates),
        "several kinds of rotation": len(set(spec.layer_ropes)) > 1 if spec.rope else True,
        "another norm of queries and keys": spec.qk_norm and spec.qk_norm_kind != "heads",
        "biases outside of q, k and v": spec.o_bias or spec.mlp_bias or spec.head_bias,
        "soft caps or sinks": bool(spec.attn_soft_cap or spec.final_soft_cap or spec.sinks),
        "queries that grow or have gates": spec.query_growth is not None or spec.query_gate,
        "scales of embedding, logits or residual": bool(spec.embedding_scale)
        or spec.logit_scale != 1
        or spec.residual_factors is not None,
        "KV entries that are codes": spec.kv_codes is not None,
        "layers that differ": bool(
            spec.head_dims or spec.kv_heads or spec.kv_sources or spec.attends or spec.feeds
        ),
    }
    return next((name for name, is_so in found.items() if is_so), "")


def _is_plain(layer: object) -> bool:
    """Return whether a layer consists of the parts that the kernel knows."""
    if type(layer) is not DecoderLayer or type(layer.attn) is not SelfAttention:
        return False
    rotated = 0, layer.attn.attention.head_dim // 2
    return isinstance(layer.mlp.layer, GatedMLP) and layer.attn.attention.span in rotated


def _linears(layer: DecoderLayer) -> tuple[Linear, Linear, Linear, Linear]:
    attention, mlp = layer.attn, layer.mlp.layer
    assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
    qkv = attention.qkv.layer
    assert isinstance(qkv, Linear)
    return qkv, attention.o.linear, mlp.gate_up, mlp.down


def _head_product(model: DecoderModel) -> object:
    head = model.head.multiply
    return head.multiply if isinstance(head, Linear) else head


def _weight_format(model: DecoderModel) -> WeightFormat | None:
    """Return the format of the weights of all layers; None if the kernel does not read one, or they differ."""
    formats = {_product_format(linear.multiply) for layer in model.layers for linear in _linears(layer)}
    return formats.pop() if len(formats) == 1 else None


def _product_format(product: object) -> WeightFormat | None:
    if isinstance(product, FewRowsMatmul) and product.weight.dtype == torch.bfloat16:
        return "bf16"
    if not isinstance(product, PackedCodesMatmul):
        return None
    weight, form = product.weight, product.form
    if isinstance(form, Fp8Weight):
        return "fp8-block" if form.by_block else "fp8"
    grouped = (weight.group, weight.half) == (INT4_GROUP, INT4_GROUP) and weight.offset is None
    return "int4" if weight.format == "int4" and grouped else None


def _numbers(product: object) -> torch.Tensor:
    if isinstance(product, PackedCodesMatmul):
        return product.weight.codes
    assert isinstance(product, FewRowsMatmul)
    return product.weight


def _kernel_scales(product: object) -> torch.Tensor | None:
    """Return the scales that the kernel reads, or memory for them; None for bf16."""
    if not isinstance(product, PackedCodesMatmul):
        return None
    if isinstance(product.form, Fp8Weight):
        return product.form.scale
    groups, outputs = product.weight.scale.shape
    return torch.empty(outputs // TILE, groups, TILE, dtype=torch.int32, device=product.weight.codes.device)


def _addresses(
    layer: DecoderLayer, kv: tuple[torch.Tensor, ...], scales: list[torch.Tensor | None]
) -> list[int]:
    """Return the fields of `Layer` in parts.h."""
    products = [linear.multiply for linear in _linears(layer)]
    attention, bias = layer.attn, getattr(products[0], "bias", None)
    assert isinstance(attention, SelfAttention)
    norms, first, second = attention.head_norm, attention.qkv.norm, layer.mlp.norm
    assert isinstance(first, RMSNorm) and isinstance(second, RMSNorm)
    tensors = [
        *map(_numbers, products),
        first.weight,
        second.weight,
        None if norms is None else norms.weight,
        bias,
        *kv,
        *scales,
    ]
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
