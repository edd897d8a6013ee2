"""One rank of an engine: from settings to a worker, in phases that the host (`host.py`) drives. No scheduler.

Only this module, `host.py` and `wiring.py` read `EngineConfig` to build an engine; everything below receives objects and
values.

On a GPU background threads read the weights. Meanwhile this thread measures memory, allocates blocks and compiles
kernels, with whatever the weights hold so far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from quire.attention.base import AttentionBackend
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.config import EngineConfig, triton_interpreted
from quire.frontend.location import locate_model
from quire.kernels import Kernels, pick_kernels
from quire.kernels.cpu.ops import CpuKernels
from quire.kernels.target import OLDEST, target_of
from quire.layers.env import Env
from quire.models.checkpoint.checked import CheckedCheckpoint
from quire.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from quire.models.checkpoint.sizes import weight_bytes
from quire.models.config.load import load_spec
from quire.models.decoder import Model
from quire.models.kv_codes import with_kv_codes
from quire.models.registry import build_model, check_shards
from quire.models.spec import ModelSpec
from quire.parallel.connection import connect_ranks
from quire.parallel.ranks import Parallel
from quire.quant.spec import served_format
from quire.speculation.draft_model import ModelDrafter
from quire.speculation.drafter import NO_SPECULATION, Speculation
from quire.speculation.ngram import NgramDrafter
from quire.speculation.vocabulary import check_vocabulary
from quire.types import ConfigError
from quire.wiring import queue_depth
from quire.worker.executor import device_guard
from quire.worker.memory.kv_groups import choose_groups
from quire.worker.memory.sizing import BlockLayout, KVSize, MemoryPlanner, StepLimits, gpu_memory
from quire.worker.runner import Runner
from quire.worker.worker import LaunchOptions, Worker

log = logging.getLogger("quire")


class Rank:
    """One rank of an engine: its device, model, worker and runner.

    The host runs the phases in the order of `PHASES`, on all ranks at the same time and inside `guard`. What ranks must
    agree on, it passes as an argument.

    Args:
        config: settings.
        path: folder or file of the model.
        spec: the model's spec.
        index: number of this rank.

    Raises:
        ConfigError: if the settings do not suit the model or the machine.
    """

    runner: Runner  # from `allocate` on
    size: KVSize

    def __init__(self, config: EngineConfig, path: Path, spec: ModelSpec, index: int = 0) -> None:
        check_shards(spec, config.tensor_parallel_size)
        self.device = rank_device(config.device, index, config.tensor_parallel_size)
        self.guard = device_guard(self.device)
        self._path = path
        self._explicit_len = config.max_model_len is not None
        if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
            raise ConfigError(
                f"max_model_len {config.max_model_len} exceeds the {spec.max_model_len} positions of {config.model}"
            )
        spec = served_spec(config, spec)
        self.dtype = pick_dtype(config.dtype, spec, self.device)
        spec = kv_coded_spec(config, path, spec, self.dtype, self.device)
        self._draft = find_draft(config, path, spec)
        longest = min([spec.max_model_len, *(draft.spec.max_model_len for draft in self._draft)])
        self.spec, self.config = spec, config.resolved(gpu_memory(self.device), longest)
        self._kernels = pick_kernels(self.device, self.dtype, config.cpu_kernels)
        self.backend = pick_attention(config.attention, spec, self.device, self.dtype, self._kernels)
        self._parallel = Parallel(index, config.tensor_parallel_size)
        self._loading = ExitStack()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, from `fit_context` on."""
        return self._memory.weight_bytes

    def run_phase(self, phase: str, argument: int) -> int:
        """Run the phase of the start-up with this name. Return its result, or 0 if it has none."""
        return self.PHASES[phase](self, argument) or 0

    def connect(self, port: int) -> None:
        """Connect to the other ranks, which meet at `port` of the loopback interface."""
        if self._parallel.size > 1:
            communicator = connect_ranks(port, self._parallel, self.device, self.config.rank_timeout)
            self._parallel = replace(self._parallel, communicator=communicator)

    def fit_context(self) -> int:
        """Return the longest context, in tokens, of which one request fits beside the weights."""
        self._memory = memory_planner(
            self.config,
            self._path,
            self.spec,
            self.dtype,
            self.device,
            explicit_len=self._explicit_len,
            drafts=tuple(draft.spec for draft in self._draft),
        ).shortened()
        return self._memory.limits.max_model_len

    def load(self, max_model_len: int) -> None:
        """Build the model for contexts of up to `max_model_len` tokens, and start to load its weights."""
        limits = replace(self._memory.limits, max_model_len=max_model_len)
        memory = self._memory = replace(self._memory, limits=limits)
        # Position tables and token columns are allocated for the context that is served, not for the model's longest.
        spec = self.spec = replace(self.spec, max_model_len=max_model_len)
        config, backend, kernels = self.config, self.backend, self._kernels
        model, checkpoint = load_model(
            config,
            self._path,
            spec,
            backend=backend,
            kernels=kernels,
            parallel=self._parallel,
            device=self.device,
            dtype=self.dtype,
        )
        self._loading.enter_context(closing(checkpoint))
        self._checkpoints = [checkpoint]
        options = launch_options(config, queue_depth(config))
        speculation = pick_speculation(config, self._load_draft)
        self.worker = Worker(model, backend, memory, options, kernels, speculation)

    def _load_draft(self) -> tuple[Model, AttentionBackend]:
        """Build the draft model, whole on every rank, and start to load its weights."""
        (draft,) = self._draft
        spec = replace(draft.spec, max_model_len=self.spec.max_model_len)
        backend = pick_attention(self.config.attention, spec, self.device, self.dtype, self._kernels)
        model, checkpoint = load_model(
            self.config,
            draft.path,
            spec,
            backend=backend,
            kernels=self._kernels,
            parallel=Parallel(),
            device=self.device,
            dtype=self.dtype,
        )
        self._loading.enter_context(closing(checkpoint))
        self._checkpoints.append(checkpoint)
        return model, backend

    def compile(self) -> None:
        """Compile the kernels of common steps. Ranks may find different kernels on disk, so they do not communicate."""
        with self._parallel.communicator.muted():
            self.worker.compile_kernels()

    def kv_budget(self) -> int:
        """Return the bytes that the largest step leaves for the KV cache."""
        return self._memory.kv_budget(self.worker.measure())

    def allocate(self, budget: int) -> None:
        """Allocate a KV cache of at most `budget` bytes."""
        self.size = self._memory.size_kv(budget)
        self._memory.check_kv_fits(self.size, self.worker.reserved_bytes)
        self.runner = self.worker.allocate(self.size)

    def rehearse(self) -> None:
        """Run a first request and capture common steps. A CPU has nothing to compile or capture."""
        if self.device.type == "cuda":
            self.worker.rehearse(self.runner, self.size)

    def finish(self) -> None:
        """Wait until the weights are loaded.

        Raises:
            ModelError: if the checkpoint holds tensors that the model does not use, or cannot be read.
        """
        for checkpoint in self._checkpoints:
            checkpoint.finish()

    def close(self) -> None:
        """End the loading of weights. The engine may be in use."""
        self._loading.close()

    # By name, each with its argument, whether it uses that or not.
    PHASES: ClassVar[dict[str, Callable[[Rank, int], int | None]]] = {
        "connect": connect,
        "fit_context": lambda rank, _: rank.fit_context(),
        "load": load,
        "compile": lambda rank, _: rank.compile(),
        "kv_budget": lambda rank, _: rank.kv_budget(),
        "allocate": allocate,
        "rehearse": lambda rank, _: rank.rehearse(),
        "finish": lambda rank, _: rank.finish(),
    }


def step_limits(config: EngineConfig) -> StepLimits:
    """Return the limits of steps and requests. `config` is resolved."""
    return StepLimits(
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        max_model_len=config.max_model_len or 1,
    )


def served_spec(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the format in which its weights are served.

    Raises:
        ConfigError: if `config` asks for a conversion of weights that are quantised already.
    """
    served = served_format(spec.quantization, config.quantization, config.load_format == "dummy")
    return replace(spec, quantization=served)


def kv_coded_spec(
    config: EngineConfig, path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> ModelSpec:
    """Return the spec with the format of KV entries that `config` asks for.

    Raises:
        ConfigError: if the model or the device does not support it.
    """
    stored = None if config.load_format == "dummy" else path
    return with_kv_codes(spec, config.kv_cache_dtype, stored, dtype, device)


def memory_planner(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    explicit_len: bool,
    drafts: tuple[ModelSpec, ...] = (),
) -> MemoryPlanner:
    """Return the planner that divides the memory of `device`.

    Args:
        config: resolved settings.
        path: folder or file of the model.
        spec: the spec that is served.
        dtype: of plain weights, activations and KV entries.
        explicit_len: the user set max_model_len, so a context that does not fit is an error.
        drafts: specs of draft models, whose layers follow those of the model in its blocks.
    """
    limits = step_limits(config)
    layout = BlockLayout(
        paged_size=config.block_size if config.kv_layout == "paged" else None,
        keeps_kv=config.kv_layout != "none",
    )
    name, ranks = str(dtype).removeprefix("torch."), config.tensor_parallel_size
    own = spec.kv_layouts(name, ranks)
    return MemoryPlanner(
        model=config.model,
        spec=spec,
        weight_bytes=weight_bytes(path, spec, dtype, device, config.cpu_kernels),
        dtype=dtype,
        device=device,
        groups=choose_groups(
            own + tuple(layout for draft in drafts for layout in draft.kv_layouts(name)),
            limits.max_model_len,
            paged=layout.paged,
            keeps_kv=layout.keeps_kv,
        ),
        ranks=ranks,
        limits=limits,
        layout=layout,
        explicit_len=explicit_len,
        kv_cache_memory=config.kv_cache_memory,
        memory_utilization=config.memory_utilization,
    )


def launch_options(config: EngineConfig, depth: int) -> LaunchOptions:
    """Return how the worker launches steps, of which `depth` may be in flight."""
    ranks = config.tensor_parallel_size
    return LaunchOptions(
        depth=depth,
        cuda_graphs=config.cuda_graphs,
        capture_at_start=config.capture_at_start,
        cpu_replay=config.cpu_replay and ranks == 1,  # a replay contains only calls of kernels
        cpu_threads=config.cpu_threads or (max(1, torch.get_num_threads() // ranks) if ranks > 1 else None),
    )


class DraftSource(NamedTuple):
    """The draft model of an engine."""

    path: Path
    spec: ModelSpec


def find_draft(config: EngineConfig, path: Path, spec: ModelSpec) -> list[DraftSource]:
    """Return the draft model, if the settings name one.

    Args:
        path: folder or file of the model that verifies.
        spec: its spec.

    Raises:
        ConfigError: if the draft model has another vocabulary, or a shorter context than `config` demands.
    """
    if config.spec_model is None:
        return []
    draft = DraftSource(found := locate_model(config.spec_model).path, load_spec(found))
    if spec.kv_codes:
        draft = draft._replace(spec=replace(draft.spec, kv_codes=replace(spec.kv_codes, static=False)))
    check_vocabulary(path, spec.vocab_size, draft.path, draft.spec.vocab_size)
    if (config.max_model_len or 0) > draft.spec.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {draft.spec.max_model_len} positions of the draft model "
            f"{config.spec_model}; lower it or use another spec_model"
        )
    return [draft]


def pick_speculation(
    config: EngineConfig, load_draft: Callable[[], tuple[Model, AttentionBackend]]
) -> Speculation:
    """Return how steps draft tokens.

    Args:
        config: resolved settings.
        load_draft: loads the draft model, for methods that need one.
    """
    tokens = config.spec_tokens or 0
    if config.spec_method == "ngram":
        return Speculation(lambda context: NgramDrafter(context.columns, context.device), tokens)
    if config.spec_method == "draft":
        model, backend = load_draft()
        return Speculation(lambda context: ModelDrafter(model, backend, context), tokens)
    return NO_SPECULATION


def rank_device(name: str, rank: int, ranks: int) -> torch.device:
    """Return the device of a rank: the GPUs from the one called `name` on, or the CPU for all.

    Raises:
        ConfigError: as `pick_device`, or if there are fewer GPUs than ranks.
    """
    first = pick_device(name)
    if first.type == "cpu":
        return first
    begin, count = first.index or 0, torch.cuda.device_count()
    if begin + ranks > count:
        raise ConfigError(
            f"tensor_parallel_size {ranks} needs GPUs {begin} to {begin + ranks - 1}, but this machine has {count}, "
            "numbered from 0; lower it"
        )
    return first if rank == 0 else pick_device(f"cuda:{begin + rank}")


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: if there is no such device, or Quire does not support it.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name!r} needs a CUDA GPU, but torch finds none; use device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {name!r} does not exist: this machine has {torch.cuda.device_count()} GPU(s), numbered from 0"
            )
        device = torch.device("cuda", device.index or 0)
        _refuse_unsupported(device)
        # cuDNN's attention spends some 50 ms on planning for every new length, and rows grow by one token a step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _refuse_unsupported(device: torch.device) -> None:
    if torch.version.hip is not None:  # torch calls AMD GPUs cuda as well
        raise ConfigError(
            f"device {str(device)!r} is an AMD GPU (ROCm {torch.version.hip}), which Quire does not support; "
            "use an NVIDIA GPU or device cpu"
        )
    target = target_of(device)
    if target.capability < OLDEST:
        raise ConfigError(
            f"{target} is too old: Quire needs compute capability {OLDEST // 10}.{OLDEST % 10} or later; "
            "use a newer GPU or device cpu"
        )


def pick_dtype(wanted: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the number format of weights and activations; `auto` follows the checkpoint if the device can.

    With `auto`, a GPU without bfloat16 uses float16, or float32 for models whose activations exceed the range of
    float16. A CPU has no fast path for float16 and uses float32.

    Raises:
        ConfigError: if `wanted` is bfloat16 and the device lacks it.
    """
    name = spec.dtype if wanted == "auto" else wanted
    if name == "bfloat16" and device.type == "cuda" and not (target := target_of(device)).has_bf16:
        instead = "float32" if spec.family in _WIDE_RANGE else "float16"
        if wanted == "bfloat16":
            raise ConfigError(
                f"dtype bfloat16 needs an NVIDIA GPU since Ampere, got {target}; use dtype {instead}"
            )
        log.warning("using dtype %s, because %s has no bfloat16", instead, target)
        name = instead
    if name == "float16" and spec.family in _WIDE_RANGE:
        log.warning("%s models exceed the range of float16; bfloat16 or float32 are safe", spec.family)
    if name == "float16" and device.type == "cpu":
        if wanted == "float16":
            log.warning("dtype float16 is slow on a CPU; bfloat16 and float32 are faster")
        else:
            name = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


_WIDE_RANGE = ("gemma", "gemma2", "gemma3")  # families trained in bfloat16 whose activations overflow float16


def pick_attention(
    name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kernels: Kernels | None
) -> AttentionBackend:
    """Return the attention back end called `name`; `auto` picks the fastest one.

    That is `triton` on a GPU, if the package is installed and the heads fit into shared memory, and `cpu` on a CPU with
    C kernels. Otherwise it is `reference`, which is plain PyTorch.

    Args:
        kernels: the set that the model's layers use, or None.

    Raises:
        ConfigError: if the back end cannot run here.
    """
    if isinstance(kernels, CpuKernels) and name in ("auto", "cpu"):
        return CpuAttention(kernels)
    if name == "cpu":
        raise ConfigError(
            "attention cpu needs a CPU, dtype float32 or bfloat16, cpu_kernels on, and a C compiler; use attention reference"
        )
    installed = find_spec("triton") is not None
    if name == "reference" or (name == "auto" and not (installed and device.type == "cuda")):
        return ReferenceAttention()
    if not installed:
        raise ConfigError(
            "attention triton needs the package triton, which is not installed; use attention reference"
        )
    if device.type != "cuda" and not triton_interpreted():
        raise ConfigError(
            f"attention triton needs a CUDA device, but device is {device}; use attention reference"
        )
    # Imported here: an installation for CPUs has no Triton.
    from quire.attention.triton import TritonAttention

    target, latent = target_of(device), spec.latent
    if latent:
        width = latent.stored_dim
        fits = TritonAttention.fits_latent(spec.num_heads, width, dtype.itemsize, target)
    else:
        width = spec.head_dim
        fits = TritonAttention.fits(width, dtype.itemsize, spec.num_heads // spec.num_kv_heads, target)
    if not fits:
        fault = f"{dtype.itemsize * 8}-bit heads of {width} need more shared memory than {target} has"
        if name == "triton":
            raise ConfigError(f"attention triton cannot run: {fault}; use attention reference")
        log.warning("using attention reference, which is slower: %s", fault)
        return ReferenceAttention()
    return TritonAttention()


def load_model(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    *,
    backend: AttentionBackend,
    kernels: Kernels | None,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Model, Checkpoint]:
    """Build the rank's part of the model on `device` and start to load its weights.

    Returns:
        The model and its checkpoint. The weights are undefined until `Checkpoint.finish` has returned.

    Raises:
        ModelError: if the checkpoint cannot be read or does not fit the model.
    """
    checkpoint: Checkpoint = CheckedCheckpoint(
        open_checkpoint(path, spec, config.load_format, device=device, dtype=dtype, seed=config.seed)
    )
    try:
        with torch.inference_mode():
            env = Env(checkpoint, parallel, backend, device, dtype, kernels, spec.quantization)
            return build_model(spec, env), checkpoint
    except BaseException:
        checkpoint.close()
        raise
