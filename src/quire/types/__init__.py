"""The types that all layers of Quire share: requests, plans, results, errors and the interfaces between layers.

Imports neither torch nor other parts of Quire. Host arrays are numpy arrays, so a plan can be sent to another process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.types.draft_counts import DraftCounts
from quire.types.engine_io import (
    EngineInfo,
    EngineLive,
    EngineLoad,
    EngineRequest,
    EngineStats,
    ExportedBlocks,
    Figures,
    LiveRequest,
    LiveStep,
    RequestFailure,
    RequestTargets,
    StepFigures,
    Timing,
    TimingPhase,
    TokenLogprobs,
    Totals,
    answer_room,
)
from quire.types.errors import (
    ConfigError,
    EngineDead,
    ModelError,
    Overloaded,
    QuireError,
    RequestError,
    StepFailed,
)
from quire.types.kv import (
    CODE_DTYPES,
    DTYPE_BYTES,
    BlockTable,
    KVCodes,
    KVGroup,
    KVLayout,
    KVTensor,
    StateLayout,
    StateTensor,
)
from quire.types.plan import (
    COMMON_STEP_TOKENS,
    NO_TOKEN,
    NOT_FINITE,
    REJECTED,
    DeviceTimes,
    Executor,
    LogprobArrays,
    NewBlock,
    SlotAdmission,
    StepHandle,
    StepPlan,
    StepResult,
    TokenMasks,
    max_logit_rows,
)
from quire.types.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.types.sampling_params import (
    FLOAT_RANGES,
    INT_RANGES,
    MAX_LOGPROBS,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Pooling,
    SamplingParams,
    StructuredOutputsParams,
    check_field_names,
)
from quire.types.transfer import (
    BlockKey,
    BlockMover,
    PrefillNews,
    SharedBlocks,
    SharedTensor,
    TransferEnd,
    TransferKind,
    TransferOrder,
)

if TYPE_CHECKING:
    from quire.types.engine_output import EngineOutput, EngineOutputs, NewTokens, OutputPart, one_by_one
    from quire.types.request_state import Request, RequestOrder, RequestStatus, ReservedRow

# Imported on first use, because they load msgspec or numpy, which commands that only need settings can do without.
_LATE = {
    "EngineOutput": "engine_output",
    "EngineOutputs": "engine_output",
    "NewTokens": "engine_output",
    "OutputPart": "engine_output",
    "Request": "request_state",
    "RequestOrder": "request_state",
    "RequestStatus": "request_state",
    "ReservedRow": "request_state",
    "one_by_one": "engine_output",
}

__all__ = [
    "CODE_DTYPES",
    "COMMON_STEP_TOKENS",
    "DTYPE_BYTES",
    "FLOAT_RANGES",
    "INT_RANGES",
    "MAX_LOGPROBS",
    "NOT_FINITE",
    "NO_TOKEN",
    "REJECTED",
    "BlockKey",
    "BlockMover",
    "BlockTable",
    "CompletionOutput",
    "ConfigError",
    "DeviceTimes",
    "DraftCounts",
    "EngineDead",
    "EngineInfo",
    "EngineLive",
    "EngineLoad",
    "EngineOutput",
    "EngineOutputs",
    "EngineRequest",
    "EngineStats",
    "Executor",
    "ExportedBlocks",
    "Figures",
    "FinishReason",
    "GrammarKind",
    "GrammarSpec",
    "KVCodes",
    "KVGroup",
    "KVLayout",
    "KVTensor",
    "LiveRequest",
    "LiveStep",
    "Logprob",
    "LogprobArrays",
    "ModelError",
    "NewBlock",
    "NewTokens",
    "OutputPart",
    "Overloaded",
    "Pooling",
    "PrefillNews",
    "QuireError",
    "Request",
    "RequestError",
    "RequestFailure",
    "RequestMetrics",
    "RequestOrder",
    "RequestOutput",
    "RequestStatus",
    "RequestTargets",
    "ReservedRow",
    "SamplingParams",
    "SharedBlocks",
    "SharedTensor",
    "SlotAdmission",
    "StateLayout",
    "StateTensor",
    "StepFailed",
    "StepFigures",
    "StepHandle",
    "StepPlan",
    "StepResult",
    "StructuredOutputsParams",
    "Timing",
    "TimingPhase",
    "TokenLogprobs",
    "TokenMasks",
    "Totals",
    "TransferEnd",
    "TransferKind",
    "TransferOrder",
    "answer_room",
    "check_field_names",
    "max_logit_rows",
    "one_by_one",
]


def __getattr__(name: str) -> Any:
    """Import a name of `_LATE`."""
    if name not in _LATE:
        raise AttributeError(f"module 'quire.types' has no attribute {name!r}")
    return getattr(import_module(f"quire.types.{_LATE[name]}"), name)
