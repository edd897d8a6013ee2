"""The common start of all chat APIs: check the conversation, render its prompt, send it to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from quire.frontend.processor import Prompt
from quire.frontend.templates.chat import render_chat
from quire.serve.answer.form import AnswerForm
from quire.serve.answer.parser import PlainText
from quire.serve.answer.tools.tool_use import ToolUse, tool_use
from quire.serve.api.api_answer import OpenChat
from quire.serve.api.context import ServerContext, client_of, label_of, server_of, stream_interval
from quire.serve.api.prompts import length_field, prompt_job
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.fields import ConversationFields
from quire.serve.api.sampling_fields import check_fields, sampling_params
from quire.serve.api.tokens import count_ids
from quire.serve.async_engine import PromptJob
from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import bad_request
from quire.serve.observe.receipt import receipt_maker
from quire.types import SamplingParams


async def open_chat(
    request: Request,
    chat: ChatRequest,
    warnings: list[str],
    *,
    must_fit: bool = False,
    context: Sequence[int] = (),
) -> OpenChat:
    """Check a chat, render its prompt, and send it to the engine.

    Args:
        request: the HTTP request.
        chat: the conversation, in the form of OpenAI's chats.
        warnings: warnings for the answer; this function appends to them.
        must_fit: refuse a chat whose prompt leaves less room than the answer may take. Otherwise the answer ends
            where the context does, and a warning says so.
        context: token ids of an earlier conversation that this one continues.

    Raises:
        ApiError: 400 for fields that cannot be served, 404 for another model, 503 under overload.
        RequestError: for a prompt or parameters that cannot be served.
    """
    server = server_of(request)
    params = _check_params(server, chat)
    use = tool_use(chat)
    if use.forced and params.stop:
        warnings.append("stop has no effect on the tool call that tool_choice forces")
    client = client_of(request)
    template = server.templates.choose(chat.chat_template, bool(use.tools))
    if use.tools and "tools" not in template:
        warnings.append("the model does not see the tools: its chat template has no place for them")
    forms: list[AnswerForm] = []
    rendered = await _rendered_apart(server, client, chat, use, template)

    def make_job() -> PromptJob:
        prompt = chat_prompt(server, chat, use.tools, template) if rendered is None else rendered
        form = server.forms.choose(chat, use, template, prompt, params.structured_outputs)
        forms.append(form)
        return prompt_job(
            server,
            chat,
            _after(context, prompt, server),
            form.params(params),
            add_special_tokens=bool(chat.add_special_tokens),
            length_field=_length_field(chat),
            must_fit=must_fit,
            echo=bool(chat.return_prompt_text),
        )

    return await _open(request, chat, params, make_job, warnings, forms)


async def open_text(
    request: Request, chat: ChatRequest, prompt: str, warnings: list[str], context: Sequence[int] = ()
) -> OpenChat:
    """Send a prompt to the engine unchanged: no template renders it, and nothing in the answer is parsed.

    `chat` gives the other fields. The other arguments and the errors are those of `open_chat`.
    """
    server = server_of(request)
    params = _check_params(server, chat)

    def make_job() -> PromptJob:
        return prompt_job(
            server,
            chat,
            _after(context, prompt, server),
            params,
            add_special_tokens=chat.add_special_tokens is not False,
            length_field=_length_field(chat),
            must_fit=False,
        )

    return await _open(request, chat, params, make_job, warnings, [AnswerForm(PlainText)])


async def _open(
    request: Request,
    chat: ChatRequest,
    params: SamplingParams,
    make_job: Callable[[], PromptJob],
    warnings: list[str],
    forms: Sequence[AnswerForm],
) -> OpenChat:
    """Send the job of a chat to the engine. `forms` has its form once the job is made."""
    server, client = server_of(request), client_of(request)
    generation = await server.engine.generate(
        client,
        params.n,
        lambda: [make_job()],
        stream_interval(server, chat),
        chat.timeout,
        label_of(request),
    )
    warnings += generation.warnings
    receipt = receipt_maker(request, chat, generation)
    context = server.engine.info.max_model_len
    room = context - generation.prompt_tokens
    if _length_field(chat) and params.max_tokens is not None and params.max_tokens > room:
        warnings.append(f"the answer can have {room} tokens: more do not fit into max_model_len ({context})")
    model = server.check_model(chat.model)
    return OpenChat(server, model, params, generation, warnings, receipt, chat, forms[0])


async def count_prompt(
    request: Request, body: ConversationFields, make_chat: Callable[[], ChatRequest]
) -> int:
    """Count the tokens of the prompt of a request that would continue a conversation.

    Args:
        request: the HTTP request.
        body: its decoded body.
        make_chat: converts the body; called in a thread.

    Raises:
        ApiError: 400 for fields that cannot be served, 404 for another model, 503 under overload.
        RequestError: for messages that the template refuses.
    """
    server, client = server_of(request), client_of(request)
    server.check_model(body.model)

    def render() -> str:
        chat = make_chat()
        use = tool_use(chat)
        template = server.templates.choose(chat.chat_template, bool(use.tools))
        return chat_prompt(server, chat, use.tools, template)

    text = await server.templates.in_thread(client, body.chat_template, render)
    special = bool(body.add_special_tokens)
    return len(await server.counting.run(client, lambda: count_ids(server, text, special, "messages")))


def _length_field(chat: ChatRequest) -> str | None:
    return length_field(chat, "max_completion_tokens", "max_tokens")


def _check_params(server: ServerContext, chat: ChatRequest) -> SamplingParams:
    """Check the model and the fields of a chat; return its sampling parameters."""
    server.check_model(chat.model)
    check_fields(chat)
    _check_logprobs(chat, server.settings.max_logprobs)
    return _sampling_params(server, chat)


def _after(context: Sequence[int], prompt: str, server: ServerContext) -> Prompt:
    """Return a rendered prompt that follows `context`, without a second begin-of-sequence token."""
    if not context:
        return prompt
    engine = server.engine
    text = prompt.removeprefix(engine.tokenizer.special_tokens.get("bos_token", ""))
    return [*context, *engine.processor.prompt_ids(text, add_special_tokens=False)]


async def _rendered_apart(
    server: ServerContext, client: ApiClient, chat: ChatRequest, use: ToolUse, template: str
) -> str | None:
    """Render the prompt of a request that brings a template, in the thread for those; None for other requests.

    The tokenizer's threads stay free for requests without a template of their own.
    """
    if not chat.chat_template:
        return None
    return await server.templates.in_thread(
        client, chat.chat_template, lambda: chat_prompt(server, chat, use.tools, template)
    )


def _check_logprobs(chat: ChatRequest, max_logprobs: int) -> None:
    top = chat.top_logprobs
    if top and not chat.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if top is not None and top < 0:
        raise bad_request(f"top_logprobs must be at least 0, got {top}", "top_logprobs")
    if 0 <= max_logprobs < (top or 0):
        raise bad_request(
            f"top_logprobs must be at most {max_logprobs} (max_logprobs), got {top}", "top_logprobs"
        )


def _sampling_params(server: ServerContext, chat: ChatRequest) -> SamplingParams:
    engine = server.engine
    defaults = engine.processor.defaults
    max_tokens = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens")  # None: the rest of the context
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    return sampling_params(
        chat, defaults, max_tokens, logprobs, server.settings.max_logprobs, engine.info.vocab_size
    )


def chat_prompt(server: ServerContext, chat: ChatRequest, tools: list[dict[str, Any]], template: str) -> str:
    """Render the prompt of a chat with `template`. Raises RequestError for messages that the template refuses."""
    continues = bool(chat.continue_final_message)
    variables = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", chat.reasoning_effort)
    generation_prompt = chat.add_generation_prompt
    return render_chat(
        server.templates.renderer(chat.chat_template),
        server.engine.tokenizer,
        chat.messages,
        tools or None,
        not continues if generation_prompt is None else generation_prompt,
        continues,
        variables,
        chat.documents,
        template,
    )
