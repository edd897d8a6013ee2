"""`LLM`: text in, text out, in this process or with the engine in one of its own.

Owns a client, a tokenizer and the open requests; the step loop runs while a call waits for its answers.
What only some runs need (chat templates, the other process, progress bars) is imported by those.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.frontend.client.base import EngineClient, InProcessClient
from quire.frontend.location import locate_model
from quire.frontend.model import processor_of, tokenizer_of
from quire.frontend.output import OutputAssembler, RequestState
from quire.frontend.processor import Prompt
from quire.frontend.progress import Progress
from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.start import start_engine
from quire.types import (
    ConfigError,
    EngineInfo,
    EngineRequest,
    Pooling,
    RequestError,
    RequestOutput,
    SamplingParams,
    check_field_names,
)

if TYPE_CHECKING:
    from quire.frontend.templates.renderer import TemplateRenderer

ChatMessage = Mapping[str, Any]
_POLL_S = 1.0


class LLM:
    """A model ready to answer.

    `model` is a folder, a .gguf file, a Hugging Face id, `demo` or `demo-draft`; every field of
    EngineConfig is a keyword. `engine_process` runs the engine in a process of its own. Raises ModelError
    or ConfigError, in one sentence, when it cannot start.
    """

    def __init__(
        self, model: str | os.PathLike[str] = "demo", *, engine_process: bool = False, **settings: Any
    ) -> None:
        check_field_names(EngineConfig, settings, ConfigError)
        config = EngineConfig(model=os.fspath(model), **settings)
        self.config = config
        self._tokenizer = tokenizer_of(config)
        self._client: EngineClient
        if engine_process:
            from quire.frontend.client.process import ProcessClient

            self._client = ProcessClient(config)
        else:
            self._client = InProcessClient(*start_engine(config))
        self.info: EngineInfo = self._client.info
        self._processor = processor_of(config, self.info, self._tokenizer)
        self._assembler = OutputAssembler()
        self._news: dict[int, RequestState] = {}  # changed, and their calls do not know yet; by id()
        self._count = 0
        self._renderer: TemplateRenderer | None = None  # its process starts with the first chat

    # ------------------------------------------------------------------------------- answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order.

        A prompt is a string, a list of token ids, or {"prompt": ...} or {"prompt_token_ids": ...}.
        `sampling_params` is one for all or one per prompt; without any, the model's own defaults.
        Raises RequestError before anything runs if one of them cannot be served.
        """
        batch = _as_batch(prompts)
        states = self._submit(batch, _per_prompt(sampling_params, len(batch), "sampling_params"), priority)
        self._finish(states, use_tqdm)
        return [state.output() for state in states]

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [
            self.chat_prompt(
                conversation,
                tools,
                add_generation_prompt,
                continue_final_message,
                chat_template,
                chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The answer as it grows: all so far, each time something is new. Closing the iterator ends it."""
        states = self._submit([prompt], [sampling_params], None)
        with closing(self._run(states)) as changes:
            for _ in changes:
                yield states[0].output()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[list[float]]:
        """One vector per prompt: its hidden states behind the last norm, pooled, of length 1 if `normalize`.

        `pooling` is mean or last (token); None: as the model's `1_Pooling/config.json` says, else the mean.
        """
        from quire.frontend.generation_config import default_pooling
        from quire.frontend.normalize import embedding

        pooling = pooling or default_pooling(locate_model(self.config.model, self.config.revision).path)
        if pooling not in ("mean", "last"):
            raise RequestError(f"pooling must be mean or last, got {pooling!r}")
        batch = _as_batch(prompts)
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        states = self._submit(batch, [params] * len(batch), None, pooling)
        self._finish(states, use_tqdm)
        return [embedding(state.pooled or b"", None, normalize).tolist() for state in states]

    # --------------------------------------------------------------------------- for callers

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt of token ids."""
        from quire.frontend.templates.chat import render_chat
        from quire.frontend.templates.renderer import TemplateRenderer

        if self._renderer is None:
            self._renderer = TemplateRenderer(processes=1)
        text = render_chat(
            self._renderer,
            self._tokenizer,
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            chat_template=chat_template,
        )
        ids = self._processor.prompt_ids(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self._processor.default_params()

    def default_params(self, given: Mapping[str, Any], max_tokens: int) -> SamplingParams:
        """The model's defaults, a `max_tokens` of its own, and over both what was given."""
        check_field_names(SamplingParams, dict(given), RequestError)
        return SamplingParams(**{"max_tokens": max_tokens, **self._processor.defaults, **given})

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------ the work

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        priority: Sequence[int] | None,
        pooling: Pooling | None = None,
    ) -> list[RequestState]:
        """Check everything, then queue everything: one bad prompt must not leave others running."""
        priorities = (
            _per_prompt(priority, len(prompts), "priority") if priority is not None else [0] * len(prompts)
        )
        states: list[RequestState] = []
        requests: list[EngineRequest] = []
        for prompt, param, rank in zip(prompts, params, priorities):
            self._count += 1
            name = str(self._count - 1)
            try:
                made = self._processor.process(name, prompt, param, rank or 0, pooling=pooling)
            except RequestError as error:
                raise RequestError(
                    f"prompt {len(states)}: {error}" if len(prompts) > 1 else str(error)
                ) from None
            states.append(RequestState(name, _text_of(prompt), made, self._tokenizer))
            requests += made
        for state in states:
            self._assembler.add(state)
        for request in requests:
            self._client.add(request)
        return states

    def _finish(self, states: Sequence[RequestState], use_tqdm: bool) -> None:
        bar = Progress(len(states), use_tqdm)
        try:
            for changed in self._run(states):
                bar.update(changed)
        finally:
            bar.close()

    def _run(self, states: Sequence[RequestState]) -> Generator[list[RequestState], None, None]:
        """Drive the engine until `states` are finished; yields those that changed. Ends them if interrupted."""
        mine = {id(state) for state in states}
        open_count = len(states)
        try:
            while open_count:
                changed = self._take_news(mine)
                if not changed:
                    self._poll()
                    continue
                for state in changed:
                    if state.error is not None:
                        raise state.error.as_error()
                open_count -= sum(1 for state in changed if state.finished)
                yield changed
        finally:
            self._take_news(mine)
            left = [name for state in states if not state.finished for name in self._assembler.abort(state)]
            if left:
                self._client.abort(left)

    def _poll(self) -> None:
        """Let the engine go on. What it brings may be for another call: streams can be read in turns."""
        applied = self._assembler.apply(self._client.poll(_POLL_S))
        if applied.aborts:
            self._client.abort(applied.aborts)
        self._news.update((id(state), state) for state in applied.changed)

    def _take_news(self, wanted: set[int]) -> list[RequestState]:
        """Requests among `wanted`, by their ids as objects, that changed since they were last asked for."""
        return [self._news.pop(key) for key in [key for key in self._news if key in wanted]]


def _as_batch(prompts: Any) -> Sequence[Prompt]:
    """One prompt or many: a string, an object and a list of integers are one."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
        return [prompts]
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _per_prompt(given: Any, count: int, name: str) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name} has {len(given)} entries for {count} prompts")
    return list(given)


def _text_of(prompt: Prompt) -> str | None:
    if isinstance(prompt, str):
        return prompt
    return prompt.get("prompt") if isinstance(prompt, Mapping) else None
