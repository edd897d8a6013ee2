"""Matrix product y = W x with a W of 4-bit integers, for tens to hundreds of rows of x.

The codes of W are the left factor of the matrix units, which they reach through registers: a thread loads pairs of
two-byte words, converts the four codes of each word where they are, and multiplies. Nothing is written back to shared
memory. W keeps the order of `reorder_nibbles`. In it a word holds two neighbouring columns, in its lower and its upper
bytes, so x is put into the same order first: the even columns of every half, then the odd ones.

Columns are split and sums are finished as in packed.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.matmul.finish import finish
from quire.kernels.matmul.packed import PackedTensors
from quire.kernels.matmul.tiles import RowsTile, rows_tile_for
from quire.kernels.target import target_of

# A code in the last bits of 128 (bf16) or 1024 (fp16) gives their sum, of which the same and the zero are subtracted.
_CONVERT = tl.constexpr("""{
.reg .b32 a;
shr.u32 a, $1, SHIFT;
lop3.b32 a, a, 0x000f000f, MAGIC, 0xEA;
sub.rn.TYPE $0, a, $2;
}""")
_CONVERT_AND_SCALE = tl.constexpr("""{
.reg .b32 a;
shr.u32 a, $1, SHIFT;
lop3.b32 a, a, 0x000f000f, MAGIC, 0xEA;
sub.rn.TYPE a, a, $2;
mul.rn.TYPE $0, a, $3;
}""")
MAGIC_BF16, MAGIC_FP16 = 128.0, 1024.0


@triton.constexpr_function
def _code(SHIFT, HALF_PRECISION, SCALE):
    """Return the PTX that converts the codes at bits SHIFT of two words."""
    code = (_CONVERT_AND_SCALE if SCALE else _CONVERT).value
    names = ("0x64006400", "f16x2") if HALF_PRECISION else ("0x43004300", "bf16x2")
    return code.replace("SHIFT", str(SHIFT)).replace("MAGIC", names[0]).replace("TYPE", names[1])


@triton.jit
def _numbers(words, shift, scale, SHIFT: tl.constexpr, SCALE: tl.constexpr, ASM: tl.constexpr):
    """Return the numbers [N, K] of the codes at bits SHIFT of `words` (int16), in the dtype of `shift` [N, 1].

    shift: the code of 0 plus 128 in bf16, plus 1024 in fp16.
    scale: [N, 1], if SCALE.
    """
    if ASM:
        CODE: tl.constexpr = _code(SHIFT, shift.dtype == tl.float16, SCALE)
        if SCALE:
            return tl.inline_asm_elementwise(
                CODE,
                "=r,r,r,r",
                [words, tl.broadcast_to(shift, words.shape), tl.broadcast_to(scale, words.shape)],
                dtype=shift.dtype,
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                CODE,
                "=r,r,r",
                [words, tl.broadcast_to(shift, words.shape)],
                dtype=shift.dtype,
                is_pure=True,
                pack=2,
            )
    else:
        MAGIC: tl.constexpr = 1024.0 if shift.dtype == tl.float16 else 128.0
        value = ((words >> SHIFT) & 15).to(tl.float32) + MAGIC - shift.to(tl.float32)
        if SCALE:
            value *= scale.to(tl.float32)
        return value.to(shift.dtype)


@kernel
def _nibble_rows(
    x,  # [rows, K], in the order of words
    residual,  # as in packed.py, as are all others
    weight,  # int16 [rows of weight, K / 4]
    scale,
    zero,
    bias,
    y,
    parts,
    arrived,
    rows,
    outputs,
    scale_stride,
    each,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALE_W: tl.constexpr,  # whether the scales multiply the numbers of W rather than the sums
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,  # words of a row of W per iteration, a divisor of HALF / 2
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, splits of the columns, tiles of rows)."""
    GATED: tl.constexpr = KIND != ""
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PARTS: tl.constexpr = HALF // 2 // WORDS  # steps per run of 2 * HALF columns
    MAGIC: tl.constexpr = 1024.0 if x.dtype.element_ty == tl.float16 else 128.0
    dtype: tl.constexpr = x.dtype.element_ty
    tile, split = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, BLOCK_N)
    if GATED:  # gate and up of one output are neighbours
        n = tl.minimum(tile * OUTS + r // 2, outputs - 1) + r % 2 * outputs
    else:
        n = tl.minimum(tile * OUTS + r, outputs - 1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, WORDS)
    from_w = weight + n.to(tl.int64)[:, None] * (K // 4) + k[None, :]
    from_x = x + tl.minimum(m, rows - 1)[:, None].to(tl.int64) * K + k[None, :]
    begin = split * each
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for step in range(begin, tl.minimum(begin + each, K // (4 * WORDS))):
        w = tl.load(from_w + step * WORDS, eviction_policy="evict_first")
        first = step // PARTS * (2 * HALF)
        inside = step % PARTS * WORDS
        for high in tl.static_range(2):
            group = 0 if GROUP == 0 else (first + high * HALF) // GROUP
            s = tl.load(scale + group * scale_stride + n)
            if ZERO:
                shift = tl.load(zero + group * scale_stride + n).to(tl.float32) + MAGIC
            else:
                shift = tl.full([BLOCK_N], MAGIC + 8.0, tl.float32)
            shift = shift.to(dtype)[:, None]
            even = tl.load(from_x + (first + high * HALF + inside))
            odd = tl.load(from_x + (first + high * HALF + HALF // 2 + inside))
            w_even = _numbers(w, shift, s.to(dtype)[:, None], 4 * high, SCALE_W, ASM)
            w_odd = _numbers(w, shift, s.to(dtype)[:, None], 8 + 4 * high, SCALE_W, ASM)
            if SCALE_W:
                acc = tl.dot(w_even, tl.trans(even), acc)
                acc = tl.dot(w_odd, tl.trans(odd), acc)
            else:
                part = tl.dot(w_even, tl.trans(even))
                part = tl.dot(w_odd, tl.trans(odd), part)
                acc += part * s.to(tl.float32)[:, None]
    finish(
        acc, residual, bias, y, parts, arrived, tile, split, m, n, rows, outputs,
        ADD, BIAS, KIND, SPLIT, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@kernel
def _word_order(x, y, K: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """Grid (rows, blocks of columns)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    to = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = to % HALF
    source = to - place + place % (HALF // 2) * 2 + place // (HALF // 2)
    row = tl.program_id(0).to(tl.int64) * K
    tl.store(y + row + to, tl.load(x + row + source, mask=to < K, other=0), mask=to < K)


def word_order(x: torch.Tensor, half: int) -> torch.Tensor:
    """Return x [rows, inputs] with the even columns of every run of `half` in front of its odd ones."""
    y = torch.empty_like(x)
    pdl = target_of(x.device).has_dependent_launch
    _word_order[(x.shape[0], triton.cdiv(x.shape[1], _ORDER_BLOCK))](
        x, y, K=x.shape[1], HALF=half, BLOCK=_ORDER_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y


_ORDER_BLOCK = 1024


def takes_rows(w: PackedTensors) -> bool:
    """Return whether `nibble_rows` multiplies with this weight."""
    return w.format == "int4" and w.offset is None and w.half >= 32


def nibble_rows(
    x: torch.Tensor,
    w: PackedTensors,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    *,
    add: torch.Tensor | None = None,
    kind: str | None = None,
    ordered: bool = False,
    tile: RowsTile | None = None,
) -> torch.Tensor:
    """Return the product of x and W: [rows, outputs].

    Args:
        x: [rows, inputs], contiguous.
        w: the weight; `takes_rows` must hold.
        bias: [outputs of W], or None.
        arrived: int32 zeros, `MOST_TILES` of them; zero again when the kernel has ended.
        add: added to the product, [rows, outputs].
        kind: activation of a gated MLP: the weight is gate|up and the result act(gate) * up.
        ordered: whether x is in the order of words.
        tile: replaces the table's choice.
    """
    rows = x.shape[0]
    outputs = w.outputs if kind is None else w.outputs // 2
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    x = x if ordered else word_order(x, w.half)
    target = target_of(x.device)
    tile = tile or rows_tile_for(rows, w.outputs, w.inputs)
    block_m = max(16, min(tile.block_m, triton.next_power_of_2(rows)))
    word_bytes = 2 * tile.block_n + 4 * block_m * x.element_size()  # of shared memory per stage
    words = min(tile.words, w.half // 2)
    while words > 16 and target.stages(words * word_bytes, 3) < 3:
        words //= 2
    row_tiles, steps = triton.cdiv(rows, block_m), w.inputs // (4 * words)
    tiles = triton.cdiv(w.outputs, tile.block_n)
    wanted = max(1, min(tile.programs * target.sms // (tiles * row_tiles), steps // 4, 16))
    if tiles * row_tiles > arrived.shape[0]:
        wanted = 1
    each = triton.cdiv(steps, wanted)
    splits = triton.cdiv(steps, each)
    parts = y
    if splits > 1:
        parts = torch.empty(
            row_tiles * tiles * splits * tile.block_n * block_m, device=x.device, dtype=torch.float32
        )
    pdl = target.has_dependent_launch
    _nibble_rows[(tiles, splits, row_tiles)](
        x, x if add is None else add, w.codes.view(torch.int16), w.scale, w.codes if w.zero is None else w.zero,
        w.codes if bias is None else bias, y, parts, arrived, rows, outputs, w.scale.shape[-1], each,
        K=w.inputs, GROUP=w.group, HALF=w.half, ZERO=w.zero is not None, ADD=add is not None, BIAS=bias is not None,
        KIND=kind or "", SPLIT=splits > 1, SCALE_W=tile.scale_w, BLOCK_M=block_m, BLOCK_N=tile.block_n,
        WORDS=words, ASM=target.has_ptx, PDL=pdl, num_warps=tile.warps, num_stages=target.stages(words * word_bytes, tile.stages), launch_pdl=pdl,
    )  # fmt: skip
    return y
