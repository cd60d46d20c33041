"""The `openai` engine: attaches to a running OpenAI-compatible server by its URL."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Final

import msgspec
from yarl import URL

from headrace.errors import ConfigError, EngineError, EngineStartError
from headrace.schemas.chunks import EngineChunk
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.base import EngineFacts, EngineUsage, KvMemory, MemoryUse, Resume
from headrace.worker.engines.bodies import Dialect, as_completion
from headrace.worker.engines.counting import count_prompt_tokens, prompt_token_ids
from headrace.worker.engines.detect import Findings, detect
from headrace.worker.engines.gauges import CACHE_CONFIG, KV_USAGE, steps_of, usage_of_metrics
from headrace.worker.engines.http import HttpAdapter, Target
from headrace.worker.engines.options import PositiveInt, Seconds
from headrace.worker.engines.silence import Silence
from headrace.worker.engines.vllm_versions import check_version

__all__ = ["OpenAIEngine", "OpenAIOptions", "root_of_url"]

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.25
_LOOK_S: Final = 0.5


class OpenAIOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the `openai` engine; None means found out from the server.

    `url` is the server's, with or without `/v1`. `served_model` is the model's name there, if it has another.
    `token_ids` asks for token ids with the text (only vLLM knows how to). `start_timeout_s` is how long the server
    may take to come up. `kv_bytes_per_token` is for a server that allocates its KV cache as it goes and tells no
    capacity: free memory of `memory_device` less `memory_reserve_bytes` bounds what runs (see `KvMemory`). The device
    is never guessed. `keeps_memory` is for one that holds on to what requests allocated. `priority`: it is a vLLM with
    `--scheduling-policy priority`, and is told what goes first. `hang_s` is for how long vLLM may compute no step while
    it has work of ours before it counts as hanging.
    """

    url: str
    served_model: str | None = None
    api_key: str | None = None
    kv_tokens: PositiveInt | None = None
    kv_bytes_per_token: PositiveInt | None = None
    memory_reserve_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] | None = None
    memory_device: str | None = None
    keeps_memory: bool = False
    max_concurrency: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] | None = None
    token_ids: bool | None = None
    priority: bool = False
    connect_s: Seconds = 5.0
    stall_s: Seconds = 30.0
    hang_s: Seconds = 20.0
    start_timeout_s: Seconds = 120.0

    def __post_init__(self) -> None:
        """Rules between options. Raises ConfigError."""
        if self.kv_bytes_per_token is None:
            for key in ("memory_reserve_bytes", "memory_device", "keeps_memory"):
                if getattr(self, key) not in (None, False):
                    raise ConfigError(f"engine openai: option {key}: only with kv_bytes_per_token")
        elif self.kv_tokens is not None:
            raise ConfigError("engine openai: options kv_tokens and kv_bytes_per_token: one of them, not both")
        elif not self.memory_device or self.memory_device == "engine":
            raise ConfigError(
                "engine openai: option kv_bytes_per_token: needs memory_device: host, gpu, or a GPU's UUID or number"
            )

    @property
    def kv_memory(self) -> KvMemory | None:
        """How the server takes its memory, if that was told."""
        if self.kv_bytes_per_token is None or self.memory_device is None:
            return None
        return KvMemory(
            bytes_per_token=self.kv_bytes_per_token,
            reserve_bytes=self.memory_reserve_bytes,
            device=self.memory_device,
            is_kept=self.keeps_memory,
        )


def root_of_url(url: str) -> URL:
    """The server's root, without `/v1`. Raises `ConfigError`."""
    try:
        root = URL(url.strip())
    except ValueError:
        root = URL()
    if root.scheme not in ("http", "https") or not root.host:
        raise ConfigError(f"engine openai: option url={url[:200]!r}: expected http(s)://HOST[:PORT][/PATH][/v1]")
    path = root.path.rstrip("/").removesuffix("/v1")
    return root.with_query(None).with_fragment(None).with_path(path or "/")


class OpenAIEngine:
    """An attached server. It never dies by itself, as nobody here owns its process: `check_health` tells."""

    def __init__(
        self, model: str, options: OpenAIOptions, *, name: str = "openai", can_keep_alive: bool = True
    ) -> None:
        self._model = model
        self._options = options
        self._name = name
        self._root = root_of_url(options.url)
        self._http = HttpAdapter(
            self._root,
            api_key=options.api_key,
            connect_s=options.connect_s,
            stall_s=options.stall_s,
            can_keep_alive=can_keep_alive,
        )
        self._findings: Findings | None = None
        self._target = Target(model=model)
        self._silence = Silence()
        self._facts = EngineFacts(name=name)

    @property
    def facts(self) -> EngineFacts:
        """Options where given, else what the server said."""
        return self._facts

    @property
    def lacking(self) -> str:
        """What a started vLLM does not tell and admission needs, with its version; empty if nothing is missing."""
        if self._findings is None or self._findings.dialect is not Dialect.VLLM:
            return ""
        named = f"vLLM {self._findings.version or 'of unknown version'}"
        if self._facts.kv_capacity_tokens is None and self._options.kv_memory is None:
            return (
                f"{named} tells no capacity: {CACHE_CONFIG} with block_size and num_gpu_blocks is not in its /metrics; "
                "run it without --disable-log-stats, or tell the capacity (kv_tokens)"
            )
        if not self._findings.has_kv_usage and self._options.kv_memory is None:
            return (
                f"{named} tells no usage of its KV cache: neither {' nor '.join(KV_USAGE)} is in its /metrics; "
                "run it without --disable-log-stats, or take a version that has one of them"
            )
        return ""

    async def start(self) -> None:
        """Wait until the server answers, and find out what it is. A vLLM must have made a token, too: its server
        answers for an engine core that does not.
        """
        await self._http.open()
        self._silence = Silence()
        try:
            self._findings = findings = await self._until_answering()
        except BaseException:
            await self._http.close()
            raise
        options = self._options
        is_vllm = findings.dialect is Dialect.VLLM
        self._target = Target(
            model=findings.served_model,
            dialect=findings.dialect,
            wants_token_ids=is_vllm if options.token_ids is None else options.token_ids,
            takes_priority=is_vllm and options.priority,
        )
        self._facts = EngineFacts(
            name=self._name,
            version=findings.version,
            kv_capacity_tokens=options.kv_tokens or findings.kv_capacity_tokens,
            is_capacity_told=options.kv_tokens is not None,
            kv_memory=options.kv_memory,
            block_size=options.block_size or findings.block_size or 1,
            max_model_len=options.max_model_len or findings.max_model_len,
            max_num_seqs=options.max_concurrency or findings.max_num_seqs,
            port=self._root.port,
        )
        if why := self.lacking:
            log.warning("%s", why)

    async def count_prompt_tokens(self, request: InferenceRequest) -> int:
        """By the tokenizer of vLLM or llama.cpp; with any other server the request's own estimate."""
        timeout_s = self._options.stall_s
        counted = await count_prompt_tokens(self._http, self._target, request, timeout_s=timeout_s)
        return request.num_prompt_tokens_estimate if counted is None else counted

    async def generate(
        self,
        request: InferenceRequest,
        *,
        max_tokens: int,
        request_id: str,
        resume: Resume | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `Engine.generate`."""
        if resume is not None and self._goes_on_by_tokens(resume):
            timeout_s = self._options.stall_s
            prompt = await prompt_token_ids(self._http, self._target, request, timeout_s=timeout_s)
            if prompt:
                request = as_completion(request, prompt)
                resume = msgspec.structs.replace(resume, prompt_token_ids=prompt)
        chunks = self._http.generate(
            request,
            self._target,
            max_tokens=max_tokens,
            request_id=request_id,
            num_prompt_tokens=request.num_prompt_tokens_estimate,
            resume=resume,
            priority=priority,
        )
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def usage(self) -> EngineUsage:
        """From the server's metrics, where it has them; else only what this process runs there."""
        if self._findings is None or not self._findings.has_metrics:
            return EngineUsage(num_running=self._http.num_running)
        text = await self._metrics()
        found = usage_of_metrics(text)
        if found is None:
            raise EngineError("the engine's metrics cannot be read")
        if steps := steps_of(text):
            self._silence.note(steps, has_work=self._http.num_running > 0, now=time.monotonic())
        return msgspec.structs.replace(found, silent_s=self._silence.seconds)

    async def memory_use(self) -> tuple[MemoryUse, ...]:
        """Nothing: somebody else's processes may be anywhere."""
        return ()

    async def check_health(self) -> None:
        """By `/health`, or by `/v1/models` (any status below 500) where the server has no `/health`; and by whether
        vLLM computed anything lately, as `usage` saw it.
        """
        path = self._findings.health_path if self._findings is not None else "/health"
        reply = await self._http.get(path, timeout_s=self._options.connect_s)
        if reply.status != 200 and (path == "/health" or reply.status >= 500):
            raise EngineError(f"the engine's health is HTTP {reply.status}")
        if self._silence.seconds > self._options.hang_s:
            raise EngineError(f"the engine has work and computed nothing for {self._silence.seconds:.0f} s")

    async def wait_died(self) -> str:
        """Never returns."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        """Close the connections; the server itself goes on."""
        await self._http.close()

    def _goes_on_by_tokens(self, resume: Resume) -> bool:
        return self._target.dialect is Dialect.VLLM and bool(resume.token_ids) and not resume.has_reasoning

    async def _until_answering(self) -> Findings:
        reason = "nothing tried"
        is_told = False
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                while True:
                    try:
                        findings = await detect(self._http, model=self._model, served_model=self._options.served_model)
                        if findings.dialect is Dialect.VLLM:
                            check_version(findings.version)
                            reason = "it answers, but makes no token"
                            await self._until_it_computes(findings.served_model)
                        return findings
                    except EngineStartError:
                        raise
                    except EngineError as error:
                        reason = str(error)
                    if not is_told:
                        log.info("waiting for the engine at %s: %s", self._root.origin(), reason)
                        is_told = True
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            waited_s = self._options.start_timeout_s
            raise EngineStartError(f"no engine at {self._root} after {waited_s:g} s: {reason}") from None

    async def _until_it_computes(self, served_model: str) -> None:
        """Return once it has made a token for us, or is seen to compute for others, who may be many.

        Raises `EngineError` where it fails to.
        """
        making = asyncio.ensure_future(self._make_a_token(served_model))
        try:
            before = steps_of(await self._metrics())
            while True:
                await asyncio.wait({making}, timeout=_LOOK_S)
                if making.done():
                    return await making
                if steps_of(await self._metrics()) != before:
                    return None
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    async def _metrics(self) -> str:
        reply = await self._http.get("/metrics", timeout_s=self._options.connect_s)
        return reply.body.decode(errors="replace") if reply.status == 200 else ""

    async def _make_a_token(self, served_model: str) -> None:
        """Raises `EngineError` where that fails. A refusal is an answer too: a model may know no completions."""
        body = {"model": served_model, "prompt": "a", "max_tokens": 1}
        reply = await self._http.post("/v1/completions", body, timeout_s=self._options.start_timeout_s)
        if reply.status >= 500 and reply.status != 501:
            raise EngineError(f"the engine answers HTTP {reply.status} to a completion of one token")
