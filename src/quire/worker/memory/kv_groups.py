"""The grouping of layers: which layers share a block table, and which share the memory of a block.

All blocks have the same size, whichever group they serve. A block consists of parts, and each part holds the entries of
one layer of the group that owns the block. Groups with equally many layers therefore waste nothing:

    layers of the model     0 1 2 3 4 5 6 ...           l: with a window, g: without
                            l l l l l g l ...
    groups                  A = 5 11 17   B = 0 1 2   C = 3 4 6   D = ...
    block 7, owned by B     part 0: layer 0 | part 1: layer 1 | part 2: layer 2
    block 8, owned by A     part 0: layer 5 | part 1: layer 11 | part 2: layer 17

Grouping layers by lifetime into blocks of one size is the idea of vLLM's hybrid KV cache manager (2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from quire.types import KVGroup, KVLayout, KVTensor

BlockPart = tuple[KVTensor, ...]  # the tensors of a layout, of which a block holds `block_size` tokens

# A group costs host time in every step, so another one has to save this share of the memory of a request.
_GROUP_COST = 0.01
# Shorter windows are not worth it, and draft models write entries of the last known tokens again.
_LEAST_WINDOW = 8


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of all layers, and the parts of a block.

    Layers that keep nothing of a token are in no group: what they keep of a request has rows of its own (states.py).
    """

    groups: tuple[KVGroup, ...]
    parts: tuple[BlockPart, ...]
    part_of: tuple[int | None, ...]  # by layer; None for a layer in no group

    @property
    def token_bytes(self) -> int:
        """Bytes of a block per token."""
        return sum(tensor.token_bytes for part in self.parts for tensor in part)

    @property
    def group_of(self) -> list[int]:
        """Group of each layer."""
        found = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return [found.get(layer, 0) for layer in range(len(self.part_of))]

    def request_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks that a request of `tokens` KV entries holds at once."""
        return sum(group.most_blocks(tokens, step_tokens, block_size) for group in self.groups)


def held_by(groups: LayerGroups, layers: Container[int]) -> LayerGroups:
    """Return the same groups with only the parts that `layers` need, those of one stage of a pipeline.

    All stages have the same block tables, but each has memory for its own layers only.
    """
    places: dict[tuple[BlockPart, int], int] = {}  # (tensors, number among equal parts of its group) -> part
    part_of: list[int | None] = [None] * len(groups.part_of)
    for group in groups.groups:
        seen: Counter[BlockPart] = Counter()
        moved: dict[int, int] = {}
        for layer in group.layers:
            part = groups.part_of[layer]
            if layer not in layers or part is None:
                continue
            if part not in moved:
                tensors = groups.parts[part]
                moved[part] = places.setdefault((tensors, seen[tensors]), len(places))
                seen[tensors] += 1
            part_of[layer] = moved[part]
    return LayerGroups(groups.groups, tuple(tensors for tensors, _ in places), tuple(part_of))


def choose_groups(
    layouts: Sequence[KVLayout],
    max_len: int,
    *,
    paged: bool,
    keeps_kv: bool,
    stages: Sequence[range] = (),
) -> LayerGroups:
    """Return the groups of layers for requests of up to `max_len` tokens.

    Args:
        layouts: what each layer keeps of a token.
        max_len: longest context in tokens.
        paged: False if one block holds a whole context; then nothing can be released behind a window.
        keeps_kv: False if nothing is kept between steps.
        stages: the layers of each stage of a pipeline; empty if one rank holds all.
    """
    if not keeps_kv:
        return scratch(layouts)
    return group_layers(layouts, max_len, stages) if paged else one_group(layouts)


def one_group(layouts: Sequence[KVLayout]) -> LayerGroups:
    """Return one group of all layers with entries, which keeps all of them."""
    return _assemble(layouts, [KVGroup(_with_entries(layouts))])


def _with_entries(layouts: Sequence[KVLayout]) -> tuple[int, ...]:
    """Return the indices of the layers that keep anything of a token."""
    return tuple(index for index, layout in enumerate(layouts) if layout.tensors)


def scratch(layouts: Sequence[KVLayout]) -> LayerGroups:
    """Return one group whose layers share one part for each layout, because nothing is kept between steps.

    Entries that a layer writes are read only by that layer, in the same step. A layer whose entries others read as
    well has a part of its own.
    """
    layers = _with_entries(layouts)
    owners = {layer: layer if layouts[layer].is_shared else None for layer in layers}
    parts = list(dict.fromkeys((layouts[layer].tensors, owners[layer]) for layer in layers))
    part_of: list[int | None] = [None] * len(layouts)
    for layer in layers:
        part_of[layer] = parts.index((layouts[layer].tensors, owners[layer]))
    return LayerGroups((KVGroup(layers),), tuple(tensors for tensors, _ in parts), tuple(part_of))


def group_layers(layouts: Sequence[KVLayout], max_len: int, stages: Sequence[range] = ()) -> LayerGroups:
    """Return the groups with which a request of `max_len` tokens takes the least memory.

    Layers with equal windows are cut into groups of the same number of layers; the last group may have fewer. All
    numbers are tried, and one group that keeps everything. Each group more has to save a hundredth of the memory.

    In a pipeline every stage cuts its own layers, and a group has layers of all stages: a block takes memory in each.
    """
    stages = stages or (range(len(layouts)),)
    by_window: dict[int | None, list[int]] = {}
    for index in _with_entries(layouts):
        window = layouts[index].window
        if window is not None and not _LEAST_WINDOW <= window < max_len:
            window = None
        by_window.setdefault(window, []).append(index)
    candidates = [one_group(layouts)]
    for size in range(max(map(len, by_window.values()), default=0), 0, -1):
        groups = [
            KVGroup(layers, window)
            for window, among in by_window.items()
            for layers in _cut([[layer for layer in among if layer in stage] for stage in stages], size)
        ]
        candidates.append(_assemble(layouts, groups))

    def cost(found: LayerGroups) -> float:
        tokens = sum(min(group.window or max_len, max_len) for group in found.groups)
        largest = max(held_by(found, stage).token_bytes for stage in stages)
        return largest * tokens * (1 + _GROUP_COST * (len(found.groups) - 1))

    return min(candidates, key=cost)


def _cut(by_stage: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """Return groups of up to `size` layers of each stage."""
    count = -(-max(map(len, by_stage)) // size)
    return [
        tuple(layer for layers in by_stage for layer in layers[group * size : (group + 1) * size])
        for group in range(count)
    ]


def _assemble(layouts: Sequence[KVLayout], groups: Iterable[KVGroup]) -> LayerGroups:
    """Return the groups with as few parts as they need: a part serves one layer of each group, of equal tensors."""
    groups = sorted(groups, key=lambda group: group.window is not None)  # groups without a window first
    places: dict[tuple[BlockPart, int], int] = {}  # (tensors, number among equal layers of its group) -> part
    part_of: list[int | None] = [None] * len(layouts)
    for group in groups:
        seen: Counter[BlockPart] = Counter()
        for layer in group.layers:
            tensors = layouts[layer].tensors
            part_of[layer] = places.setdefault((tensors, seen[tensors]), len(places))
            seen[tensors] += 1
    return LayerGroups(tuple(groups), tuple(tensors for tensors, _ in places), tuple(part_of))
