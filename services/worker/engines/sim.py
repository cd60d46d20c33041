"""The `sim` engine: deterministic tokens at a set speed inside this process, with scripted faults."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from headrace.errors import EngineBusyError, EngineError, EngineRequestError
from headrace.schemas.chunks import ChoiceDelta, EngineChunk, Usage
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.refusals import Refusal
from headrace.worker.engines.answer import Answer
from headrace.worker.engines.base import PROBE_PREFIX, EngineFacts, EngineUsage, MemoryUse, Resume
from headrace.worker.engines.bodies import stops_to_cut
from headrace.worker.engines.sim_memory import SimMemory
from headrace.worker.engines.sim_script import Script, SimOptions, make_script
from headrace.worker.engines.sim_text import SimText, num_prompt_tokens_of, prompt_text, sim_embedding

__all__ = ["SimEngine", "SimOptions"]

_PROCESS_BYTES: Final = 1 << 30


class SimEngine:
    """A simulated engine. Counters tell tests what was asked of it; they survive a restart.

    `num_calls` counts calls of `generate`, `num_started` those that ran, `num_aborted` those closed before their end,
    `num_failed` those that ended in an error, `kv_peak_tokens` and `num_running_peak` the most ever held at once. More
    requests than `max_concurrency`, or a prompt that does not fit, are `EngineBusyError`; a running request that
    outgrows the KV cache is an `EngineError`, so whoever admits too much is found out. Where it allocates as it goes
    there is no such refusal: it dies. Probes are in none of this, and cost nothing: `num_probes` counts them, and
    the next `num_probes_to_fail` fail.
    """

    def __init__(self, model: str, options: SimOptions) -> None:
        self._model = model
        self._told = self._options = options
        self._num_starts = 0
        self._started_at = 0.0
        self._is_started = False
        self._death = asyncio.Event()
        self._reason = ""
        self._sleepers: set[asyncio.Future[None]] = set()
        self.memory = SimMemory(options)
        self.num_probes = 0
        self.num_probes_to_fail = options.fail_probes
        self.num_calls = 0
        self.num_started = 0
        self.num_aborted = 0
        self.num_failed = 0
        self.num_running = 0
        self.num_running_peak = 0

    @property
    def kv_peak_tokens(self) -> int:
        """KV tokens held at most."""
        return self.memory.peak_tokens

    @property
    def facts(self) -> EngineFacts:
        """As the options say."""
        options = self._options
        return EngineFacts(
            name="sim",
            version="1",
            kv_capacity_tokens=self.memory.capacity_tokens,
            kv_memory=self.memory.kv_memory,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_concurrency,
        )

    async def start(self) -> None:
        """Ready after `start_s`, alive again if it had died."""
        await asyncio.sleep(self._options.start_s)
        self._num_starts += 1
        self._options = self._told.in_run(self._num_starts)
        self._started_at = asyncio.get_running_loop().time()
        self._death.clear()
        self.memory.clear()
        self._is_started = True

    async def count_prompt_tokens(self, request: InferenceRequest) -> int:
        """Words, and 4 for each message."""
        return num_prompt_tokens_of(request)

    async def usage(self) -> EngineUsage:
        """What runs, and how full the KV cache or what is left of the pool."""
        self._check_alive()
        return EngineUsage(
            num_running=self.num_running,
            kv_usage_ratio=self.memory.usage_ratio,
            memory_free_bytes=self.memory.free_bytes,
            memory_total_bytes=self._options.pool_bytes,
        )

    async def memory_use(self) -> tuple[MemoryUse, ...]:
        """What it has leaked since its start, beside what such a process has."""
        self._check_alive()
        leaked = self._options.leak_bytes_per_s * (asyncio.get_running_loop().time() - self._started_at)
        return (MemoryUse(kind="memory", used_bytes=_PROCESS_BYTES + int(leaked)),)

    async def check_health(self) -> None:
        """Raises if it died or was not started; a hang goes unnoticed, as with real engines."""
        self._check_alive()

    async def wait_died(self) -> str:
        """Returns once a scripted death, or `die`, has struck."""
        await self._death.wait()
        return self._reason

    async def stop(self) -> None:
        """Every running request ends in an `EngineError`."""
        self._is_started = False
        self._wake_all()

    def die(self, reason: str = "the simulated engine died") -> None:
        """Fail everything that runs, and everything asked until the next `start`."""
        self._reason = reason
        self._death.set()
        self._wake_all()

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
        if request_id.startswith(PROBE_PREFIX):
            yield await self._probed()
            return
        self.num_calls += 1
        self._check_alive()
        num_prompt = num_prompt_tokens_of(request)
        self._admit(request, num_prompt)
        script = make_script(self._options, request, max_tokens=max_tokens, resume=resume, ordinal=self.num_started)
        self.num_started += 1
        self.num_running += 1
        self.num_running_peak = max(self.num_running_peak, self.num_running)
        held = _Held(self)
        try:
            held.set(request.n, num_prompt)
            await self._wait(self._options.ttft_s * self._options.slow_factor)
            if request.op == "embeddings":
                yield self._embeddings(request, num_prompt)
            else:
                answer = Answer(
                    num_choices=request.n,
                    num_prompt_tokens=num_prompt + script.first,
                    stops=stops_to_cut(request),
                    is_resumed=script.first > 0,
                )
                chunks = self._chunks(request, script, answer, held)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
                yield answer.last_chunk()
        except EngineError:
            self.num_failed += 1
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += 1
            raise
        finally:
            held.set(0, 0)
            self.num_running -= 1

    async def _chunks(
        self, request: InferenceRequest, script: Script, answer: Answer, held: "_Held"
    ) -> AsyncGenerator[EngineChunk, None]:
        options = self._options
        prompt = prompt_text(request)
        num_prompt = num_prompt_tokens_of(request)
        indexes = range(request.n)
        texts = [SimText(seed=options.seed, model=self._model, prompt=prompt, index=index) for index in indexes]
        ids = tuple(range(num_prompt)) if options.token_ids else ()
        if request.op == "chat":
            roles = tuple(ChoiceDelta(index=index, role="assistant") for index in indexes)
            shown = answer.push(EngineChunk(choices=roles, prompt_token_ids=ids))
            if shown is not None:
                yield shown
            ids = ()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        place = script.first
        while place < script.end and not answer.is_finished:
            await self._strike(script.faults, place - script.first)
            num_tokens = min(options.tokens_per_chunk, script.end - place)
            pieces = tuple(_piece(index, texts[index], place, num_tokens, options.token_ids) for index in indexes)
            place += num_tokens
            held.set(len(texts), num_prompt + place - 1)
            shown = answer.push(EngineChunk(choices=pieces, prompt_token_ids=ids))
            ids = ()
            if shown is not None:
                yield shown
            if options.tokens_per_second:
                due = begun + (place - script.first) / options.tokens_per_second * options.slow_factor
                await self._wait(due - loop.time())
            else:
                await self._wait(0)
        await self._strike(script.faults, place - script.first)
        last = tuple(ChoiceDelta(index=index, finish_reason=script.finish_reason) for index in indexes)
        shown = answer.push(EngineChunk(choices=last))
        if shown is not None:
            yield shown

    async def _probed(self) -> EngineChunk:
        self.num_probes += 1
        await self._wait(0)
        if self.num_probes_to_fail:
            self.num_probes_to_fail -= 1
            raise EngineError("the simulated engine was told to fail its probes")
        last = ChoiceDelta(text="a", num_tokens=1, finish_reason="length")
        return EngineChunk(choices=(last,), usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2))

    def _admit(self, request: InferenceRequest, num_prompt: int) -> None:
        options = self._options
        if self.num_calls <= options.busy_first:
            raise EngineBusyError("the simulated engine was told to be busy")
        if self.num_calls <= options.busy_first + options.refuse_first:
            raise EngineRequestError(Refusal(code="invalid_value", message="the simulated engine was told to refuse"))
        if num_prompt >= options.max_model_len:
            message = f"the prompt has {num_prompt} tokens, the model's context length is {options.max_model_len}"
            raise EngineRequestError(Refusal(code="context_length_exceeded", message=message, param="messages"))
        if self.num_running >= options.max_concurrency:
            raise EngineBusyError(f"the simulated engine runs {self.num_running} requests already")
        if not self.memory.has_room(request.n * _in_blocks(num_prompt, options.block_size)):
            raise EngineBusyError(f"{self.memory.held_tokens} of {options.kv_tokens} KV tokens are in use")

    async def _strike(self, faults: dict[str, int], num_done: int) -> None:
        """Do what the script has for a request that has produced so many tokens."""
        if not faults:
            return
        if faults.get("die_after", num_done + 1) <= num_done:
            self.die()
            self._check_alive()
        if faults.get("error_after", num_done + 1) <= num_done:
            raise EngineError("the simulated engine was told to fail")
        if faults.get("cut_after", num_done + 1) <= num_done:
            raise EngineError("the engine ended its stream without a finish_reason")
        if faults.get("hang_after", num_done + 1) <= num_done:
            await self._wait(self._options.stall_s)
            raise EngineError(f"the engine sent nothing for {self._options.stall_s:g} s")

    def _embeddings(self, request: InferenceRequest, num_prompt: int) -> EngineChunk:
        given = request.body.get("input")
        inputs = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": sim_embedding(seed=self._options.seed, model=self._model, text=str(text)),
            }
            for index, text in enumerate(inputs)
        ]
        usage = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
        return EngineChunk(
            response={"object": "list", "data": data, "model": self._model, "usage": usage},
            usage=Usage(prompt_tokens=num_prompt, completion_tokens=0, total_tokens=num_prompt),
        )

    def _check_alive(self) -> None:
        if self._death.is_set():
            raise EngineError(self._reason)
        if not self._is_started:
            raise EngineError("the simulated engine is not started")

    async def _wait(self, delay_s: float) -> None:
        """Sleep, at least one turn of the loop; a death or a stop ends it at once with its error."""
        if delay_s <= 0:
            await asyncio.sleep(0)
        else:
            loop = asyncio.get_running_loop()
            sleeper = loop.create_future()
            self._sleepers.add(sleeper)
            handle = loop.call_later(delay_s, _wake, sleeper)
            try:
                await sleeper
            finally:
                handle.cancel()
                self._sleepers.discard(sleeper)
        self._check_alive()

    def _wake_all(self) -> None:
        for sleeper in self._sleepers:
            _wake(sleeper)

    def _hold(self, num_tokens: int) -> None:
        try:
            self.memory.hold(num_tokens)
        except MemoryError as error:
            self.die(str(error))
            self._check_alive()


class _Held:
    """The KV-cache tokens of one request, in whole blocks."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._num_tokens = 0

    def set(self, num_sequences: int, num_tokens_each: int) -> None:
        """Hold exactly this much. Raises `EngineError` when the cache has no more; it is held all the same."""
        wanted = num_sequences * _in_blocks(num_tokens_each, self._engine.facts.block_size)
        if wanted != self._num_tokens:
            grown, self._num_tokens = wanted - self._num_tokens, wanted
            self._engine._hold(grown)


def _piece(index: int, text: SimText, place: int, num_tokens: int, has_ids: bool) -> ChoiceDelta:
    places = range(place, place + num_tokens)
    return ChoiceDelta(
        index=index,
        text="".join(text.piece(at) for at in places),
        token_ids=tuple(text.token_id(at) for at in places) if has_ids else (),
        num_tokens=num_tokens,
    )


def _in_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size) * block_size


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
