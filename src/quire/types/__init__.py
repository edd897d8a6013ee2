"""The words that every layer of Quire shares: requests, plans, results, errors and the seams between them.

A leaf: imports no torch and nothing of Quire. Host arrays are numpy, so a plan can be shipped to
another process as it is.
"""

from quire.types.errors import ConfigError, EngineDead, ModelError, Overloaded, QuireError, RequestError
from quire.types.messages import (
    EngineInfo,
    EngineLive,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Figures,
    LiveRequest,
    LiveStep,
    Load,
    Timing,
    TimingPhase,
    TokenLogprobs,
    Totals,
)
from quire.types.plan import (
    NO_TOKEN,
    NOT_FINITE,
    Admit,
    Executor,
    LogprobArrays,
    StepHandle,
    StepPlan,
    StepResult,
    TokenMasks,
)
from quire.types.request import Request, Status
from quire.types.results import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.types.sampling import (
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

__all__ = [
    "FLOAT_RANGES",
    "INT_RANGES",
    "MAX_LOGPROBS",
    "NOT_FINITE",
    "NO_TOKEN",
    "Admit",
    "CompletionOutput",
    "ConfigError",
    "EngineDead",
    "EngineInfo",
    "EngineLive",
    "EngineOutput",
    "EngineRequest",
    "EngineStats",
    "Executor",
    "Figures",
    "FinishReason",
    "GrammarKind",
    "GrammarSpec",
    "LiveRequest",
    "LiveStep",
    "Load",
    "Logprob",
    "LogprobArrays",
    "ModelError",
    "Overloaded",
    "Pooling",
    "QuireError",
    "Request",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Status",
    "StepHandle",
    "StepPlan",
    "StepResult",
    "StructuredOutputsParams",
    "Timing",
    "TimingPhase",
    "TokenLogprobs",
    "TokenMasks",
    "Totals",
    "check_field_names",
]
