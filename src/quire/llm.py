"""`LLM`, the Python API: completions, chat and embeddings, with the engine in this process or in a child process.

An `LLM` owns an engine client, a tokenizer and the open requests. The step loop runs while a call waits for its
results. Modules that only some calls need (chat templates, the engine process, the progress bar) are imported there.
"""

from __future__ import annotations

import os
import warnings
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
from quire.frontend.progress import ProgressBar
from quire.frontend.prompt_batch import as_batch, per_prompt, text_of
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
    """A loaded model and the engine that runs it. Close it, or use it as a context manager, to free its memory.

    An `LLM` serves one thread at a time. Calls may interleave: while one stream is open, `generate` can run.

    Examples:
        >>> with LLM("demo") as llm:
        ...     llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].outputs[0].text

    Args:
        model: a model folder, a .gguf file, a Hugging Face id, or one of the built-in models `demo` and `demo-draft`.
        engine_process: run the engine in a child process instead of this one (Linux and macOS).
        settings: any field of `EngineConfig` but `model`, by name, such as `device="cpu"` or `max_model_len=4096`.

    Attributes:
        config: the settings, as `EngineConfig`.
        info: what the engine found out about the model and the device, such as `max_model_len` and `vocab_size`.
        client: the connection to the engine.

    Raises:
        ConfigError: if a setting is unknown, out of range, or cannot be combined with another.
        ModelError: if the model cannot be found, fetched or loaded.
    """

    def __init__(
        self, model: str | os.PathLike[str] = "demo", *, engine_process: bool = False, **settings: Any
    ) -> None:
        check_field_names(EngineConfig, settings, ConfigError)
        config = EngineConfig(model=os.fspath(model), **settings)
        self.config = config
        self._tokenizer = tokenizer_of(config)
        self.client: EngineClient
        if config.data_parallel_size > 1:
            from quire.frontend.client.replicas import ReplicatedClient

            self.client = ReplicatedClient(config)
        elif engine_process or config.num_ranks > 1:  # a rank that fails may block the process of the others
            from quire.frontend.client.process import ProcessClient

            self.client = ProcessClient(config)
        else:
            self.client = InProcessClient(*start_engine(config))
        self.info: EngineInfo = self.client.info
        try:
            self._processor = processor_of(config, self.info, self._tokenizer)
        except BaseException:
            self.client.close()
            raise
        self._assembler = OutputAssembler()
        # Changed requests that their own calls have not seen yet, as an ordered set.
        self._changed: dict[RequestState, None] = {}
        self._count = 0
        self._renderer: TemplateRenderer | None = None  # made by the first chat, because it starts a process

    # ------------------------------------------------------------------------------- inference

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions for one prompt or several, batched by the engine.

        All prompts are checked before the first one runs.

        Args:
            prompts: one prompt or a list. A prompt is a string, a list of token ids, {"prompt": text} or
                {"prompt_token_ids": ids}.
            sampling_params: one object for all prompts, or a list with one per prompt. None means the model's
                defaults (`get_default_sampling_params`).
            use_tqdm: show a progress bar on standard error.
            priority: one integer per prompt; lower runs first under `scheduling_policy="priority"`.

        Returns:
            One `RequestOutput` per prompt, in the order of `prompts`. Its `outputs` has `sampling_params.n` entries
            with text, token ids and, if requested, log-probabilities.

        Raises:
            RequestError: if a prompt or a parameter is invalid or does not fit into the context.
            StepFailed: if a step ran out of memory, or the model's output was not finite.
            EngineDead: if the engine stopped; every later call raises it, too.
        """
        batch = as_batch(prompts)
        states = self._submit(batch, per_prompt(sampling_params, len(batch), "sampling_params"), priority)
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
        """Generate the next message of one conversation or several, through the model's chat template.

        Examples:
            >>> llm.chat([{"role": "user", "content": "Tell me a story."}])[0].outputs[0].text

        Args:
            messages: one conversation (a list of messages), or a list of conversations. A message has `role`,
                `content` (a string or a list of text parts) and, for tools, `tool_calls` or `tool_call_id`.
            sampling_params: one object for all conversations, or a list with one per conversation. None means the
                model's defaults.
            use_tqdm: show a progress bar on standard error.
            add_generation_prompt: end the prompt with the header of a new assistant message.
            continue_final_message: let the model continue the last message. Needs `add_generation_prompt=False`.
            tools: function definitions in OpenAI's format, for the template to list.
            chat_template: a Jinja template that replaces the model's.
            chat_template_kwargs: further variables for the template, such as {"enable_thinking": False}.

        Returns:
            One `RequestOutput` per conversation, in order. Its `prompt` is the rendered text.

        Raises:
            RequestError: if a message or parameter is invalid, or the template is missing or refuses the messages.
            StepFailed: as in `generate`.
            EngineDead: as in `generate`.
        """
        is_batch = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if is_batch else [messages]
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
        """Generate a completion for one prompt and yield it while it grows.

        The request is submitted at the first `next`. Closing the iterator aborts it and frees its blocks.

        Examples:
            >>> for output in llm.stream("Once upon a time"):
            ...     print(output.outputs[0].text)

        Args:
            prompt: a prompt in any form that `generate` takes.
            sampling_params: how to sample; None means the model's defaults.

        Yields:
            A `RequestOutput` after every step that added to it. It holds everything generated so far, not only what
            is new. The last one is `finished`.

        Raises:
            RequestError: if the prompt or a parameter is invalid or does not fit into the context.
            StepFailed: as in `generate`.
            EngineDead: as in `generate`.
        """
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
        """Compute one embedding per prompt: the hidden states after the final norm, pooled over the prompt.

        Args:
            prompts: one prompt or a list, in any form that `generate` takes.
            pooling: "mean" over all tokens, or "last" for the last token. None means the method named in the model's
                `1_Pooling/config.json` (sentence-transformers), or the mean if there is none.
            normalize: scale each vector to length 1 (L2 norm).
            use_tqdm: show a progress bar on standard error.

        Returns:
            One list of `hidden_size` floats (float32 values) per prompt, in the order of `prompts`.

        Raises:
            RequestError: if `pooling` is unknown or a prompt is invalid or does not fit into the context.
            StepFailed: as in `generate`.
            EngineDead: as in `generate`.
        """
        from quire.frontend.generation_config import default_pooling
        from quire.frontend.normalize import embedding

        pooling = pooling or default_pooling(locate_model(self.config.model, self.config.revision).path)
        if pooling not in ("mean", "last"):
            raise RequestError(f"pooling must be mean or last, got {pooling!r}", param="pooling")
        batch = as_batch(prompts)
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        states = self._submit(batch, [params] * len(batch), None, pooling)
        self._finish(states, use_tqdm)
        return [embedding(state.pooled or b"", None, normalize).tolist() for state in states]

    # --------------------------------------------------------------------------- helpers for callers

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Render and tokenize a conversation. The arguments are those of `chat`.

        Returns:
            A prompt for `generate`: {"prompt": the rendered text, "prompt_token_ids": its token ids}.

        Raises:
            RequestError: if a message is invalid, or the template is missing or refuses the messages.
        """
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
        """Return the model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any: `generation_config.json` of the model over the defaults."""
        return self._processor.default_params()

    def default_params(self, given: Mapping[str, Any], max_tokens: int) -> SamplingParams:
        """Return the model's default parameters, overridden by `given`.

        Args:
            given: values by the names of `SamplingParams` fields.
            max_tokens: limit for a request where neither `given` nor the model has one.

        Raises:
            RequestError: if a name is unknown or a value is out of range.
        """
        check_field_names(SamplingParams, dict(given), RequestError)
        return SamplingParams(**{"max_tokens": max_tokens, **self._processor.defaults, **given})

    def close(self) -> None:
        """Stop the engine and free its memory. Later calls raise EngineDead."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self.client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------ request loop

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        priority: Sequence[int] | None,
        pooling: Pooling | None = None,
    ) -> list[RequestState]:
        """Check all prompts, then queue them all, so that an invalid prompt leaves no other one running."""
        priorities = (
            per_prompt(priority, len(prompts), "priority") if priority is not None else [0] * len(prompts)
        )
        states: list[RequestState] = []
        requests: list[EngineRequest] = []
        for prompt, param, rank in zip(prompts, params, priorities):
            self._count += 1
            name = str(self._count - 1)
            try:
                engine_requests = self._processor.process(name, prompt, param, rank or 0, pooling=pooling)
            except RequestError as error:
                message = f"prompt {len(states)}: {error}" if len(prompts) > 1 else str(error)
                raise RequestError(message, param=error.param, code=error.code) from None
            states.append(RequestState(name, text_of(prompt), engine_requests, self._tokenizer))
            requests += engine_requests
        for text in dict.fromkeys(text for state in states for text in state.warnings):
            warnings.warn(text, stacklevel=4)
        for state in states:
            self._assembler.add(state)
        for request in requests:
            self.client.add(request)
        return states

    def _finish(self, states: Sequence[RequestState], use_tqdm: bool) -> None:
        bar = ProgressBar(len(states), use_tqdm)
        try:
            for changed in self._run(states):
                bar.update(changed)
        finally:
            bar.close()

    def _run(self, states: Sequence[RequestState]) -> Generator[list[RequestState], None, None]:
        """Run the engine until `states` are finished and yield the changed ones after each step.

        Leaving the generator early aborts the others.
        """
        own = set(states)
        open_count = len(states)
        try:
            while open_count:
                changed = self._take_changed(own)
                if not changed:
                    self._poll()
                    continue
                for state in changed:
                    if state.error is not None:
                        raise state.error.as_error()
                    open_count -= state.finished
                yield changed
        finally:
            self._take_changed(own)
            left = [name for state in states if not state.finished for name in self._assembler.abort(state)]
            if left:
                self.client.abort(left)

    def _poll(self) -> None:
        """Run the engine once and note which requests changed, also those of other open streams."""
        applied = self._assembler.apply(self.client.poll(_POLL_S))
        if applied.aborts:
            self.client.abort(applied.aborts)
        self._changed.update(dict.fromkeys(applied.changed))

    def _take_changed(self, own: set[RequestState]) -> list[RequestState]:
        """Return the requests of `own` that changed since the last call."""
        changed, self._changed = self._changed, {}
        if not changed.keys() <= own:  # other streams are open
            self._changed = dict.fromkeys(state for state in changed if state not in own)
            return [state for state in changed if state in own]
        return list(changed)
