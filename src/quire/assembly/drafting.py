"""The networks of drafters: draft models and draft heads, built beside the model that verifies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from quire.assembly.attention import pick_attention
from quire.assembly.model import load_model
from quire.attention.base import AttentionBackend
from quire.config import EngineConfig
from quire.frontend.location import locate_model
from quire.layers.env import Env
from quire.models.checkpoint.checked import CheckedCheckpoint
from quire.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from quire.models.checkpoint.sizes import layer_bytes, weight_bytes
from quire.models.config.eagle import load_eagle3_spec, load_eagle_spec
from quire.models.config.load import load_spec
from quire.models.decoder import Model
from quire.models.heads.base import DraftHead, decoder_of, tap
from quire.models.heads.eagle1 import UNREAD as EAGLE_UNREAD
from quire.models.heads.eagle1 import EagleHead, EagleSpec
from quire.models.heads.eagle3 import UNREAD as EAGLE3_UNREAD
from quire.models.heads.eagle3 import Eagle3Head, Eagle3Spec
from quire.models.heads.kinds import check_kind, read_draft_folder
from quire.models.heads.mtp import MTPHead, mtp_parameters, mtp_spec
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from quire.quant.spec import served_format
from quire.speculation.vocabulary import check_vocabulary
from quire.types import ConfigError, KVLayout, ModelError


class DraftSource(NamedTuple):
    """The network that drafts.

    Attributes:
        path: folder of its checkpoint.
        spec: sizes of its layers.
        is_sharded: each rank has a part of it, as of the model; otherwise each rank has the whole.
        head: the configuration, if it is a head with a separate checkpoint.
    """

    path: Path
    spec: ModelSpec
    is_sharded: bool = False
    head: Eagle3Spec | EagleSpec | None = None

    def kv_layouts(self, dtype: str, ranks: int) -> tuple[KVLayout, ...]:
        """Return what its layers keep of each token; see `ModelSpec.kv_layouts`."""
        return self.spec.kv_layouts(dtype, ranks if self.is_sharded else 1)

    def weight_bytes(self, dtype: torch.dtype, device: torch.device, has_kernels: bool, ranks: int) -> int:
        """Return the bytes of its weights on one of `ranks` ranks, beside those that `weight_bytes` of the model counts."""
        if self.head:
            return layer_bytes(self.head.num_parameters, self.spec, dtype, device, has_kernels)
        if not self.is_sharded:
            return weight_bytes(self.path, self.spec, dtype, device, has_kernels)
        stored = self.spec.quantization
        if stored is not None and not stored.convert:
            return 0  # the size of a quantised checkpoint includes all of its layers
        return layer_bytes(mtp_parameters(self.spec), self.spec, dtype, device, has_kernels) // ranks

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self.spec.max_model_len


def find_draft(config: EngineConfig, path: Path, spec: ModelSpec) -> list[DraftSource]:
    """Return the network that drafts, if the method has one.

    Args:
        config: settings.
        path: folder or file of the model that verifies.
        spec: its spec.

    Raises:
        ConfigError: if the network does not suit the model, or has a shorter context than `config` demands.
    """
    if config.spec_method == "mtp":
        return [DraftSource(path, _coded(mtp_spec(spec), spec), is_sharded=True)]
    if config.spec_model is None:
        return []
    found = locate_model(config.spec_model).path
    check_kind(config.spec_method, read_draft_folder(found, config.load_format))
    if config.spec_method in _HEAD_SPECS:
        head = _HEAD_SPECS[config.spec_method](found, spec)
        head = replace(head, layer=_converted(config, head.layer))
        return [DraftSource(found, head.layer, head=head)]
    draft = DraftSource(found, _coded(_converted(config, load_spec(found)), spec))
    if any(draft.spec.mixes):
        raise ConfigError(
            f"spec_model {config.spec_model} is a {draft.spec.architecture} whose layers keep states, which rejected "
            "drafts would spoil; use a draft model that only attends, or spec_method ngram"
        )
    check_vocabulary(path, spec.vocab_size, draft.path, draft.spec.vocab_size)
    if (config.max_model_len or 0) > draft.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {draft.max_model_len} positions of the draft model "
            f"{config.spec_model}; lower it or use another spec_model"
        )
    return [draft]


_HEAD_SPECS: dict[str, Callable[[Path, ModelSpec], Eagle3Spec | EagleSpec]] = {
    "eagle": load_eagle_spec,
    "eagle3": load_eagle3_spec,
}


def _converted(config: EngineConfig, draft: ModelSpec) -> ModelSpec:
    """Return the spec of a draft model with the format in which its weights are served."""
    is_dummy = config.load_format == "dummy"
    return replace(draft, quantization=served_format(draft.quantization, config.spec_quantization, is_dummy))


def _coded(draft: ModelSpec, spec: ModelSpec) -> ModelSpec:
    """Return the spec of a draft model whose KV entries are coded as those of the model, with scales of their own."""
    return replace(draft, kv_codes=replace(spec.kv_codes, static=False)) if spec.kv_codes else draft


class DraftLoader:
    """The loading of the network that drafts.

    Args:
        config: resolved settings.
        source: the network; none for methods without one.
        target: the model that verifies.
        env: that of the model, with its checkpoint.
        keep: is called with each further checkpoint that is opened.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: list[DraftSource],
        target: Model,
        env: Env,
        keep: Callable[[Checkpoint], None],
    ) -> None:
        self._config, self._source, self._target, self._env, self._keep = config, source, target, env, keep

    @property
    def dtype(self) -> torch.dtype:
        """Number format of hidden states."""
        return self._env.dtype

    def model(self) -> tuple[Model, AttentionBackend]:
        """Build the draft model, whole on every rank, and start to load its weights."""
        (draft,), env = self._source, self._env
        spec = self._served(draft.spec)
        backend = self._backend(spec)
        model, checkpoint = load_model(
            self._config,
            draft.path,
            spec,
            backend=backend,
            kernels=env.kernels,
            parallel=Parallel(),
            device=env.device,
            dtype=env.dtype,
        )
        self._keep(checkpoint)
        return model, backend

    def eagle3(self) -> tuple[DraftHead, AttentionBackend, int]:
        """Build the EAGLE-3 head, whole on every rank. Return it, its back end and the width of its states."""
        head, own = self._open_head(EAGLE3_UNREAD)
        assert isinstance(head, Eagle3Spec)
        embed = decoder_of(self._target, "eagle3").embed
        with torch.inference_mode(), self._complete():
            built = Eagle3Head(own, head, embed, tap(self._target, head.taps, "eagle3"))
        return built, own.attention, head.layer.hidden_size

    def eagle(self) -> tuple[DraftHead, AttentionBackend, int]:
        """Build the head of the first EAGLE, whole on every rank. Return the same as `eagle3`."""
        head, own = self._open_head(EAGLE_UNREAD)
        assert isinstance(head, EagleSpec)
        target = decoder_of(self._target, "eagle")
        with torch.inference_mode(), self._complete():
            built = EagleHead(own, head, target)
        return built, own.attention, head.layer.hidden_size

    def _open_head(self, unread: re.Pattern[str]) -> tuple[Eagle3Spec | EagleSpec, Env]:
        """Open the checkpoint of a head. Return the head's configuration, and what its layers are built with.

        Args:
            unread: names of the tensors that the head does not load.
        """
        (draft,), env = self._source, self._env
        assert draft.head is not None
        head = replace(draft.head, layer=self._served(draft.spec))
        checkpoint = CheckedCheckpoint(
            open_checkpoint(
                draft.path, head.layer, self._config.load_format, device=env.device, dtype=env.dtype,
                seed=self._config.seed, skipped=unread,
            )
        )  # fmt: skip
        self._keep(checkpoint)
        own = replace(
            env,
            weights=checkpoint,
            parallel=Parallel(),
            attention=self._backend(head.layer),
            quantization=head.layer.quantization,
        )
        return head, own

    @contextmanager
    def _complete(self) -> Iterator[None]:
        """Add a way out to the message if a tensor of a head is missing or has another shape."""
        (draft,), method = self._source, self._config.spec_method
        try:
            yield
        except ModelError as error:
            raise ConfigError(
                f"spec_method {method} cannot use {draft.path}: {error}; use a complete checkpoint of a head that was "
                "trained for this model, or spec_method ngram"
            ) from error

    def mtp(self) -> tuple[DraftHead, AttentionBackend, int]:
        """Build the layer for multi-token prediction from the model's checkpoint. Return the same as `eagle3`."""
        (draft,), target = self._source, decoder_of(self._target, "mtp")
        spec = self._served(draft.spec)
        with torch.inference_mode(), self._complete():
            head = MTPHead(self._env, spec, target, target.spec.num_layers)
        return head, self._env.attention, spec.hidden_size

    def _served(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, max_model_len=self._target.spec.max_model_len)

    def _backend(self, spec: ModelSpec) -> AttentionBackend:
        env = self._env
        return pick_attention(self._config.attention, spec, env.device, env.dtype, env.kernels)
