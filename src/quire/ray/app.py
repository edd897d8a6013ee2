"""Quire as an application of Ray Serve: autoscaling replicas behind a prefix-aware router.

Each replica is an actor with a `quire serve` process beside it, so all APIs work as without Ray. The ingress reads a
request, and the router sends it to the replica that has seen the beginning of its prompt.

    from quire.ray import build_app
    from ray import serve

    serve.run(build_app("Qwen/Qwen3-0.6B", max_replicas=4))
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.ray.affinity import prompt_pieces
from quire.types import EngineDead

_START_S = 1800.0  # a model may have to be downloaded
_STOP_S = 40.0
# Headers that belong to one connection, or that the next one sets itself.
_HOP = {
    "host",
    "connection",
    "content-length",
    "transfer-encoding",
    "keep-alive",
    "upgrade",
    "accept-encoding",
}


class ForwardedRequest(NamedTuple):
    """An HTTP request on its way to a replica."""

    method: str
    path: str  # with the query
    headers: dict[str, str]
    body: bytes


class QuireReplica:
    """A replica: a `quire serve` process on the node of this actor."""

    def __init__(self, model: str, flags: list[str]) -> None:
        """Start the server and wait until it is ready.

        Raises:
            EngineDead: if it does not start.
        """
        command = [sys.executable, "-u", "-m", "quire", "serve", model, "--port", "0", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if found := re.search(r"serving on (http://\S+)", line):
                self._url = found[1]
                break
        else:
            raise EngineDead(f"quire serve ended with exit code {self._process.wait()}: {said[-2000:]}")
        asyncio.get_running_loop().run_in_executor(None, self._process.stdout.read)  # so that it never blocks
        self._http: aiohttp.ClientSession | None = None

    async def forward(self, pieces: list[bytes], request: ForwardedRequest) -> AsyncIterator[Any]:
        """Yield the status and headers of the answer, then its body piece by piece.

        Args:
            pieces: of the prompt, which the router reads.
            request: the request to forward.
        """
        if self._http is None:
            no_limits = aiohttp.ClientTimeout(total=None, sock_connect=10)
            self._http = aiohttp.ClientSession(timeout=no_limits, connector=aiohttp.TCPConnector(limit=0))
        async with self._http.request(
            request.method, self._url + request.path, headers=request.headers, data=request.body or None
        ) as answer:
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            yield answer.status, headers
            async for piece in answer.content.iter_any():
                yield piece

    async def check_health(self) -> None:
        """Raise EngineDead if the server has ended; Ray then replaces this actor."""
        if (code := self._process.poll()) is not None:
            raise EngineDead(f"quire serve ended with exit code {code}")

    async def __del__(self) -> None:
        """Let open requests finish, and end the server."""
        if self._http is not None:
            await self._http.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _STOP_S)
        self._process.kill()


class QuireIngress:
    """The HTTP side: it reads requests and passes on answers."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._forward = replicas.options(stream=True).forward

    async def __call__(self, request: Request) -> Response:
        """Answer a request by a replica."""
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        forwarded = ForwardedRequest(request.method, path, headers, body)
        answer = self._forward.remote(prompt_pieces(body), forwarded)
        status, answer_headers = await anext(aiter(answer))
        return StreamingResponse(answer, status, answer_headers)


def build_app(
    model: str = "demo",
    *,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_ongoing_requests: float = 64,
    max_ongoing_requests: int = 512,
    num_gpus: float = 0,
    num_cpus: float = 1,
    flags: list[str] | None = None,
    autoscaling: dict[str, Any] | None = None,
) -> serve.Application:
    """Return the application for `serve.run`.

    Args:
        model: model to serve, on every node under the same name.
        min_replicas: least number of replicas.
        max_replicas: largest number of replicas.
        target_ongoing_requests: open requests per replica above which replicas are added.
        max_ongoing_requests: open requests per replica above which further ones wait in Ray Serve.
        num_gpus: GPUs of each replica, such as `tensor_parallel_size`; all are on one node.
        num_cpus: cores of each replica that Ray reserves.
        flags: flags of `quire serve` for each replica, such as ["--tensor-parallel-size", "2"].
        autoscaling: further fields of Ray Serve's `AutoscalingConfig`, such as `upscale_delay_s`.
    """
    scaling = AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        target_ongoing_requests=target_ongoing_requests,
        **(autoscaling or {}),
    )
    replicas = serve.deployment(
        QuireReplica,
        name="QuireReplica",
        autoscaling_config=scaling,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        graceful_shutdown_timeout_s=_STOP_S,
        request_router_config=RequestRouterConfig(
            request_router_class="quire.ray.router.PrefixRequestRouter"
        ),
    ).bind(model, flags or [])
    ingress = serve.deployment(QuireIngress, name="QuireIngress", max_ongoing_requests=4096)
    return ingress.options(ray_actor_options={"num_cpus": 0}).bind(replicas)
