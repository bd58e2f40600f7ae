"""The engine's thread: what one request does or suffers is nothing to another."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

import looplm
from looplm.inference import capacity
from looplm.serving.worker import Busy, Call, Delta, EngineFailed, EngineWorker, Finished, Ticket

PARAMS = looplm.SamplingParams(max_tokens=8)
LONG = looplm.SamplingParams(max_tokens=1500, ignore_eos=True)


def ticket(prompt: list[int] | None = None, sampling: looplm.SamplingParams = PARAMS, **options: Any) -> Ticket:
    return Ticket(prompt=prompt or [317, 1630, 10], sampling=sampling, **options)


def run(engine: looplm.Engine, work: Callable[[EngineWorker], Awaitable[None]], **options: Any) -> None:
    before = threading.enumerate()

    async def main() -> None:
        worker = EngineWorker(engine, **options)
        worker.start()
        try:
            async with asyncio.timeout(60):
                await work(worker)
        finally:
            await worker.close()
        assert worker.open_samples == 0 or not worker.alive

    asyncio.run(main())
    assert set(threading.enumerate()) <= set(before)


async def text_of(worker: EngineWorker, call: Call) -> list[str | None]:
    texts: dict[int, str | None] = {}
    while call.open_samples:
        one, event = await worker.next(call)
        if isinstance(event, Finished):
            # Whatever runs beside it or before it: the passes that it took part in, its prompt apart.
            assert event.weight_passes == sum(event.result.loops[1:])
            texts[call.tickets.index(one) * one.sampling.n + event.sample] = event.result.text
    return [texts[i] for i in sorted(texts)]


def expected(make_engine: Callable[..., looplm.Engine], *prompts: list[int]) -> list[str | None]:
    return [result.text for result in make_engine().generate(list(prompts), PARAMS)]


def test_deltas_join_to_the_result(make_engine: Callable[..., looplm.Engine]) -> None:
    async def work(worker: EngineWorker) -> None:
        call = Call([ticket(streaming=True, top=2)])
        worker.submit(call)
        deltas: list[Delta] = []
        while call.open_samples:
            _, event = await worker.next(call)
            if isinstance(event, Delta):
                deltas.append(event)
            else:
                result = event.result
                assert event.weight_passes == sum(result.loops[1:])
        assert "".join(delta.text for delta in deltas) == result.text
        assert [token for delta in deltas for token in delta.token_ids] == result.token_ids
        assert [loop for delta in deltas for loop in delta.loops] == result.loops
        tops = [row for delta in deltas for row in delta.alternatives]
        assert [row[0][0] for row in tops] == result.token_ids and all(len(row) == 2 for row in tops)

    run(make_engine(), work)


def test_a_released_call_ends_at_once(make_engine: Callable[..., looplm.Engine]) -> None:
    engine, ended = make_engine(), []

    async def work(worker: EngineWorker) -> None:
        long, short = Call([ticket(sampling=LONG, streaming=True)]), Call([ticket([5, 6])])
        worker.submit(long)
        await worker.next(long)
        worker.submit(short)
        worker.release(long)
        worker.release(long)
        assert worker.open_samples == 1
        assert await text_of(worker, short) == expected(make_engine, [5, 6])

    run(engine, work, on_finished=lambda request: ended.append(request.finish_reason))
    assert sorted(ended) == ["cancelled", "length"] and engine.num_unfinished == 0
    assert engine.stats.generated_tokens < 1000


def test_room_is_bounded(make_engine: Callable[..., looplm.Engine]) -> None:
    async def work(worker: EngineWorker) -> None:
        assert worker.capacity == 3
        first = Call([ticket(sampling=LONG), ticket(sampling=LONG)])
        worker.submit(first)
        with pytest.raises(Busy, match="2 texts run or wait, at most 3 may, and this asks for 2 more"):
            worker.submit(Call([ticket(), ticket()]))
        last = Call([ticket()])
        worker.submit(last)
        worker.release(first)
        worker.release(last)
        again = Call([ticket(), ticket(), ticket()])
        worker.submit(again)
        assert len(await text_of(worker, again)) == 3

    run(make_engine(max_batch=2), work, max_waiting=1)


def test_a_prompt_that_cannot_run_fails_alone(make_engine: Callable[..., looplm.Engine]) -> None:
    async def work(worker: EngineWorker) -> None:
        bad, good = Call([ticket([99999])]), Call([ticket()])
        worker.submit(bad)
        worker.submit(good)
        with pytest.raises(looplm.UserError, match="99999"):
            await worker.next(bad)
        worker.release(bad)
        assert await text_of(worker, good) == expected(make_engine, [317, 1630, 10])

    run(make_engine(), work)


class Failing(looplm.Engine):
    """An engine whose steps fail when it is told so."""

    fault: Exception | None = None
    cancelling: Exception | None = None

    def step(self) -> Any:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return super().step()

    def cancel(self, requests: Any) -> None:
        if self.cancelling is not None:
            raise self.cancelling
        super().cancel(requests)


def test_a_step_that_fails_ends_what_ran_and_no_more(model: Any, tokenizer: Any) -> None:
    engine = Failing(model, tokenizer)

    async def work(worker: EngineWorker) -> None:
        call = Call([ticket(sampling=LONG, streaming=True)])
        worker.submit(call)
        await worker.next(call)
        engine.fault = RuntimeError("overheated")
        with pytest.raises(EngineFailed, match="RuntimeError: overheated"):
            while True:
                await worker.next(call)
        worker.release(call)
        after = Call([ticket()])
        worker.submit(after)
        assert await text_of(worker, after) and worker.alive

    run(engine, work)


def test_what_the_system_has_no_memory_for_fails_alone(
    make_engine: Callable[..., looplm.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    free = int(capacity.bytes_for(engine.model.model, "per_loop", 2, 4) / capacity.MOST_OF_FREE) + 1
    monkeypatch.setattr(capacity, "free_bytes", lambda device: free)

    async def work(worker: EngineWorker) -> None:
        long, short = Call([ticket([317] * 100)]), Call([ticket()])
        worker.submit(long)
        worker.submit(short)
        _, event = await worker.next(long)
        assert isinstance(event, Finished) and event.result.finish_reason == "error"
        assert "No memory for" in (event.result.error or "")
        worker.release(long)
        assert await text_of(worker, short) == expected(make_engine, [317, 1630, 10])

    run(engine, work)


def test_when_the_thread_ends_nobody_waits_for_ever(model: Any, tokenizer: Any) -> None:
    engine = Failing(model, tokenizer)

    async def work(worker: EngineWorker) -> None:
        call = Call([ticket(sampling=LONG, streaming=True)])
        worker.submit(call)
        await worker.next(call)
        engine.cancelling = RuntimeError("beyond repair")
        worker.release(Call([ticket()]))
        engine.fault = RuntimeError("overheated")
        with pytest.raises(EngineFailed, match="beyond repair|overheated"):
            while True:
                await worker.next(call)
        while worker.alive:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineFailed, match="shutting down"):
            worker.submit(Call([ticket()]))

    run(engine, work)


def test_a_text_whose_model_breaks_ends_alone(model: Any, tokenizer: Any) -> None:
    """A screen that raises stands for a model that breaks: the engine ends that request with an error."""
    import copy

    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = float("nan")

    async def work(worker: EngineWorker) -> None:
        bad, good = Call([ticket([7])]), Call([ticket([5, 6])])
        worker.submit(bad)
        worker.submit(good)
        _, event = await worker.next(bad)
        assert isinstance(event, Finished) and event.result.finish_reason == "error"
        (text,) = await text_of(worker, good)
        assert text is not None

    run(looplm.Engine(broken, tokenizer), work)


def test_closing_ends_what_runs(make_engine: Callable[..., looplm.Engine]) -> None:
    async def main() -> None:
        worker = EngineWorker(make_engine())
        worker.start()
        call = Call([ticket(sampling=LONG)])
        worker.submit(call)
        await worker.close()
        with pytest.raises(EngineFailed, match="shutting down"):
            await worker.next(call)

    asyncio.run(main())


def test_it_answers_in_text(model: Any) -> None:
    with pytest.raises(looplm.UserError, match="no tokenizer"):
        EngineWorker(looplm.Engine(model))
